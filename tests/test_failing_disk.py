"""A full disk, a folder that cannot be written, a jumping clock: one clear error, or the same end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from killing import TASKS

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_a_failing_disk_is_one_clear_error_and_a_jumping_clock_changes_nothing(task: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "failing_disk.py"), str(tmp_path), task]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 2, done.stdout

"""Kills at random points of long work; folders that two processes want."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from killing import TASKS

from cofire.errors import FileError
from cofire.files.lock import alone_in

HERE = Path(__file__).parent


@pytest.mark.slow
def test_killed_work_goes_on_to_the_same_end(tmp_path: Path) -> None:
    """In a process of its own: it forks before anything was computed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "killing.py"), "3", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(TASKS)
    assert all(int(line.split()[1]) >= 1 for line in done.stdout.splitlines()), done.stdout


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code = (
        f"from pathlib import Path; from cofire.files.lock import alone_in\nwith alone_in(Path({str(folder)!r})): pass"
    )
    command = [sys.executable, "-c", code]
    with alone_in(folder):
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        with pytest.raises(FileError, match="is in use by another process; wait until it has ended"), alone_in(folder):
            pass
    assert other.returncode == 1
    assert "is in use by another process" in other.stderr
    assert subprocess.run(command, check=False).returncode == 0
    assert not folder.exists()  # made for the lock, and empty


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from cofire.files.lock import alone_in\n"
        f"with alone_in(Path({str(tmp_path)!r})): os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode < 0
    with alone_in(tmp_path):
        pass

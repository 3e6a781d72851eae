"""Kills, full disks and jumping clocks: long work goes on to the same end; folders that two processes want."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from killed_methods import recipes
from killing import TASKS

from cofire.errors import FileError
from cofire.files.lock import alone_in

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(600)  # half a minute each; on a busy machine ten times that


def run(*arguments: str) -> str:
    """What a script of this folder prints; in a process of its own, for it forks before anything was computed."""
    script, *others = arguments
    command, environment = [sys.executable, str(HERE / script), *others], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_killed_work_goes_on_to_the_same_end(tmp_path: Path) -> None:
    lines = run("killing.py", "3", str(tmp_path)).splitlines()
    assert [line.split()[0] for line in lines] == list(TASKS)
    assert all(int(line.split()[1]) >= 1 for line in lines), lines


@pytest.mark.slow
def test_every_method_killed_in_its_training_goes_on_to_the_same_end(tmp_path: Path) -> None:
    assert run("killed_methods.py", str(tmp_path)).splitlines() == list(recipes())


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    """The script compares weights, results and files; `run` fails with what it said."""
    run("killed_training.py", str(tmp_path))


@pytest.mark.slow
def test_a_failing_disk_is_one_clear_error_and_a_jumping_clock_changes_nothing(tmp_path: Path) -> None:
    lines = run("failing_disk.py", str(tmp_path)).splitlines()
    assert [line.split()[0] for line in lines] == list(TASKS)
    assert all(int(line.split()[1]) >= 2 for line in lines), lines


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

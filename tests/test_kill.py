"""SIGKILL of a real `cofire train`, wherever it hurts most: the same command goes on to the same weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cofire.files.tensors import read_tensors

RECIPE = """
[data]
name = "digits"
batch_size = 128
augment = "crop"
pad = 1
val = 200

[backbone]
name = "resnet8_digits"

[gate]
ratio = 0.8

[train]
epochs = 3
lr = 0.05
schedule = "cosine"
checkpoint_steps = 4
"""

# Runs the command line, but ends the process with SIGKILL in the n-th call of a function. A checkpoint is a
# write to a temporary file (Path.write_bytes), its fsync, its rename, and the fsync of the folder.
DYING = """
import os, signal, sys
name, place, count, path = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
sys.argv = ["cofire", *sys.argv[5:]]
from pathlib import Path
module = {"write_bytes": Path, "replace": os, "fsync": os}[name]
original, calls = getattr(module, name), 0
def dying(*args, **options):
    global calls
    target = str(args[0])  # the file; for fsync a number
    calls += path in target or name == "fsync"
    if calls < count:
        return original(*args, **options)
    if place == "middle":  # half of the bytes are there
        original(*args, **options)
        os.truncate(target, os.path.getsize(target) // 2)
    elif place == "after":
        original(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(module, name, dying)
import cofire.cli
cofire.cli.main()
"""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def arguments(recipe: Path, out: Path) -> list[str]:
    return ["train", str(recipe), "--out", str(out), "--json"]


def run_to_the_end(recipe: Path, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-c", "from cofire.cli import main; main()", *arguments(recipe, out)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def killed_in_call(recipe: Path, out: Path, function: str, place: str, count: int, path: str = "") -> None:
    """Run until the ``count``-th call of ``function`` whose file name has ``path`` in it."""
    command = [sys.executable, "-c", DYING, function, place, str(count), path, *arguments(recipe, out)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, (function, place, count, done.returncode, done.stderr)


def killed_from_outside(recipe: Path, out: Path, delay: float) -> None:
    """Run until the log has grown, wait a little, kill."""
    command = [sys.executable, "-c", "from cofire.cli import main; main()", *arguments(recipe, out)]
    log = out / "log.jsonl"
    before = log.stat().st_mtime_ns if log.exists() else 0
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (log.exists() and log.stat().st_mtime_ns > before):
        time.sleep(0.005)
    time.sleep(delay)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def steps_done(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    recipe, whole, killed = tmp_path / "recipe.toml", tmp_path / "whole", tmp_path / "killed"
    recipe.write_text(RECIPE)
    expected = run_to_the_end(recipe, whole)

    killed_in_call(recipe, killed, "write_bytes", "before", 2, "step-")  # before the first checkpoint of a step
    assert steps_done(killed) == ["step-00000000.safetensors"]
    killed_in_call(recipe, killed, "write_bytes", "middle", 2, "step-")  # half a checkpoint written
    assert list((killed / "checkpoints").glob(".*.tmp"))
    killed_in_call(recipe, killed, "fsync", "before", 9)  # written, but not yet known to be on disk
    killed_in_call(recipe, killed, "replace", "before", 1, "best-")  # about to rename the best weights
    killed_in_call(recipe, killed, "replace", "after", 1, "step-")  # renamed; older checkpoints not yet dropped
    killed_from_outside(recipe, killed, delay=0.1)  # at no special point
    killed_in_call(recipe, killed, "write_bytes", "middle", 1, "model.")  # trained, while the model is saved
    killed_in_call(recipe, killed, "replace", "before", 1, "result.json")  # all but done

    result = run_to_the_end(recipe, killed)
    ours, _ = read_tensors(killed / "model.safetensors")
    theirs, _ = read_tensors(whole / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert not list(killed.rglob("*.tmp"))
    assert not list(killed.rglob(".*"))
    assert result["test"] == expected["test"]
    for table in (*result["epochs"], *expected["epochs"]):
        del table["seconds"]
    assert result["epochs"] == expected["epochs"]

"""SIGKILL of `cofire train` wherever it hurts most: ``python tests/killed_training.py FOLDER``.

The same command goes on to the same weights. Each try is a fork of this process, which has imported everything and
computed nothing, so that ten tries cost one import.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimisers do, in two seconds: here once for all forks

import cofire.cli
from cofire.files.tensors import read_tensors

RECIPE = """
[data]
name = "synthetic"
batch_size = 16
augment = "crop"
pad = 1
val = 16
args = {train = 176, test = 16, shape = [1, 8, 8]}

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

FUNCTIONS: dict[str, Any] = {"write_bytes": Path, "replace": os, "fsync": os}


def arguments(recipe: Path, out: Path) -> list[str]:
    return ["train", str(recipe), "--out", str(out), "--json"]


def forked(recipe: Path, out: Path, before: Callable[[], None] = lambda: None) -> int:
    """Process of the command line, in a fork of this one, once it has called ``before``; what it says is in files."""
    child = os.fork()
    if child:
        return child
    code: Any = 1
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(recipe.with_name(name), os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
        sys.argv = ["cofire", *arguments(recipe, out)]
        before()
        cofire.cli.main()
        code = 0
    except SystemExit as done:
        code = done.code or 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def ended(child: int) -> int:
    """Its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_to_the_end(recipe: Path, out: Path) -> dict[str, Any]:
    code = ended(forked(recipe, out))
    assert code == 0, recipe.with_name("stderr").read_text()
    result: dict[str, Any] = json.loads(recipe.with_name("stdout").read_text())
    return result


def killed_in_call(recipe: Path, out: Path, function: str, place: str, count: int, path: str = "") -> None:
    """Run until the ``count``-th call of ``function`` whose file name has ``path`` in it.

    A checkpoint is a write to a temporary file (Path.write_bytes), its fsync, its rename, and the fsync of the folder.
    """

    def patch() -> None:
        owner, left = FUNCTIONS[function], [count]
        original = getattr(owner, function)

        def dying(*args: Any, **options: Any) -> Any:
            target = str(args[0])  # the file; for fsync a number
            left[0] -= path in target or function == "fsync"
            if left[0] > 0:
                return original(*args, **options)
            if place != "before":
                original(*args, **options)
            if place == "middle":  # half of the bytes are there
                os.truncate(target, os.path.getsize(target) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, function, dying)

    code = ended(forked(recipe, out, patch))
    assert code == -signal.SIGKILL, (function, place, count, code, recipe.with_name("stderr").read_text())


def killed_from_outside(recipe: Path, out: Path, delay: float) -> None:
    """Run until the log has grown, wait a little, kill."""
    log = out / "log.jsonl"
    before = log.stat().st_mtime_ns if log.exists() else 0
    child = forked(recipe, out)
    while not (log.exists() and log.stat().st_mtime_ns > before):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before it was killed"
        time.sleep(0.005)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL


def steps_done(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))


def check(folder: Path) -> None:
    recipe, whole, killed = folder / "recipe.toml", folder / "whole", folder / "killed"
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


if __name__ == "__main__":
    check(Path(sys.argv[1]))

"""SIGKILL at random points of long work, also inside writes: ``python tests/killing.py POINTS FOLDER`` (``make kill``).

Each try is a fork of this process, which has imported everything and computed nothing. A try dies in the n-th call of
one of the functions that change the disk: before it, in the middle of it, or after it. Then the same work is done to
the end, and its files must be those of work that was never killed.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch._dynamo  # optimisers do, in two seconds: here once for all forks

import cofire
from cofire.experiments.recipes import read_experiment
from cofire.experiments.runs import train_experiment

RECIPE = """
[data]
name = "synthetic"
batch_size = 16
val = 16
args = {{train = 176, test = 16, shape = [1, 8, 8]}}

[backbone]
name = "resnet8_digits"

{part}

[train]
epochs = 2
lr = 0.05
select = "{select}"
checkpoint_steps = 4
"""


def train(folder: Path) -> None:
    train_with("[gate]\nratio = 0.8", folder)


def prune(folder: Path) -> None:
    train_with('[prune]\ntype = "L1"\nmacs = 0.5', folder)


def train_with(part: str, folder: Path, select: str = "best") -> None:
    """A run of two epochs of ten steps; ``part``: the section of its recipe that names a method."""
    recipe = folder.with_name("recipe.toml")
    recipe.write_text(RECIPE.format(part=part, select=select))
    train_experiment(read_experiment(recipe), folder)


def prepare(folder: Path) -> None:
    """Pictures into shards."""
    from PIL import Image

    from cofire.data.layouts import prepare

    origin = folder.with_name("pictures")
    for part in ("train", "val"):
        for label in ("a", "b"):
            (origin / part / label).mkdir(parents=True, exist_ok=True)
            for number in range(6):
                path = origin / part / label / f"{number}.png"
                if not path.exists():
                    Image.new("RGB", (300 + number, 280), (number * 40, 0, 0)).save(
                        folder.with_name(f"{os.getpid()}.png")
                    )
                    os.rename(folder.with_name(f"{os.getpid()}.png"), path)
    prepare(origin, folder)


def compile(folder: Path) -> None:
    """A program and its tuning; the tuning is timed, so that it may be another each time."""
    torch.manual_seed(0)
    model = cofire.create_backbone("resnet8_digits").eval()
    cofire.compile(model).save(folder / "model.cofire")


def compare(folder: Path) -> None:
    """A soft method, whose callback is resumed, and one whose knob is searched; from a baseline beside the folder."""
    dense = folder.with_name("dense")
    train_with("", dense)
    recipe = folder.with_name("compared.toml")
    recipe.write_text(recipe.with_name("recipe.toml").read_text())
    options = [f"backbone.weights={dense}", "train.epochs=1", "train.distill=0.5"]
    cofire.compare([recipe], methods="SFP,FTWT", out=folder, overrides=options, rounds=0)


TASKS: dict[str, Callable[[Path], None]] = {
    "train": train,
    "prune": prune,
    "prepare": prepare,
    "compile": compile,
    "compare": compare,
}
FUNCTIONS = {"write_bytes": Path, "replace": os, "fsync": os, "unlink": Path}
VOLATILE = {"result.json", "log.jsonl", "model.cofire.tuning", "comparison.json"}  # hold times


def content(folder: Path) -> dict[str, str]:
    """Every file but those that hold times, as a digest."""
    timed = [path for path in folder.rglob("*") if path.name in VOLATILE or path.parent.name == "checkpoints"]
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path not in timed]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def in_a_fork(task: Callable[[Path], None], folder: Path, dying: tuple[int, str, str] | None = None) -> int:
    """Exit code of the work in a child, negative for a signal; ``dying``: what `_die_in` takes."""
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)
            if dying:
                _die_in(*dying)
            task(folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _die_in(count: int, place: str, part: str) -> None:
    """Before, in the ``middle`` of or after the ``count``-th call whose first argument, a path, has ``part`` in it."""
    left = [count]

    def patched(original: Any, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= part in str(args[0])
            if left[0] > 0:
                return original(*args, **options)
            if place == "middle" and name == "write_bytes":
                with open(args[0], "wb") as file:
                    file.write(args[1][: len(args[1]) // 2])
            elif place != "before":
                original(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name, owner in FUNCTIONS.items():
        setattr(owner, name, patched(getattr(owner, name), name))


def killed(name: str, points: int, folder: Path, seed: int = 0) -> int:
    """Kills the work ``points`` times, finishes it, compares; returns how many tries died."""
    task, random, died = TASKS[name], Random(seed), 0
    whole, tried = folder / f"{name}-whole", folder / f"{name}-killed"
    assert in_a_fork(task, whole) == 0, f"{name} fails without being killed"
    for _ in range(points):
        code = in_a_fork(task, tried, (random.randint(1, 12), random.choice(["before", "middle", "after"]), ""))
        assert code in (0, -signal.SIGKILL), f"{name}: a try after a kill ends with {code}"
        died += code != 0
        if code == 0:  # it is done: from the start again
            assert content(tried) == content(whole), name
            for path in sorted(tried.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    assert in_a_fork(task, tried) == 0, f"{name} does not go on after kills"
    assert content(tried) == content(whole), f"{name} ends otherwise after kills"
    return died


if __name__ == "__main__":
    for name in TASKS:
        print(
            name,
            killed(name, int(sys.argv[1]), Path(sys.argv[2])),
            "of",
            sys.argv[1],
            "tries died; same end",
            flush=True,
        )

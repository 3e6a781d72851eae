"""Long work on a full or read-only disk and under a clock that jumps: ``python tests/failing_disk.py FOLDER [TASK]``.

The work is that of killing.py, each try again a fork. On a failing disk a try must end with one clear error and leave
no file half-written; then the disk is good again, and the work must come to the same end as if nothing had been.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from killing import TASKS, content, in_a_fork
from safetensors import safe_open

from cofire.errors import FileError

FAILURES = {"full": errno.ENOSPC, "read-only": errno.EROFS}
CLEAR = 3  # exit code of a try that ends with a clear error
WRITING: list[tuple[Any, str]] = [(Path, "write_bytes"), (os, "replace"), (os, "open"), (os, "fsync"), (Path, "mkdir")]


def on_a_failing_disk(task: Callable[[Path], None], failure: str, calls: int) -> Callable[[Path], None]:
    """``task`` with a disk that takes ``calls`` more changes, and none after; it exits with `CLEAR` as it should."""

    def work(folder: Path) -> None:
        left = [calls]
        for owner, name in WRITING:
            setattr(owner, name, _failing(getattr(owner, name), FAILURES[failure], left))
        if failure == "read-only":
            Path.unlink = _failing(Path.unlink, FAILURES[failure], left)  # type: ignore[method-assign]
        try:
            task(folder)
        except FileError as error:
            os._exit(CLEAR if os.strerror(FAILURES[failure]) in str(error) else 1)

    return work


def _failing(original: Any, code: int, left: list[int]) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        if original.__name__ == "mkdir" and Path(args[0]).is_dir():
            return original(*args, **options)  # nothing to be changed
        if original.__name__ == "open" and not args[1] & os.O_CREAT:
            return original(*args, **options)  # only to be read
        left[0] -= 1
        if left[0] < 0:
            if original.__name__ == "write_bytes" and code == errno.ENOSPC:
                original(args[0], args[1][: len(args[1]) // 2])  # what still fits
            raise OSError(code, os.strerror(code))
        return original(*args, **options)

    return call


def under_a_jumping_clock(task: Callable[[Path], None]) -> Callable[[Path], None]:
    """``task`` while the time of day goes back a year and forth two with every look at it."""

    def work(folder: Path) -> None:
        jumps = itertools.cycle([-3e7, 6e7, 0.0])
        now = time.time()
        time.time = lambda: now + next(jumps)
        time.time_ns = lambda: int(1e9 * time.time())
        task(folder)

    return work


def half_written(folder: Path) -> list[str]:
    """Files that are not whole."""
    found = [str(path) for path in folder.rglob(".*.tmp")]
    for path in folder.rglob("*.json"):
        try:
            json.loads(path.read_text())
        except ValueError:
            found.append(str(path))
    for path in folder.rglob("*.safetensors"):
        try:
            with safe_open(path, "pt") as file:
                file.keys()
        except Exception:
            found.append(str(path))
    return found


def survives(name: str, folder: Path) -> int:
    """Tries ``name`` on failing disks and under a jumping clock; returns how many tries ended with a clear error."""
    torch.set_num_threads(1)
    task, failed = TASKS[name], 0
    whole, tried = folder / f"{name}-whole", folder / f"{name}-tried"
    assert in_a_fork(task, whole) == 0, f"{name} fails on a good disk"
    for failure, calls in itertools.product(FAILURES, (0, 3, 8)):
        code = in_a_fork(on_a_failing_disk(task, failure, calls), tried)
        assert code in (0, CLEAR), f"{name}: disk {failure} after {calls} changes ends with {code}"
        left = half_written(tried)
        assert failure == "read-only" or not left, f"{name}: disk {failure} after {calls} changes leaves {left}"
        failed += code == CLEAR
    assert in_a_fork(task, tried) == 0, f"{name} does not go on once the disk is good"
    assert content(tried) == content(whole), f"{name} ends otherwise after a failing disk"
    jumped = folder / f"{name}-jumped"
    assert in_a_fork(under_a_jumping_clock(task), jumped) == 0, f"{name} fails under a jumping clock"
    assert content(jumped) == content(whole), f"{name} ends otherwise under a jumping clock"
    return failed


if __name__ == "__main__":
    for name in sys.argv[2:] or TASKS:
        print(name, survives(name, Path(sys.argv[1])), "tries failed clearly; same end", flush=True)

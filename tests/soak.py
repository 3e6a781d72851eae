"""Many callers of one engine for a long time: ``python tests/soak.py 1000000`` is the long form (``make soak``)."""

from __future__ import annotations

import itertools
import resource
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from small import tiny_gated

import cofire

CALLERS, PARTS = 8, 10


@dataclass(frozen=True)
class Soaked:
    images: int
    wrong: int
    grown: int
    """Bytes by which resident memory grew in that part, of several equal ones, in which it grew least: a leak grows in
    every part, the engine's pool of workspaces only until as many callers as ever were in it at once."""


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def soak(images: int, callers: int = CALLERS) -> Soaked:
    """Calls with mixed batches, masks and numbers of threads; each must give what a single caller got, bit for bit."""
    engine = cofire.compile(tiny_gated())
    rng = np.random.default_rng(0)
    groups = {group.name: group.filters for group in engine.program.groups}
    cases: list[tuple[Any, Any, bytes]] = []
    for batch in (1, 1, 2, 3, 8, 16):
        for forced in (None, {name: rng.integers(0, 2, (batch, filters)) for name, filters in groups.items()}):
            x = rng.normal(size=(batch, *engine.input_shape)).astype("f4")
            with engine.force(forced or {}):
                cases.append((x, forced, engine(x).tobytes() + _masks(engine)))
    memory, parts = [resident()], []
    for _ in range(PARTS):
        parts.append(called(engine, cases, images // PARTS, callers))
        memory.append(resident())
    grown = min(after - before for before, after in itertools.pairwise(memory))
    return Soaked(images=sum(done for done, _ in parts), wrong=sum(wrong for _, wrong in parts), grown=grown)


def called(engine: cofire.Engine, cases: list[tuple[Any, Any, bytes]], images: int, callers: int) -> tuple[int, int]:
    """How many images the callers sent together, and how many calls gave something else than expected."""
    done, wrong = [0] * callers, [0] * callers

    def call(number: int) -> None:
        random = Random(number)
        while done[number] < images / callers:
            x, forced, expected = random.choice(cases)
            with engine.force(forced or {}):
                got = engine(x, threads=1 if random.random() < 0.9 else 2).tobytes() + _masks(engine)
            done[number] += len(x)
            wrong[number] += got != expected

    threads = [threading.Thread(target=call, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done), sum(wrong)


def _masks(engine: cofire.Engine) -> bytes:
    return b"".join(mask.tobytes() for mask in engine.last_masks.values())


if __name__ == "__main__":
    print(soak(int(sys.argv[1])))

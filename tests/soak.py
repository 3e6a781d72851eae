"""Many callers of one engine for a long time: ``python tests/soak.py 1000000`` is the long form (``make soak``)."""

from __future__ import annotations

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

CALLERS = 8


@dataclass(frozen=True)
class Soaked:
    images: int
    wrong: int
    grown: int
    """Bytes of resident memory between a fifth of the images and the end."""


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
    done, wrong, memory = [0] * callers, [0] * callers, [0]

    def call(number: int) -> None:
        random = Random(number)
        while done[number] < images / callers:
            x, forced, expected = random.choice(cases)
            with engine.force(forced or {}):
                got = engine(x, threads=1 if random.random() < 0.9 else 2).tobytes() + _masks(engine)
            done[number] += len(x)
            wrong[number] += got != expected
            if not memory[0] and sum(done) > images / 5:
                memory[0] = resident()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Soaked(images=sum(done), wrong=sum(wrong), grown=resident() - memory[0])


def _masks(engine: cofire.Engine) -> bytes:
    return b"".join(mask.tobytes() for mask in engine.last_masks.values())


if __name__ == "__main__":
    print(soak(int(sys.argv[1])))

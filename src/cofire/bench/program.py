"""Latency of a program file alone: its own gates beside all gates open, image by image."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from cofire.bench.ours import Engine
from cofire.bench.peers import Array
from cofire.bench.rounds import Contestant, Spread, interleaved, ratio_by_round, ratio_of_medians, spread
from cofire.text import percent


@dataclass(frozen=True, kw_only=True)
class ProgramResult:
    """Seconds of each round under the program's own gates and with all of them open, heads running in both."""

    program: str
    inputs: str
    threads: int
    dense_macs: float
    executed_macs: float
    """Mean over the images."""
    seconds: dict[str, list[float]]

    @property
    def reduction(self) -> float:
        """Share of the dense MACs that the gates saved."""
        return 1 - self.executed_macs / self.dense_macs

    @property
    def latency(self) -> dict[str, Spread]:
        """Of ``gated`` and ``open``, in seconds."""
        return {name: spread(seconds) for name, seconds in self.seconds.items()}

    @property
    def mean(self) -> dict[str, float]:
        """Seconds, mean over the rounds."""
        return {name: sum(seconds) / len(seconds) for name, seconds in self.seconds.items()}

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        gated, opened = self.seconds["gated"], self.seconds["open"]
        return {
            "program": self.program,
            "inputs": self.inputs,
            "threads": self.threads,
            "batch": 1,
            "rounds": len(gated),
            "dense_macs": self.dense_macs,
            "executed_macs": self.executed_macs,
            "executed_macs_reduction": self.reduction,
            "mean_milliseconds": {name: 1e3 * value for name, value in self.mean.items()},
            "milliseconds": {
                name: {part: 1e3 * value for part, value in vars(found).items()} for name, found in self.latency.items()
            },
            "ratio_to_open": ratio_of_medians(gated, opened),
            "ratio_by_round": vars(ratio_by_round(gated, opened)),
            "seconds": self.seconds,
        }

    def __rich__(self) -> Table:
        title = f"{self.program}, batch 1, {self.threads} thread(s), {len(self.seconds['gated'])} rounds, {self.inputs}"
        table = Table(title=title, title_justify="left")
        for column in ("gates", "MACs saved", "mean ms", "median", "p10", "p90"):
            table.add_column(column, justify="left" if column == "gates" else "right")
        for name, saved in (("open", 0.0), ("gated", self.reduction)):
            found = self.latency[name]
            times = (self.mean[name], found.median, found.p10, found.p90)
            table.add_row(name, percent(saved), *[f"{1e3 * value:.3f}" for value in times])
        return table


def bench_program(
    name: str, engine: Engine, images: Array, inputs: str, *, threads: int = 1, rounds: int = 100, warm_up: int = 10
) -> ProgramResult:
    """Time ``engine`` on ``images`` (N, C, H, W), one image per round, its gates deciding and all open."""
    macs: list[float] = []
    for x in images:
        engine(x[None], threads=threads)
        macs.append(_macs(engine))
    every = {group: np.ones_like(mask) for group, mask in engine.last_masks.items()}
    with engine.force(every, heads=True):
        engine(images[:1], threads=threads)
        dense = _macs(engine)
    current = images[:1]

    def at(n: int, setting: AbstractContextManager[object]) -> AbstractContextManager[object]:
        nonlocal current
        current = images[n % len(images)][None]
        return setting

    def run() -> object:
        return engine(current, threads=threads)

    contestants = {
        "gated": Contestant(run, lambda n: at(n, nullcontext())),
        "open": Contestant(run, lambda n: at(n, engine.force(every, heads=True))),
    }
    seconds = interleaved(contestants, rounds, warm_up)
    mean = sum(macs) / len(macs)
    return ProgramResult(
        program=name, inputs=inputs, threads=threads, dense_macs=dense, executed_macs=mean, seconds=seconds
    )


def _macs(engine: Engine) -> float:
    return float(sum(macs.sum() for macs in engine.last_macs.values()))

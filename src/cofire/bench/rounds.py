"""Interleaved timing: every contestant runs once per round, so that the machine's moods hit all alike."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

from cofire.errors import ConfigError

T = TypeVar("T")


def _nothing(round_number: int) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(frozen=True)
class Contestant:
    """``run`` is timed; ``setting(round number)`` is entered before, on nobody's time, and left after."""

    run: Callable[[], object]
    setting: Callable[[int], AbstractContextManager[object]] = _nothing


@contextmanager
def pinned(cores: int) -> Iterator[None]:
    """Inside the block this thread, and the threads it starts, stay on the last ``cores`` that it may use.

    A thread that wanders leaves its caches behind, and the first core is the one that serves the machine.
    """
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[-cores:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def rotated(items: Sequence[T], by: int) -> list[T]:
    """``items`` beginning with number ``by``, the first ones at the end."""
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]


def interleaved(
    contestants: Mapping[str, Contestant],
    rounds: int,
    warm_up: int,
    clock: Callable[[], int] = time.perf_counter_ns,
    told: Callable[[int], None] = lambda done: None,
) -> dict[str, list[float]]:
    """Seconds of each call, by contestant.

    Each round begins one contestant later, so that nobody always runs behind the same neighbour. The first ``warm_up``
    rounds are not kept. ``told`` hears how many rounds are done.
    """
    if rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {rounds}")
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(warm_up + rounds):
        for name in rotated(list(contestants), number):
            contestant = contestants[name]
            with contestant.setting(number):
                began = clock()
                contestant.run()
                took = clock() - began
            if number >= warm_up:
                seconds[name].append(took / 1e9)
        told(number + 1)
    return seconds


@dataclass(frozen=True)
class Spread:
    """Median, and the values that a tenth of the sample lies below and above."""

    median: float
    p10: float
    p90: float


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value; p10 and p90 are interpolated between neighbours."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(statistics.median(values), tenths[0], tenths[-1])


def ratio_of_medians(of: Sequence[float], to: Sequence[float]) -> float:
    """How long one contestant takes in units of another."""
    return statistics.median(of) / statistics.median(to)


def ratio_by_round(of: Sequence[float], to: Sequence[float]) -> Spread:
    """The ratios taken round by round: what the machine did to a whole round cancels."""
    return spread([a / b for a, b in zip(of, to, strict=True)])

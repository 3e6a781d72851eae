"""Interleaved timing: every contestant runs once per round, so that the machine's moods hit all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def interleaved(contestants: dict[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each call, by contestant; the first ``warm_up`` rounds are not kept."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(warm_up + rounds):
        for name, call in contestants.items():
            began = time.perf_counter()
            call()
            if round_number >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def summary(seconds: list[float]) -> dict[str, float]:
    """Median, p10 and p90."""
    tenths = statistics.quantiles(seconds, n=10)
    return {"median": statistics.median(seconds), "p10": tenths[0], "p90": tenths[-1]}


def ratio(of: list[float], to: list[float]) -> dict[str, float]:
    """Ratio of the medians; p10 and p90 of the ratios taken round by round."""
    spread = summary([a / b for a, b in zip(of, to, strict=True)])
    return {**spread, "median": statistics.median(of) / statistics.median(to)}

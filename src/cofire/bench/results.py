"""What a bench found: timings of every engine, and the figures that follow from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

from cofire.bench.ours import NAME
from cofire.bench.rounds import Spread, ratio_by_round, ratio_of_medians, spread
from cofire.graph.units import Units
from cofire.runtime.engine import Precision

OWN_MASKS = "the gates' own"


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One engine at one cost: seconds of each round, and how far its logits were off in the check before."""

    engine: str
    version: str | None
    precision: Precision
    point: int | None
    """Number of the `MeasuredCost` whose masks it ran with; None: dense."""
    error: float
    """Largest error as a share of the logits' standard deviation."""
    agreement: float | None = None
    """Share of the images on which it says what the dense model says in float32; None: its masks were random."""
    accuracy: float | None = None
    """Share of the images on which it is right, where labels are known."""
    seconds: list[float]

    @property
    def spread(self) -> Spread:
        """Seconds."""
        return spread(self.seconds)

    @property
    def mean(self) -> float:
        """Seconds; of interest where every round has another real image."""
        return sum(self.seconds) / len(self.seconds)


@dataclass(frozen=True, kw_only=True)
class MeasuredCost:
    """A cost that was measured; shares of the dense MACs."""

    asked: float | None
    """The share that should remain; None where the model's own gates decided, or a keep rate was given."""
    keep: float
    """Uniform keep rate of the random masks, or mean keep rate of the gates' own."""
    executed_macs_reduction: float
    heads: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """A bench of one network: batch 1."""

    network: str
    input_shape: tuple[int, int, int]
    inputs: str
    masks: str
    threads: int
    rounds: int
    warm_up: int
    seed: int
    dense_macs: int
    units: Units
    points: tuple[MeasuredCost, ...]
    timed: tuple[Timed, ...]
    left_out: dict[str, str]
    """Engine -> why it has no timings."""

    def of(self, engine: str, point: int | None, precision: Precision = "float32") -> Timed | None:
        """An engine's timings at a point (None: dense), if there are any."""
        key = (engine, point, precision)
        return next((timed for timed in self.timed if (timed.engine, timed.point, timed.precision) == key), None)

    def fastest_dense(self, precision: Precision = "float32") -> Timed | None:
        """The fastest dense engine of a precision that is not ours."""
        others = [t for t in self.timed if t.point is None and t.engine != NAME and t.precision == precision]
        return min(others, key=lambda timed: timed.spread.median, default=None)

    def ratio(self, timed: Timed | None, to: Precision = "float32") -> float | None:
        """To the fastest dense engine of a precision: of the medians; of the means where gates decide on real images.

        Then some images take longer than others, which a median hides.
        """
        fastest = self.fastest_dense(to)
        if timed is None or fastest is None:
            return None
        if self.masks == OWN_MASKS:
            return timed.mean / fastest.mean
        return ratio_of_medians(timed.seconds, fastest.seconds)

    def ratio_by_round(self, timed: Timed | None, to: Precision = "float32") -> Spread | None:
        """The same taken round by round."""
        fastest = self.fastest_dense(to)
        return None if timed is None or fastest is None else ratio_by_round(timed.seconds, fastest.seconds)

    def reduction(self, timed: Timed) -> float:
        """Share of the dense MACs that this engine was spared, heads counted."""
        if timed.point is None:
            return 0.0
        point = self.points[timed.point]
        return point.executed_macs_reduction - point.heads

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values. What is asked for most stands on top; of several points, that of the first."""
        own = {"network", "input_shape", "inputs", "masks", "threads", "rounds", "warm_up", "seed", "dense_macs"}
        return {
            **{name: value for name, value in vars(self).items() if name in own},
            "batch": 1,
            "executed_macs_reduction": self.points[0].executed_macs_reduction if self.points else 0.0,
            **self._ratios_json(0 if self.points else None),
            "fastest_dense": self._fastest_json("float32"),
            "fastest_dense_int8": self._fastest_json("int8"),
            "points": [
                {**dataclasses.asdict(point), **self._ratios_json(number)} for number, point in enumerate(self.points)
            ],
            "engines": [self._timed_json(timed) for timed in self.timed],
            "left_out": self.left_out,
            "gated": [unit.name for unit in self.units if unit.gated],
            "not_gated": {unit.name: unit.reason for unit in self.units if not unit.gated},
        }

    def _ratios_json(self, point: int | None) -> dict[str, float | None]:
        """Of our engine in each precision to the fastest dense engine of the same precision."""
        return {
            f"ratio_to_fastest_dense{_suffix(precision)}": self.ratio(self.of(NAME, point, precision), precision)
            for precision in get_args(Precision)
        }

    def _fastest_json(self, precision: Precision) -> str | None:
        fastest = self.fastest_dense(precision)
        return None if fastest is None else fastest.engine

    def _timed_json(self, timed: Timed) -> dict[str, Any]:
        by_round = self.ratio_by_round(timed)
        return {
            "engine": timed.engine,
            "version": timed.version,
            "precision": timed.precision,
            "dense": timed.point is None,
            "point": timed.point,
            "executed_macs_reduction": 0.0 if timed.point is None else self.points[timed.point].executed_macs_reduction,
            "macs_saved": self.reduction(timed),
            "error": timed.error,
            "agreement": timed.agreement,
            "accuracy": timed.accuracy,
            "milliseconds": {name: 1e3 * value for name, value in vars(timed.spread).items()},
            "mean_milliseconds": 1e3 * timed.mean,
            "ratio_to_fastest_dense": self.ratio(timed),
            "ratio_to_fastest_dense_int8": self.ratio(timed, "int8"),
            "ratio_by_round": None if by_round is None else vars(by_round),
            "seconds": [round(value, 7) for value in timed.seconds],
        }


def _suffix(precision: Precision) -> str:
    """Of a key: what is in float32 is called as it was before there was int8."""
    return "" if precision == "float32" else f"_{precision}"

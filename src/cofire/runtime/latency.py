"""What a compiled network will take at any keep rate, from timings of each op at a few; for budgets in milliseconds.

Shapes: Q keep rates, P ops of the program.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cofire.runtime.engine import Engine

KEEPS = (0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class LatencyModel:
    """Milliseconds of each op at several shares of its own MACs; an op without MACs goes by the whole network's."""

    ops: tuple[str, ...]
    share_QP: NDArray[np.float64]
    milliseconds_QP: NDArray[np.float64]
    total_Q: NDArray[np.float64]

    def predict(self, layers: Mapping[str, float], total: float) -> float:
        """Milliseconds for one image.

        Args:
            layers: conv or linear layer -> share of its MACs that is executed.
            total: the same of the whole network.
        """
        milliseconds = 0.0
        for p, name in enumerate(self.ops):
            known = layers.get(name)
            at = self.total_Q if known is None else self.share_QP[:, p]
            milliseconds += float(np.interp(total if known is None else known, at, self.milliseconds_QP[:, p]))
        return milliseconds


def latency_model(engine: Engine, *, rounds: int = 15, seed: int = 0) -> LatencyModel:
    """Time every op of a gated engine with random masks at several keep rates, heads included; one thread.

    The keep rates take turns, so that a slow moment of the machine does not fall on one of them; medians count.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((1, *engine.input_shape)).astype(np.float32)
    groups = {group.name: group.filters for group in engine.program.groups}
    times = np.zeros((rounds, len(KEEPS), len(engine.program.ops)))
    macs_QP = np.zeros(times.shape[1:])
    for turn in range(rounds):
        for q, keep in enumerate(KEEPS):
            masks = {name: _random_mask(rng, filters, keep) for name, filters in groups.items()}
            with engine.force(masks, heads=True):
                profile = engine.profile(x, rounds=1)
            times[turn, q] = profile.milliseconds
            macs_QP[q] += np.array(profile.macs) / rounds
    return LatencyModel(
        ops=tuple(op.name for op in engine.program.ops),
        share_QP=macs_QP / np.maximum(macs_QP[-1], 1),
        milliseconds_QP=np.median(times, 0),
        total_Q=macs_QP.sum(1) / macs_QP[-1].sum(),
    )


def _random_mask(rng: np.random.Generator, filters: int, keep: float) -> NDArray[np.bool_]:
    mask = np.zeros(filters, bool)
    mask[rng.permutation(filters)[: max(1, round(keep * filters))]] = True
    return mask


def mean_over_images(seconds: Sequence[float], images: int) -> float:
    """Seconds of one image where round i ran image i % ``images``: of each image the median, of these the mean.

    A model that chooses how much to compute takes long for some images: the median over all would hide them.
    """
    return statistics.fmean(statistics.median(seconds[image::images]) for image in range(min(images, len(seconds))))

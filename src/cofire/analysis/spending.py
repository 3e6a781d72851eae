"""Decisions -> where the MACs go: per image, per class, and which images are cheapest and dearest.

Shapes: N images, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cofire.analysis.decisions import Decisions
from cofire.errors import ConfigError, DataError

Floats = NDArray[np.float64]


def shares(decisions: Decisions) -> Floats:
    """MACs of each image as a share of the dense ones (column ``executed``), (N,) in [0, 1]."""
    share_N: Floats = decisions.macs_N / decisions.dense_macs
    return share_N


@dataclass(frozen=True, kw_only=True)
class ClassSpending:
    """One class: its images, their top-1 accuracy, and mean and standard deviation of their share of dense MACs."""

    n: int
    top1: float
    share: float
    spread: float


def spending_per_class(decisions: Decisions) -> dict[int, ClassSpending]:
    """Accuracy and MACs of each class that has images, by label."""
    if decisions.label_N is None:
        raise DataError("a cost per class needs labelled images, got unlabelled ones")
    share_N, right_N = shares(decisions), decisions.predicted_N == decisions.label_N
    rows = {int(label): decisions.label_N == label for label in np.unique(decisions.label_N)}
    return {
        label: ClassSpending(
            n=int(row_N.sum()),
            top1=float(right_N[row_N].mean()),
            share=float(share_N[row_N].mean()),
            spread=float(share_N[row_N].std()),
        )
        for label, row_N in rows.items()
    }


def extremes(decisions: Decisions, count: int = 8) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the ``count`` cheapest images, cheapest first, and of the dearest, dearest first; ties by row."""
    if count < 1:
        raise ConfigError(f"count must be at least 1, got {count}")
    return (
        np.argsort(decisions.macs_N, kind="stable")[:count],
        np.argsort(-decisions.macs_N, kind="stable")[:count],
    )

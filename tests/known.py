"""Decisions made by hand, whose right answers are known; for several test files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cofire.analysis import Decisions

Rows = Sequence[str]  # one text of 0 and 1 per image

# Three images. `a`: two clusters, filter 0 is core, filter 3 is silent. `b`: one cluster, so that nothing varies.
MASKS = {"a": ("1100", "1100", "1010"), "b": ("10", "10", "10")}
TARGETS = {"a": ("1000", "1101", "1010"), "b": ("10", "10", "10")}


def decisions(
    masks: Mapping[str, Rows] = MASKS,
    targets: Mapping[str, Rows] | None = None,
    labels: Sequence[int] | None = (0, 1, 1),
    predicted: Sequence[int] = (0, 1, 0),
    macs: Sequence[int] = (30, 10, 20),
    dense_macs: int = 40,
) -> Decisions:
    return Decisions(
        bits={group: _bits(rows) for group, rows in masks.items()},
        filters={group: len(rows[0]) for group, rows in masks.items()},
        label_N=None if labels is None else np.array(labels, dtype=np.int64),
        predicted_N=np.array(predicted, dtype=np.int64),
        macs_N=np.array(macs, dtype=np.int64),
        dense_macs=dense_macs,
        target_bits={group: _bits(rows) for group, rows in (targets or {}).items()},
    )


def _bits(rows: Rows) -> np.ndarray:
    return np.packbits(np.array([[bit == "1" for bit in row] for row in rows]), axis=1)

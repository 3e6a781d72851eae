"""How far masks moved: those of images beside those of the same images, clean.

Shapes: N images, O filters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cofire.analysis.decisions import Bits
from cofire.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Three distances, each in [0, 1].

    Args:
        keep_rate: between the keep rates, whichever filters are kept.
        flipped: share of an image's filters that are on in one mask and off in the other, mean over images (Hamming).
        routes: between the sets of different masks, whichever images take them: 1 - shared / all (Jaccard).
    """

    keep_rate: float
    flipped: float
    routes: float


@dataclass(frozen=True, kw_only=True)
class Drift:
    """Distances of each group; in ``total`` their mean, a group counting by its filters."""

    total: Distance
    groups: dict[str, Distance]


def drift(clean: Mapping[str, Bits], shifted: Mapping[str, Bits], filters: Mapping[str, int]) -> Drift:
    """How far the masks of ``shifted`` images are from those of the same images, clean.

    Args:
        clean: group -> uint8 (N, ceil(O / 8)), the masks packed, as `collect` has them in ``bits``.
        shifted: likewise, of the same images in the same order.
        filters: group -> O.
    """
    shapes = [{group: bits.shape for group, bits in masks.items()} for masks in (clean, shifted)]
    if shapes[0] != shapes[1] or not shapes[0]:
        raise DataError(f"drift needs masks of the same images and groups, got shapes {shapes[0]} and {shapes[1]}")
    groups = {group: _distance(clean[group], shifted[group], filters[group]) for group in clean}
    weights = [filters[group] for group in groups]

    def mean(name: str) -> float:
        return float(np.average([getattr(distance, name) for distance in groups.values()], weights=weights))

    total = Distance(keep_rate=mean("keep_rate"), flipped=mean("flipped"), routes=mean("routes"))
    return Drift(total=total, groups=groups)


def _distance(clean: Bits, shifted: Bits, filters: int) -> Distance:
    decisions = len(clean) * filters
    ones, others = (set(map(bytes, bits)) for bits in (clean, shifted))
    return Distance(
        keep_rate=abs(_num_on(clean) - _num_on(shifted)) / decisions,
        flipped=_num_on(clean ^ shifted) / decisions,
        routes=1 - len(ones & others) / len(ones | others),
    )


def _num_on(bits: Bits) -> int:
    return int(np.unpackbits(bits).sum(dtype=np.int64))  # what pads the last byte is 0

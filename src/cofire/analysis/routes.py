"""Decisions -> what the gates do: routes per group, core and silent filters, agreement with targets, redundancy.

A *route* is the set of filters that one image takes through a group: a row of its mask.
Shapes: N images, O filters of a group, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cofire.analysis.decisions import Decisions

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class GroupRoutes:
    """What one group does over a whole set.

    Args:
        filters: how many the group has.
        clusters: different masks, from 1 (the same filters for every image, a static pruning) to N.
        pruned: mean share of filters that are off, in [0, 1].
        core: filters that run for every image.
        silent: filters that run for none.
    """

    filters: int
    clusters: int
    pruned: float
    core: int
    silent: int

    @property
    def core_share(self) -> float:
        """Share of the filters that run for every image, in [0, 1]."""
        return self.core / self.filters

    @property
    def silent_share(self) -> float:
        """Share of the filters that run for no image, in [0, 1]."""
        return self.silent / self.filters


def routes(decisions: Decisions) -> dict[str, GroupRoutes]:
    """Each group's clusters, pruning ratio, core and silent filters, in execution order."""
    return {group: _group_routes(decisions, group) for group in decisions.groups}


def _group_routes(decisions: Decisions, group: str) -> GroupRoutes:
    rate_O = decisions.keep_rate(group)
    return GroupRoutes(
        filters=decisions.filters[group],
        clusters=len(np.unique(decisions.bits[group], axis=0)),
        pruned=float(1 - rate_O.mean()),
        core=len(core_filters(decisions, group)),
        silent=len(silent_filters(decisions, group)),
    )


def core_filters(decisions: Decisions, group: str) -> NDArray[np.int64]:
    """Indices of the filters that are part of every route."""
    return np.flatnonzero(decisions.mask(group).all(0))


def silent_filters(decisions: Decisions, group: str) -> NDArray[np.int64]:
    """Indices of the filters that are part of no route: they could leave for good."""
    return np.flatnonzero(~decisions.mask(group).any(0))


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How well a group's masks meet its targets, over all images and filters; each in [0, 1].

    Args:
        precision: of the filters that ran, how many should have; nan if none ran.
        recall: of the filters that should have run, how many did; nan if none should have.
        accuracy: decisions that were as the targets ask.
    """

    precision: float
    recall: float
    accuracy: float


def agreement(decisions: Decisions) -> dict[str, Agreement]:
    """Masks against targets for each group that has targets; they must have been collected."""
    return {group: _agreement(decisions.mask(group), decisions.target(group)) for group in decisions.target_bits}


def _agreement(mask_NO: NDArray[np.bool_], target_NO: NDArray[np.bool_]) -> Agreement:
    hits, ran, asked = int((mask_NO & target_NO).sum()), int(mask_NO.sum()), int(target_NO.sum())
    return Agreement(
        precision=hits / ran if ran else np.nan,
        recall=hits / asked if asked else np.nan,
        accuracy=float((mask_NO == target_NO).mean()),
    )


def redundancy(decisions: Decisions) -> Floats:
    """How much of each group's routing every other group repeats: the RV coefficient of their masks, (G, G) in [0, 1].

    RV is the squared correlation of two tables that have the images as rows: |X'Y|^2 / (|X'X| |Y'Y|), with columns
    centred and Frobenius norms. 1: the two groups tell the images apart in the same way, whatever the order and
    number of their filters. 0: no filter of one is correlated with a filter of the other; independent masks come
    close to it as images grow many. A group that treats all images alike has nothing to repeat: nan.
    """
    centred = [_centred(decisions.mask(group)) for group in decisions.groups]
    own_G = [float(np.linalg.norm(mask_NO.T @ mask_NO)) for mask_NO in centred]
    found_GG = np.full((len(centred), len(centred)), np.nan)
    for i, first_NO in enumerate(centred):
        for j, second_NO in enumerate(centred[: i + 1]):
            if own_G[i] and own_G[j]:
                shared = float(np.linalg.norm(first_NO.T @ second_NO)) ** 2
                found_GG[i, j] = found_GG[j, i] = min(1.0, shared / (own_G[i] * own_G[j]))
    return found_GG


def _centred(mask_NO: NDArray[np.bool_]) -> Floats:
    """Columns with mean 0; those of filters that never change are exactly 0."""
    varies_O = mask_NO.any(0) & ~mask_NO.all(0)
    return np.where(varies_O, mask_NO - mask_NO.mean(0), 0.0)

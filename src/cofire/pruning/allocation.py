"""Scores + a budget of MACs -> which filters stay."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cofire.errors import ConfigError
from cofire.graph.cost import cost
from cofire.graph.graph import Graph


def shares(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scores that drop the same share of every group: a filter's rank in its group, in (0, 1)."""
    return {group: (score_O.argsort(stable=True).argsort() + 0.5) / len(score_O) for group, score_O in scores.items()}


def within_budget(graph: Graph, scores: Mapping[str, Tensor], macs: float) -> dict[str, Tensor]:
    """Group -> bool (O,), the filters that stay: the best ones, as many as fit the budget.

    The filters with the lowest scores are dropped until at most ``macs`` remains; then the best of the dropped come
    back where they still fit. Each group keeps its best filter.

    Args:
        graph: with units, whose groups ``scores`` names.
        macs: share of the MACs that may remain (column ``executed``), in (0, 1].

    Raises:
        ConfigError: one filter per group is already too much.
    """
    sizes = {group: len(score_O) for group, score_O in scores.items()}
    group_F = torch.arange(len(sizes)).repeat_interleave(torch.tensor(list(sizes.values())))
    score_F = torch.cat([_best_last(score_O) for score_O in scores.values()])
    order_F = score_F.argsort(stable=True)
    kept_F = torch.ones(len(score_F), dtype=torch.bool)

    def masks() -> dict[str, Tensor]:
        return dict(zip(sizes, kept_F.split(list(sizes.values())), strict=True))

    def keep_all_but(first: int) -> float:
        kept_F.fill_(True)[order_F[:first]] = False
        return remaining(graph, masks())

    low, high = 0, len(score_F) - len(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if keep_all_but(middle) <= macs else (middle + 1, high)
    if (left := keep_all_but(low)) > macs:
        raise ConfigError(f"macs={macs} cannot be reached: one filter per group leaves {left:.3f}")
    full: set[int] = set()  # groups of which not one filter more fits
    for place in order_F[:low].flip(0).tolist():
        group = int(group_F[place])
        if group in full:
            continue
        kept_F[place] = True
        if remaining(graph, masks()) > macs:
            kept_F[place] = False
            full.add(group)
    return {group: mask_O.clone() for group, mask_O in masks().items()}


def remaining(graph: Graph, masks: Mapping[str, Tensor]) -> float:
    """Share of the dense MACs under masks (O,), column ``executed``."""
    return 1 - float(cost(graph, {group: mask_O[None] for group, mask_O in masks.items()}).reduction("executed"))


def _best_last(score_O: Tensor) -> Tensor:
    """The scores, the group's best one set beyond all others."""
    return score_O.double().index_fill(0, score_O.argmax(), float("inf"))

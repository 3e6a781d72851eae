"""Scores + a budget of MACs -> which channels stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader
from cofire.errors import ConfigError
from cofire.pruning.base import Masks, PruneConfig, Scores, register_allocation
from cofire.pruning.channels import Channels


@register_allocation("uniform")
def uniform(
    model: nn.Module, channels: Channels, loader: AnyLoader | None, config: PruneConfig, scores: Scores
) -> Masks:
    """The same share of every group."""
    return within_budget(shares(scores), config.macs, channels.remaining)


@register_allocation("global")
def ranked(
    model: nn.Module, channels: Channels, loader: AnyLoader | None, config: PruneConfig, scores: Scores
) -> Masks:
    """Scores are compared across groups."""
    return within_budget(scores, config.macs, channels.remaining)


def shares(scores: Scores) -> dict[str, Tensor]:
    """Scores that drop the same share of every group: a channel's rank in its group, in (0, 1)."""
    return {group: (score_O.argsort(stable=True).argsort() + 0.5) / len(score_O) for group, score_O in scores.items()}


def uniform_counts(channels: Channels, macs: float) -> dict[str, int]:
    """Group -> how many of its channels stay, for criteria that select by themselves: the same share everywhere."""
    any_order = {group: torch.arange(size, dtype=torch.float64) for group, size in channels.sizes.items()}
    masks = within_budget(shares(any_order), macs, channels.remaining)
    return {group: int(mask_O.sum()) for group, mask_O in masks.items()}


def within_budget(scores: Scores, macs: float, remaining: Callable[[Masks], float]) -> dict[str, Tensor]:
    """Group -> bool (O,), the channels that stay: the best ones, as many as fit the budget.

    The channels with the lowest scores are dropped until at most ``macs`` remains; then the best of the dropped come
    back where they still fit. Each group keeps its best channel.

    Args:
        macs: share of the MACs that may remain, in (0, 1].
        remaining: the share that masks leave.

    Raises:
        ConfigError: one channel per group is already too much.
    """
    sizes = {group: len(score_O) for group, score_O in scores.items()}
    group_F = torch.arange(len(sizes)).repeat_interleave(torch.tensor(list(sizes.values())))
    score_F = torch.cat([_best_last(score_O) for score_O in scores.values()])
    order_F = score_F.argsort(stable=True)
    kept_F = torch.ones(len(score_F), dtype=torch.bool)

    def masks() -> Mapping[str, Tensor]:
        return dict(zip(sizes, kept_F.split(list(sizes.values())), strict=True))

    def keep_all_but(first: int) -> float:
        kept_F.fill_(True)[order_F[:first]] = False
        return remaining(masks())

    low, high = 0, len(score_F) - len(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if keep_all_but(middle) <= macs else (middle + 1, high)
    if (left := keep_all_but(low)) > macs:
        raise ConfigError(f"macs={macs} cannot be reached: one filter per group leaves {left:.3f}")
    full: set[int] = set()  # groups of which not one channel more fits
    for place in order_F[:low].flip(0).tolist():
        group = int(group_F[place])
        if group in full:
            continue
        kept_F[place] = True
        if remaining(masks()) > macs:
            kept_F[place] = False
            full.add(group)
    return {group: mask_O.clone() for group, mask_O in masks().items()}


def _best_last(score_O: Tensor) -> Tensor:
    """The scores, the group's best one set beyond all others."""
    return score_O.double().index_fill(0, score_O.argmax(), float("inf"))

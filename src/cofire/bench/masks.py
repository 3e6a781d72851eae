"""Random masks of a wanted cost: which keep rate leaves a given share of the MACs?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cofire.errors import ConfigError
from cofire.gates.gating import GatedModel


@dataclass(frozen=True)
class MaskPool:
    """Mask sets that keep the same number of filters per group, and what they cost on average."""

    masks: Mapping[str, Tensor]
    """Group -> bool (sets, filters)."""
    keep: float
    """The uniform keep rate they were made with."""
    macs: float
    """Share of the dense MACs that remains, column ``executed``, mean over the sets."""
    heads: float
    """MACs of the heads as a share of the dense MACs."""

    def number(self, n: int) -> dict[str, Tensor]:
        """One set, group -> bool (1, filters); numbers past the last begin anew."""
        return {group: mask[n % len(mask)].unsqueeze(0) for group, mask in self.masks.items()}


def pool_for_keep(gated: GatedModel, keep: float, *, sets: int = 16, seed: int = 0) -> MaskPool:
    """Random masks that keep the share ``keep`` of every group's filters.

    What rounding to whole filters leaves over is handed to the next group, so that groups of 16 do not all jump at
    once; none is off by more than one filter, and none is empty.
    """
    if not 0.0 < keep <= 1.0:
        raise ConfigError(f"keep must be in (0, 1], got {keep}")
    generator = torch.Generator().manual_seed(seed)
    widths = {group: units[-1].out_channels for group, units in gated.units.groups.items()}
    upto = [round(keep * total) for total in itertools.accumulate(widths.values())]
    kept = [max(1, b - a) for a, b in itertools.pairwise([0, *upto])]
    masks = {
        group: torch.rand(sets, width, generator=generator).argsort(1) < k
        for (group, width), k in zip(widths.items(), kept, strict=True)
    }
    cost = gated.cost(masks)
    reduction = float(cost.reduction("executed").mean())
    heads = reduction - float(cost.reduction("executed+heads").mean())
    return MaskPool(masks=masks, keep=keep, macs=1 - reduction, heads=heads)


def pool_for_macs(gated: GatedModel, macs: float, *, sets: int = 16, seed: int = 0) -> MaskPool:
    """Random masks with the uniform keep rate that leaves the share ``macs`` of the dense MACs.

    Raises:
        ConfigError: fewer MACs than a single filter per group needs.
    """
    if not 0.0 < macs <= 1.0:
        raise ConfigError(f"macs, the share that REMAINS, must be in (0, 1], got {macs}")
    lowest = pool_for_keep(gated, 1e-9, sets=sets, seed=seed)
    if macs < lowest.macs:
        needed = f"{lowest.macs:.3f}, the share with one filter left in each gate"
        raise ConfigError(f"macs must be at least {needed}, got {macs}")
    return _bisected(lambda keep: pool_for_keep(gated, keep, sets=sets, seed=seed), macs)


def _bisected(pool: Callable[[float], MaskPool], macs: float) -> MaskPool:
    """The nearest of the pools a bisection visits: rounding makes the cost a staircase."""
    low, high = 0.0, 1.0
    best = pool(high)
    for _ in range(20):
        if abs(best.macs - macs) < 1e-4:
            break
        middle = pool((low + high) / 2)
        low, high = (middle.keep, high) if middle.macs < macs else (low, middle.keep)
        best = min(best, middle, key=lambda found: abs(found.macs - macs))
    return best

"""Random: the same share of every group leaves, drawn at random; what any criterion has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader
from cofire.pruning.base import PruneConfig, register_criterion
from cofire.pruning.channels import Channels


@dataclass(frozen=True, kw_only=True)
class Random(PruneConfig):
    """A channel's score is a random number. It was called ``Uniform`` in 0.1.

    Args:
        seed: of the draw.
    """

    seed: int = 0


@register_criterion(Random)
def random_scores(model: nn.Module, channels: Channels, loader: AnyLoader | None, config: Random) -> dict[str, Tensor]:
    """Group -> (O,) float64 in [0, 1)."""
    generator = torch.Generator().manual_seed(config.seed)
    return {name: torch.rand(size, dtype=torch.float64, generator=generator) for name, size in channels.sizes.items()}

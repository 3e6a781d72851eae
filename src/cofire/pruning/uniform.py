"""Uniform: the same share of every group leaves, drawn at random; what any criterion has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader
from cofire.graph.graph import Graph
from cofire.pruning.base import PruneConfig, register_criterion


@dataclass(frozen=True, kw_only=True)
class Uniform(PruneConfig):
    """A filter's score is a random number.

    Args:
        seed: of the draw.
    """

    seed: int = 0


@register_criterion(Uniform)
def uniform_scores(model: nn.Module, graph: Graph, loader: AnyLoader | None, config: Uniform) -> dict[str, Tensor]:
    """Group -> (O,) float64 in [0, 1)."""
    generator = torch.Generator().manual_seed(config.seed)
    sizes = {group: units[-1].out_channels for group, units in graph.units.groups.items()}
    return {group: torch.rand(size, dtype=torch.float64, generator=generator) for group, size in sizes.items()}

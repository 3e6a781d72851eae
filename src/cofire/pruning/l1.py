"""L1: filters with small weights leave (Li et al. 2017, "Pruning filters for efficient ConvNets")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader
from cofire.graph.graph import Graph
from cofire.pruning.base import PruneConfig, register_criterion


@dataclass(frozen=True, kw_only=True)
class L1(PruneConfig):
    """A filter's score is the sum of its absolute weights; a depthwise filter adds its own to its feeder's."""


@register_criterion(L1)
def l1_scores(model: nn.Module, graph: Graph, loader: AnyLoader | None, config: L1) -> dict[str, Tensor]:
    """Group -> (O,) float64."""

    def norms(unit: str) -> Tensor:
        conv = cast(nn.Conv2d, model.get_submodule(unit))
        return conv.weight.detach().double().cpu().abs().sum((1, 2, 3))

    groups = graph.units.groups
    return {group: torch.stack([norms(unit.name) for unit in units]).sum(0) for group, units in groups.items()}

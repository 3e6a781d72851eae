"""L1: filters with small weights leave (Li et al. 2017, "Pruning filters for efficient ConvNets")."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from cofire.data.feeding import AnyLoader
from cofire.pruning.base import PruneConfig, register_criterion
from cofire.pruning.channels import Channels


@dataclass(frozen=True, kw_only=True)
class L1(PruneConfig):
    """A channel's score is the sum of its filters' absolute weights, in all layers that write it."""


@register_criterion(L1)
def l1_scores(model: nn.Module, channels: Channels, loader: AnyLoader | None, config: PruneConfig) -> dict[str, Tensor]:
    """Group -> (O,) float64."""

    def norms(layer: str) -> Tensor:
        return l1_norms(model.get_submodule(layer))

    return {name: group.total(norms) for name, group in channels.groups.items()}


def l1_norms(layer: nn.Module) -> Tensor:
    """Sum of each filter's absolute weights, float64 (filters,)."""
    weight = layer.get_parameter("weight").detach().double().cpu()
    return weight.abs().flatten(1).sum(1)

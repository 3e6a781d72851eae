"""FPGM: filters near the geometric median of their layer leave, since the others can stand in for them.

He et al. 2019, "Filter pruning via geometric median for deep convolutional neural networks acceleration". Its soft
form, pruning while training, is ``SoftPruning(model, FPGM(...))``; in recipes, ``soft = true``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader
from cofire.pruning.base import PruneConfig, register_criterion
from cofire.pruning.channels import Channels


@dataclass(frozen=True, kw_only=True)
class FPGM(PruneConfig):
    """A filter's score is the sum of its distances to the other filters of its layer.

    Of the soft forms the second measures the norms anew, for the reason that `SFP` gives.
    """

    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "": {},
        "soft": {"soft": True},
        "soft-norms": {"soft": True, "recovery": "norms"},
    }


@register_criterion(FPGM)
def fpgm_scores(model: nn.Module, channels: Channels, loader: AnyLoader | None, config: FPGM) -> dict[str, Tensor]:
    """Group -> (O,) float64; over all layers that write a channel."""
    return {
        name: group.total(lambda layer: distances(model.get_submodule(layer).get_parameter("weight")))
        for name, group in channels.groups.items()
    }


def distances(weight: Tensor) -> Tensor:
    """Sum of each filter's Euclidean distances to all filters of ``weight`` (filters, ...), float64 (filters,)."""
    rows = weight.detach().double().cpu().flatten(1)
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").sum(1)

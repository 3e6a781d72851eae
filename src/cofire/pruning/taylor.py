"""Taylor-FO: filters leave whose removal would change the loss least (Molchanov et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, feed
from cofire.errors import DataError
from cofire.gates.ftwt import FTWT
from cofire.gates.gating import GatedModel, gate
from cofire.graph.graph import Graph
from cofire.graph.tracing import evaluating
from cofire.pruning.base import PruneConfig, register_criterion


@dataclass(frozen=True, kw_only=True)
class Taylor(PruneConfig):
    """A filter's score is the squared gradient of the loss with respect to a factor of 1 on its output."""

    allocation: Literal["uniform", "global"] = "global"


@register_criterion(Taylor)
def taylor_criterion(model: nn.Module, graph: Graph, loader: AnyLoader | None, config: Taylor) -> dict[str, Tensor]:
    """`taylor_scores` of the removable groups."""
    if loader is None:
        raise DataError("Taylor needs labelled images: prune(model, Taylor(...), loader)")
    groups = graph.units.groups
    placed = gate(model, FTWT(always=True), filter_fn=lambda unit: unit.group in groups, input_shape=graph.input_shape)
    return taylor_scores(placed, loader)


def taylor_scores(gated: GatedModel, loader: AnyLoader) -> dict[str, Tensor]:
    """Taylor score of each group's filters, (O,) float64; the mean over batches."""
    factors = {name: torch.ones(units[-1].out_channels) for name, units in gated.units.groups.items()}
    scores = {name: torch.zeros(len(factor), dtype=torch.float64) for name, factor in factors.items()}
    batches = 0
    device = next(gated.parameters()).device
    for x_BCHW, label_B in feed(loader, "ranking filters"):
        if label_B is None:
            raise DataError("a Taylor score needs labelled images")
        leaves = {name: factor.to(device).requires_grad_() for name, factor in factors.items()}
        with evaluating(gated), gated.force(leaves):
            loss = F.cross_entropy(gated(x_BCHW.to(device)), label_B.to(device))
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        for name, gradient in zip(leaves, gradients, strict=True):
            scores[name] += gradient.double().cpu().square()
        batches += 1
    return {name: score / batches for name, score in scores.items()}

"""Taylor-FO: filters leave whose removal would change the loss least (Molchanov et al. 2019)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, feed
from cofire.errors import DataError
from cofire.gates.gating import GatedModel
from cofire.graph.tracing import evaluating
from cofire.pruning.base import PruneConfig, register_criterion
from cofire.pruning.channels import Channels
from cofire.pruning.probe import scaled


@dataclass(frozen=True, kw_only=True)
class Taylor(PruneConfig):
    """A channel's score is the squared gradient of the loss with respect to a factor of 1 on it."""

    allocation: str = "global"


@register_criterion(Taylor)
def taylor_criterion(
    model: nn.Module, channels: Channels, loader: AnyLoader | None, config: Taylor
) -> dict[str, Tensor]:
    """Group -> (O,) float64; the factor is on what the layers that read a channel get of it."""
    if loader is None:
        raise DataError("Taylor needs labelled images: prune(model, Taylor(...), loader)")
    return _mean_squared_gradients(model, channels.sizes, lambda leaves, x: scaled(model, channels, leaves, x), loader)


def taylor_scores(gated: GatedModel, loader: AnyLoader) -> dict[str, Tensor]:
    """Taylor score of each group's filters, (O,) float64; the mean over batches. The factor is where gates mask."""

    def logits(leaves: Mapping[str, Tensor], x_BCHW: Tensor) -> Tensor:
        with gated.force(leaves):
            found: Tensor = gated(x_BCHW)
            return found

    sizes = {name: units[-1].out_channels for name, units in gated.units.groups.items()}
    return _mean_squared_gradients(gated, sizes, logits, loader)


def _mean_squared_gradients(
    model: nn.Module,
    sizes: Mapping[str, int],
    logits: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    loader: AnyLoader,
) -> dict[str, Tensor]:
    """Of the loss with respect to factors of 1, (O,) float64 for each group; the mean over batches."""
    scores = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
    batches = 0
    device = next(model.parameters()).device
    for x_BCHW, label_B in feed(loader, "ranking filters"):
        if label_B is None:
            raise DataError("a Taylor score needs labelled images")
        leaves = {name: torch.ones(size, device=device, requires_grad=True) for name, size in sizes.items()}
        with evaluating(model):
            loss = F.cross_entropy(logits(leaves, x_BCHW.to(device)), label_B.to(device))
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        for name, gradient_O in zip(leaves, gradients, strict=True):
            scores[name] += gradient_O.double().cpu().square()
        batches += 1
    return {name: score_O / batches for name, score_O in scores.items()}

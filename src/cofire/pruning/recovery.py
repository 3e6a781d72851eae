"""What a pruned module gets back before any training."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cofire.data.feeding import AnyLoader, feed
from cofire.errors import DataError
from cofire.graph.tracing import evaluating
from cofire.pruning.base import Masks, PruneConfig, register_recovery
from cofire.pruning.channels import Channels


@register_recovery("none")
def nothing(
    model: nn.Module,
    smaller: nn.Module,
    channels: Channels,
    masks: Masks,
    loader: AnyLoader | None,
    config: PruneConfig,
) -> None:
    """Nothing."""


@register_recovery("norms")
def norms(
    model: nn.Module,
    smaller: nn.Module,
    channels: Channels,
    masks: Masks,
    loader: AnyLoader | None,
    config: PruneConfig,
) -> None:
    """Batch norms measure mean and variance anew."""
    if loader is None:
        raise DataError('recovery = "norms" needs images: prune(model, config, loader)')
    recalibrate(smaller, loader)


def recalibrate(model: nn.Module, loader: AnyLoader, text: str = "measuring batch norms") -> None:
    """Batch norms measure mean and variance anew, as the mean over batches; in place, nothing else changes."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    device = next(model.parameters()).device
    with torch.no_grad(), evaluating(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over all batches
            norm.training = True
        for x_BCHW, _ in feed(loader, text):
            model(x_BCHW.to(device))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum

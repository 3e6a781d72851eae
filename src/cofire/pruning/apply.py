"""prune(model, config): criterion -> allocation -> surgery -> recovery."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from cofire.data.feeding import AnyLoader
from cofire.errors import ConfigError, NoUnitError
from cofire.gates.gating import GatedModel
from cofire.pruning.base import PruneConfig, allocate, recover, scores
from cofire.pruning.channels import Channels
from cofire.pruning.removal import removable
from cofire.pruning.surgery import cut

_POINT = 0.01


def prune(
    model: nn.Module,
    config: PruneConfig,
    loader: AnyLoader | None = None,
    *,
    input_shape: tuple[int, int, int] | None = None,
) -> nn.Module:
    """A really smaller copy of ``model``, a plain module of the same class; ``model`` is left alone.

    It computes what ``model`` computes with the removed channels at zero. Between ``config.macs`` and one
    percentage point less of the MACs remain. Train it with `fit`; `save`, `load` and `compile` take it as any other.

    Args:
        model: any module torch.fx can trace, taking one (B, C, H, W) batch.
        config: of a registered method: ``L1(macs=0.5)``, ``Random(macs=0.5)``, ``Taylor(macs=0.5)``.
        loader: images for methods that look at some; ``Taylor`` needs labels too.
        input_shape: (C, H, W) of an image, for the MACs. Default: what a registered backbone was made for, else
            224 x 224.

    Raises:
        ConfigError: the budget cannot be met; says what can.
        NoUnitError: no filter can be removed; says why.
        TraceError: a layer computes its weight from others, or the forward does not run with fewer channels.
    """
    if isinstance(model, GatedModel):
        raise ConfigError("the model is gated; prune its plain form, gated.backbone, and gate what comes out")
    smaller, left = prune_below(model, config, loader, input_shape=input_shape)
    if not config.macs - _POINT <= left <= config.macs:
        raise ConfigError(
            f"macs={config.macs} cannot be met within one point: the nearest below is {left:.3f}, and one filter more "
            "is too much; ask for that"
        )
    return smaller


def prune_below(
    model: nn.Module,
    config: PruneConfig,
    loader: AnyLoader | None = None,
    *,
    input_shape: tuple[int, int, int] | None = None,
) -> tuple[nn.Module, float]:
    """The smaller copy that `prune` makes, however far below the budget it is, and the share of the MACs it has."""
    channels = removable_for(model, config, input_shape)
    masks = allocate(model, channels, loader, config, scores(model, channels, loader, config))
    smaller = cut(model, channels, masks)
    recover(model, smaller, channels, masks, loader, config)
    return smaller, channels.remaining(masks)


def removable_for(model: nn.Module, config: PruneConfig, input_shape: tuple[int, int, int] | None = None) -> Channels:
    """The channels that may leave under ``config``; they suffice for its budget.

    Raises:
        ConfigError: they do not; says what keeps the others.
        NoUnitError: no filter can be removed; says why.
    """
    try:
        channels = removable(model, input_shape, streams=config.streams == "cut")
        if config.streams == "auto" and _least(channels) > config.macs:
            channels = removable(model, input_shape, streams=True)
    except NoUnitError as error:
        if config.streams != "auto":
            raise
        try:
            channels = removable(model, input_shape, streams=True)
        except NoUnitError:
            raise error from None
    if (least := _least(channels)) > config.macs:
        raise ConfigError(
            f"macs={config.macs} cannot be reached: one filter per group leaves {least:.3f}{_why(channels)}"
        )
    return channels


def _least(channels: Channels) -> float:
    """Share of the MACs with one channel in each group."""
    return channels.remaining({name: torch.arange(size) < 1 for name, size in channels.sizes.items()})


def _why(channels: Channels) -> str:
    """The commonest reasons for which convs stay whole, in words."""
    common = Counter(channels.reasons.values()).most_common(3)
    found = [
        f"{next(conv for conv, why in channels.reasons.items() if why == reason)}: {reason}" for reason, _ in common
    ]
    return "; what stays whole, e.g. " + "; ".join(found) if found else ""

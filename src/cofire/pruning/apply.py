"""prune(model, config): criterion -> allocation -> surgery -> recovery."""

from __future__ import annotations

from torch import nn

from cofire.data.feeding import AnyLoader
from cofire.errors import ConfigError
from cofire.gates.gating import GatedModel
from cofire.pruning.allocation import remaining, shares, within_budget
from cofire.pruning.base import PruneConfig, scores
from cofire.pruning.recovery import recalibrate
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

    It computes what ``model`` computes with the removed filters' outputs at zero. Between ``config.macs`` and one
    percentage point less of the MACs remain. Train it with `fit`; `save`, `load` and `compile` take it as any other.

    Args:
        model: any module torch.fx can trace, taking one (B, C, H, W) batch.
        config: of a registered method: ``L1(macs=0.5)``, ``Uniform(macs=0.5)``, ``Taylor(macs=0.5)``.
        loader: images for methods that look at some; ``Taylor`` needs labels too.
        input_shape: (C, H, W) of an image, for the MACs. Default: what a registered backbone was made for, else
            224 x 224.

    Raises:
        ConfigError: the budget cannot be met; says what can.
        NoUnitError: no filter can be removed; says why.
    """
    if isinstance(model, GatedModel):
        raise ConfigError("the model is gated; prune its plain form, gated.backbone, and gate what comes out")
    graph = removable(model, input_shape)
    found = scores(model, graph, loader, config)
    masks = within_budget(graph, shares(found) if config.allocation == "uniform" else found, config.macs)
    if (left := remaining(graph, masks)) < config.macs - _POINT:
        raise ConfigError(
            f"macs={config.macs} cannot be met within one point: the nearest below is {left:.3f}, and one filter more "
            "is too much; ask for that"
        )
    smaller = cut(model, graph, masks)
    if config.recovery == "norms":
        recalibrate(smaller, loader)
    return smaller

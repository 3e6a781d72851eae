"""calibrate(gated, images, macs): the threshold at which a gated model executes what was asked for."""

from __future__ import annotations

import torch

from cofire.data.feeding import AnyLoader, first_images
from cofire.errors import ConfigError
from cofire.gates.gating import GatedModel
from cofire.graph.cost import Column
from cofire.graph.tracing import evaluating

_NEAR = 0.002  # of the dense MACs: near enough


def calibrate(
    gated: GatedModel, loader: AnyLoader, *, macs: float, images: int = 512, column: Column = "executed+heads"
) -> float:
    """Set ``gated.threshold`` so that ``macs`` of the dense MACs are executed, heads included, in the mean over images.

    Args:
        loader: batches of images, with or without labels.
        macs: share of the MACs that remains, in (0, 1).
        images: how many to use at most.
        column: in which MACs are counted; ``executed`` leaves the heads out.

    Returns:
        The share that is reached.

    Raises:
        ConfigError: the method has no threshold, or no threshold reaches the budget; says what can be reached.
    """
    if gated.threshold is None:
        raise ConfigError(f"calibrate sets a threshold, and {gated.config.label} does not decide by one")
    if not 0.0 < macs < 1.0:
        raise ConfigError(f"macs is the share of MACs that remains and must be in (0, 1), got {macs}")
    batches = first_images(loader, images)
    before = gated.threshold
    with torch.no_grad(), evaluating(gated):
        low, high = _range(gated, batches[0])
        most, least = _share(gated, batches, low, column), _share(gated, batches, high, column)
        if not least - _NEAR <= macs <= most + _NEAR:
            gated.threshold = before
            raise ConfigError(f"macs={macs} cannot be reached by a threshold: between {least:.3f} and {most:.3f} can")
        found = most
        for _ in range(30):  # halved until near, or until no float lies between
            middle = (low + high) / 2
            found = _share(gated, batches, middle, column)
            if abs(found - macs) <= _NEAR:
                break
            low, high = (middle, high) if found > macs else (low, middle)
    return found


def _range(gated: GatedModel, batch: torch.Tensor) -> tuple[float, float]:
    """Thresholds at which all filters run, and none."""
    gated.threshold = float("-inf")
    gated(batch)
    logits = [d.logits_BO for d in gated.decisions.values() if d.logits_BO is not None]
    margin = 1.0 + max(float(part.abs().max()) for part in logits)
    return -margin, margin


def _share(gated: GatedModel, batches: list[torch.Tensor], threshold: float, column: Column) -> float:
    """Share of the dense MACs at a threshold, which is set."""
    gated.threshold = threshold
    return remaining(gated, batches, column)


def remaining(gated: GatedModel, batches: list[torch.Tensor], column: Column) -> float:
    """Share of the dense MACs that a gated model runs, the mean over images."""
    shares = []
    for batch in batches:
        gated(batch)
        shares.append(1 - gated.cost(input_shape=gated.last_shape).reduction(column).expand(len(batch)))
    return float(torch.cat(shares).mean())

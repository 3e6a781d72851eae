"""Activations -> targets: which filters of a unit should fire for a sample; pure functions.

Shapes: B samples, O filters, R ratios. ``activity_BO`` is each filter's largest absolute response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cofire.errors import ConfigError, TrainingError


def activity(y_BOHW: Tensor) -> Tensor:
    """Largest absolute response of each filter, (B, O) float32 or wider, without gradient.

    ``y_BOHW`` is a unit's output, (B, O, H, W) with any number of spatial dimensions.
    """
    low, high = y_BOHW.detach().flatten(2).aminmax(dim=2)
    largest = torch.maximum(high, -low)
    return largest if largest.dtype == torch.float64 else largest.float()


def mass_target(activity_BO: Tensor, ratio: float, *, floor: int = 1, tolerance: float = 0.0) -> Tensor:
    """Filters that together hold ``ratio`` of a sample's activation mass (Algorithm 1 of the paper).

    The strongest filters are taken first, equal ones in the order of their index, as long as their summed mass
    does not pass ``ratio`` of the total. A filter without any activity is never taken, except by the floor; so
    ``ratio=1`` keeps exactly the filters that respond.

    Args:
        activity_BO: non-negative and finite, (B, O); see :func:`activity`.
        ratio: share of the mass to keep, in (0, 1].
        floor: the strongest ``floor`` filters are always taken; 0 or 1 in this method.
        tolerance: added to ``ratio``; with ``ratio=1`` filters below this share of the mass are dropped.

    Returns:
        bool (B, O); True means "this filter should fire".
    """
    return mass_targets(activity_BO, [ratio], floor=floor, tolerance=tolerance)[0]


def mass_targets(activity_BO: Tensor, ratios: list[float], *, floor: int = 1, tolerance: float = 0.0) -> Tensor:
    """:func:`mass_target` for many ratios from one sort, bool (R, B, O)."""
    for ratio in ratios:
        if not 0.0 < ratio <= 1.0:
            raise ConfigError(f"ratio must be in (0, 1], got {ratio}")
    sorted_BO, order_BO = _checked(activity_BO).sort(dim=1, descending=True, stable=True)
    # float64, so that thousands of filters add up exactly enough for ratios next to 1
    mass_BO = sorted_BO.double().cumsum(1)
    total_B1 = mass_BO[:, -1:]
    keep_RBO = torch.stack(
        [
            (mass_BO <= (ratio + tolerance) * total_B1) & (sorted_BO > (tolerance * total_B1 if ratio == 1.0 else 0.0))
            for ratio in ratios
        ]
    )
    keep_RBO[:, :, :floor] = True
    return torch.empty_like(keep_RBO).scatter_(2, order_BO.expand_as(keep_RBO), keep_RBO)


def top_target(activity_BO: Tensor, k: int) -> Tensor:
    """The ``k`` strongest filters of each sample, equal ones in the order of their index, bool (B, O)."""
    if not 0 <= k <= activity_BO.shape[1]:
        raise ConfigError(f"k must be in 0..{activity_BO.shape[1]}, got {k}")
    order_BO = _checked(activity_BO).argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(activity_BO, dtype=torch.bool).scatter_(1, order_BO[:, :k], True)


def _checked(activity_BO: Tensor) -> Tensor:
    # Under torch.compile a look at values would break the graph; there the loss shows what is not finite.
    if not torch.compiler.is_compiling() and not bool(torch.isfinite(activity_BO.sum(1)).all()):
        raise TrainingError("activations must be finite, got NaN or Inf; lower the learning rate or check the input")
    return activity_BO

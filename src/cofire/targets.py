"""Activations -> targets: which filters of a unit should fire for a sample; pure functions.

Shapes: B samples, O filters, R ratios. ``activity_BO`` is each filter's largest absolute response.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from cofire.errors import ConfigError, TrainingError

_BITS = 0x7FFFFFFF  # all bits of a float32 but the sign


def activity(y_BOHW: Tensor, peak_BO: Tensor | None = None, nonnegative: bool = False) -> Tensor:
    """Largest absolute response of each filter, (B, O) float32 or wider, without gradient.

    Args:
        y_BOHW: a unit's output, (B, O, H, W).
        peak_BO: its maximum over space, if known already.
        nonnegative: promises that no response is negative.
    """
    # amax and amin apart: each is vectorised, which aminmax is not (7 times slower on a CPU); abs() would copy y.
    flat = y_BOHW.detach().flatten(2)
    largest = flat.amax(2) if peak_BO is None else peak_BO
    if not nonnegative:
        largest = torch.maximum(largest, -flat.amin(2))
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
    sorted_BO, order_BO = _strongest_first(activity_BO)
    # float64, so that thousands of filters add up exactly enough for ratios next to 1
    mass_BO = sorted_BO.double().cumsum(1)
    total_B1 = mass_BO[:, -1:]
    _check_finite(total_B1)
    keep_RBO = mass_BO <= _scaled(total_B1, [ratio + tolerance for ratio in ratios])
    keep_RBO &= sorted_BO > (_scaled(total_B1, [tolerance * (ratio == 1.0) for ratio in ratios]) if tolerance else 0.0)
    keep_RBO[:, :, :floor] = True
    return torch.empty_like(keep_RBO).scatter_(2, order_BO.expand_as(keep_RBO), keep_RBO)


def top_target(activity_BO: Tensor, k: int) -> Tensor:
    """The ``k`` strongest filters of each sample, equal ones in the order of their index, bool (B, O)."""
    if not 0 <= k <= activity_BO.shape[1]:
        raise ConfigError(f"k must be in 0..{activity_BO.shape[1]}, got {k}")
    _check_finite(activity_BO.double())
    _, order_BO = _strongest_first(activity_BO)
    return torch.zeros_like(activity_BO, dtype=torch.bool).scatter_(1, order_BO[:, :k], True)


def _strongest_first(activity_BO: Tensor) -> tuple[Tensor, Tensor]:
    """Values in descending order and their indices, equal values by lower index.

    On the CPU numpy sorts whole integers 5 times faster than torch sorts floats with indices. A non-negative
    float32 orders like its bits, so bits (inverted, to descend) and index together are one integer.
    """
    plain = activity_BO.device.type == "cpu" and activity_BO.dtype == torch.float32
    if not plain or activity_BO.shape[1] < 128 or torch.compiler.is_compiling():
        ordered = activity_BO.sort(dim=1, descending=True, stable=True)
        return ordered.values, ordered.indices
    inverted = activity_BO.contiguous().view(torch.int32).bitwise_not().bitwise_and(_BITS).long()
    keys = np.sort((inverted << 32 | torch.arange(activity_BO.shape[1])).numpy(), axis=1)
    ordered_BO = torch.from_numpy(keys)
    values_BO = (ordered_BO >> 32).bitwise_xor(_BITS).int().view(torch.float32)
    return values_BO, ordered_BO & 0xFFFFFFFF


def _scaled(total_B1: Tensor, factors: list[float]) -> Tensor:
    """The total times each factor, (R, B, 1)."""
    if len(factors) == 1:
        return (total_B1 * factors[0])[None]  # every training step comes this way, and a tensor of one factor costs
    return torch.tensor(factors, dtype=torch.float64, device=total_B1.device)[:, None, None] * total_B1


def _check_finite(mass: Tensor) -> None:
    """Raise if a float64 tensor holds NaN or Inf; float32 activations cannot overflow its sum."""
    # Under torch.compile a look at values would break the graph; there the loss shows what is not finite.
    if not torch.compiler.is_compiling() and not math.isfinite(float(mass.sum())):
        raise TrainingError("activations must be finite, got NaN or Inf; lower the learning rate or check the input")

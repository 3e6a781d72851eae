"""Activations -> targets: which filters of a unit should fire for a sample; pure functions.

Shapes: B samples, O filters, R ratios. ``activity_BO`` is each filter's largest absolute response.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cofire.errors import ConfigError, TrainingError
from cofire.gates.pooling import peak, trough
from cofire.graph.units import Site

_BITS = 0x7FFFFFFF  # all bits of a float32 but the sign


def activity(
    y_BOHW: Tensor,
    peak_BO: Tensor | None = None,
    nonnegative: bool = False,
    saliency: Literal["max", "l2", "mean"] = "max",
) -> Tensor:
    """How strongly each filter responds, (B, O) float32 or wider, without gradient.

    Args:
        y_BOHW: a unit's output, (B, O, H, W).
        peak_BO: its maximum over space, if known already.
        nonnegative: promises that no response is negative.
        saliency: its largest absolute response, the L2 norm of its map, or its mean absolute response.
    """
    # amax and amin apart: each is vectorised, which aminmax is not (7 times slower on a CPU); abs() would copy y.
    y_BOHW = y_BOHW.detach()
    found: Tensor
    if saliency == "l2":
        found = y_BOHW.flatten(2).norm(dim=2)
    elif saliency == "mean":
        found = y_BOHW.flatten(2).abs().mean(2)
    else:
        found = peak(y_BOHW) if peak_BO is None else peak_BO
        if not nonnegative:
            found = torch.maximum(found, -trough(y_BOHW))
    return found if found.dtype == torch.float64 else found.float()


def largest(values_BO: Tensor, k: int) -> Tensor:
    """The ``k`` largest values of each sample, equal ones in the order of their index, bool (B, O)."""
    if torch.onnx.is_in_onnx_export():  # ONNX has no stable sort, but its TopK takes the lower of equal indices first
        first_BK = values_BO.topk(k, dim=1).indices
        return torch.zeros_like(values_BO).scatter(1, first_BK, torch.ones_like(values_BO)[:, :k]) > 0.5
    order_BO = values_BO.sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(values_BO, dtype=torch.bool).scatter_(1, order_BO[:, :k], True)


def signature_of(signature: Mapping[str, int] | None, site: Site, who: str) -> int | None:
    """How many of a site's filters a signature lets run; None without one."""
    if signature is None:
        return None
    if site.name not in signature:
        raise ConfigError(f"{who}.signature must name every group, got none for {site.name!r}")
    k = signature[site.name]
    if not 1 <= k <= site.filters:
        raise ConfigError(f"{who}.signature[{site.name!r}] must be in 1..{site.filters}, got {k}")
    return k


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
    return mass_levels(activity_BO, [ratio], floor=floor, tolerance=tolerance).logical_not()


def mass_levels(activity_BO: Tensor, ratios: list[float], *, floor: int = 1, tolerance: float = 0.0) -> Tensor:
    """:func:`mass_target` for many ratios from one sort: the first ratio that takes a filter, R if none does.

    Args:
        ratios: a run as :func:`nested` gives it.

    Returns:
        int (B, O), indices into ``ratios``.
    """
    for ratio in ratios:
        if not 0.0 < ratio <= 1.0:
            raise ConfigError(f"ratio must be in (0, 1], got {ratio}")
    sorted_BO, order_BO = _strongest_first(activity_BO)
    # float64, so that thousands of filters add up exactly enough for ratios next to 1
    mass_BO = sorted_BO.double().cumsum(1)
    total_B1 = mass_BO[:, -1:]
    _check_finite(total_B1)
    level_BO = _first_above(mass_BO, total_B1, [ratio + tolerance for ratio in ratios])
    silent = total_B1 * tolerance if tolerance and ratios[0] == 1.0 else 0.0
    never_BO = (sorted_BO <= silent).to(level_BO.dtype) * len(ratios)
    level_BO = torch.maximum(level_BO, never_BO)  # 20 times faster than masked_fill
    level_BO[:, :floor] = 0
    return torch.empty_like(level_BO).scatter_(1, order_BO, level_BO)


def nested(ratios: Iterable[float], tolerance: float) -> list[list[float]]:
    """The ratios in ascending runs within each of which a larger ratio takes all that a smaller one does.

    One run, unless a tolerance makes ratio 1 drop weak filters that a smaller ratio takes.
    """
    return [list(run) for _, run in groupby(sorted(ratios), lambda ratio: tolerance > 0 and ratio == 1.0)]


def top_target(activity_BO: Tensor, k: int) -> Tensor:
    """The ``k`` strongest filters of each sample, equal ones in the order of their index, bool (B, O)."""
    if not 0 <= k <= activity_BO.shape[1]:
        raise ConfigError(f"k must be in 0..{activity_BO.shape[1]}, got {k}")
    _check_finite(activity_BO.double())
    _, order_BO = _strongest_first(activity_BO)
    return torch.zeros_like(activity_BO, dtype=torch.bool).scatter_(1, order_BO[:, :k], True)


def _strongest_first(activity_BO: Tensor) -> tuple[Tensor, Tensor]:
    """Values in descending order and their indices, equal values by lower index.

    On the CPU numpy sorts whole integers 5 times faster than torch sorts floats with indices, unless there are so
    few that its extra calls cost more. A non-negative float32 orders like its bits, so bits (inverted, to descend)
    and index together are one integer.
    """
    plain = activity_BO.device.type == "cpu" and activity_BO.dtype == torch.float32
    if not plain or activity_BO.numel() < 4096 or torch.compiler.is_compiling():
        ordered = activity_BO.sort(dim=1, descending=True, stable=True)
        return ordered.values, ordered.indices
    inverted = activity_BO.contiguous().view(torch.int32).bitwise_not().bitwise_and(_BITS).long()
    keys = np.sort((inverted << 32 | torch.arange(activity_BO.shape[1])).numpy(), axis=1)
    ordered_BO = torch.from_numpy(keys)
    values_BO = (ordered_BO >> 32).bitwise_xor(_BITS).int().view(torch.float32)
    return values_BO, ordered_BO & 0xFFFFFFFF


def _first_above(mass_BO: Tensor, total_B1: Tensor, shares: list[float]) -> Tensor:
    """Index of the first share of the total that a mass does not pass, R if it passes all, int (B, O)."""
    if len(shares) == 1:  # every training step comes this way, and a comparison is faster than a search
        return (mass_BO > total_B1 * shares[0]).view(torch.uint8)
    shares_R = torch.tensor(shares, dtype=torch.float64, device=mass_BO.device)
    return torch.searchsorted(total_B1 * shares_R, mass_BO, out_int32=True)


def _check_finite(mass: Tensor) -> None:
    """Raise if a float64 tensor holds NaN or Inf; float32 activations cannot overflow its sum."""
    # Under torch.compile a look at values would break the graph; there the loss shows what is not finite.
    if not torch.compiler.is_compiling() and not math.isfinite(float(mass.sum())):
        raise TrainingError("activations must be finite, got NaN or Inf; lower the learning rate or check the input")

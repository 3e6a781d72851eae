"""A function of one element -> scale and shift, or an activation the engine has, found by trying it.

That covers modules, functions and methods, in place or not, of any library, without a list of their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cofire.runtime.program import Act

Function = Callable[[Tensor], Tensor]

_FUNCTIONS: dict[Act, Function] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "hardsigmoid": F.hardsigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "mish": F.mish,
    "softplus": F.softplus,
}
_SLOPED: dict[Act, Callable[[Tensor, float], Tensor]] = {"leaky": F.leaky_relu, "elu": F.elu}
# Both sides of every bend, close to zero and far from it, so that no two functions look alike by chance.
_PROBE_N = torch.cat([torch.linspace(-8, 8, 65), torch.tensor([-1e4, -40, -1e-3, -1e-6, 1e-6, 1e-3, 40, 1e4])]).double()
_ZERO, _ONE, _MINUS_ONE = (int(_PROBE_N.eq(value).nonzero()) for value in (0, 1, -1))


class Scaling(NamedTuple):
    """x * scale + shift, float64, per channel."""

    scale_C: Tensor
    shift_C: Tensor

    @property
    def is_identity(self) -> bool:
        return bool((self.scale_C == 1).all()) and not bool(self.shift_C.any())


class Bend(NamedTuple):
    """An activation; ``slope`` is that of leaky and elu, and the bound of hardtanh."""

    act: Act
    slope: float = 0.0
    factor: float = 1.0
    """Of the result."""


class Cut(NamedTuple):
    """Numbers below and above are cut off."""

    low: float
    high: float


class Slopes(NamedTuple):
    """Leaky, float64, with a slope for each channel."""

    slope_C: Tensor


def recognised(function: Function, channels: int, ndim: int) -> Scaling | Bend | Cut | Slopes | None:
    """What ``function`` does to float64 tensors with ``channels`` channels and ``ndim`` dimensions, batch included.

    None if it is nothing the engine has, or does not run.
    """
    # The channels hold the values in different orders, and some samples are tried again without the others: what mixes
    # channels or samples is thus found out.
    order_NC = (torch.arange(len(_PROBE_N))[:, None] + 37 * torch.arange(channels)) % len(_PROBE_N)
    x = _PROBE_N[order_NC].view(-1, channels, *[1] * (ndim - 2))
    try:
        y, some = function(x.clone()), function(x[:30].clone())  # copies: it may work in place
    except Exception:
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape or not _same(y[:30], some):
        return None
    x_NC = _PROBE_N[:, None].expand(-1, channels)
    y_NC = torch.empty(x_NC.shape).double().scatter_(0, order_NC, y.double().flatten(1))
    scaling = Scaling(y_NC[_ONE] - y_NC[_ZERO], y_NC[_ZERO])
    if _same(y_NC, x_NC * scaling.scale_C + scaling.shift_C):
        return scaling
    for act, known in _FUNCTIONS.items():
        factor = float(y_NC[_ONE, 0] / known(x_NC[_ONE, 0]))
        factor = 1.0 if abs(factor - 1) < 1e-9 else factor
        if _same(y_NC, factor * known(x_NC)):
            return Bend(act, factor=factor)
    leak_C, lowest, highest = -y_NC[_MINUS_ONE], float(y_NC.min()), float(y_NC.max())
    for act, slope in (("leaky", float(leak_C[0])), ("elu", -lowest)):
        if _same(y_NC, _SLOPED[act](x_NC, slope)):
            return Bend(act, slope)
    if _same(y_NC, x_NC.clamp(-highest, highest)):
        return Bend("hardtanh", highest)
    if _same(y_NC, x_NC.clamp(lowest, highest)):
        return Cut(lowest, highest)
    return Slopes(leak_C) if _same(y_NC, torch.where(x_NC < 0, x_NC * leak_C, x_NC)) else None


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-9, atol=1e-9)

"""What int8 does to numbers, in plain torch, bit for bit.

Quantised tensors hold q - zero, so that zero is zero, as whole numbers of a float type. Sums are exact in float32 while
they stay below 2^24, else in float64; every step after them is rounded to float32.

Shapes: B images, C channels, O filters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cofire.runtime.program import Conv8, Quant


class _Straight(torch.autograd.Function):
    """Rounds, halves to even; gradients pass as if it did not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def rounded(x: Tensor) -> Tensor:
    """The nearest whole numbers, halves to even; with gradients, for training, as if they had not been rounded."""
    found: Tensor = _Straight.apply(x)  # type: ignore[no-untyped-call]
    return found


def in_steps(rows_OI: Tensor) -> Tensor:
    """Each row rounded to whole numbers of up to 127 times a factor of its own, exactly: the engine keeps it in bytes.

    A factor has 16 significant bits, so that its products with the whole numbers are float32 numbers. Rows that are not
    finite, or too small for that, stay as they are.
    """
    most_O1 = rows_OI.abs().amax(1, keepdim=True)
    mantissa, exponent = torch.frexp(most_O1 / 127)
    factor_O1 = torch.ldexp((mantissa * (1 << 16)).round() / (1 << 16), exponent)
    steps_OI = (rows_OI / factor_O1).round().clamp(-127, 127)
    fits_O1 = most_O1.isfinite() & (factor_O1 >= torch.finfo(torch.float32).tiny)
    return torch.where(fits_O1, steps_OI * factor_O1, rows_OI)


def quantized(x: Tensor, quant: Quant) -> Tensor:
    """q - zero for float32 numbers of any shape; NaN counts as 0."""
    inverse = torch.ones(()) / quant.scale
    return rounded((x * inverse).nan_to_num(0.0)).clamp(-quant.zero, 255 - quant.zero)


def dequantized(q: Tensor, quant: Quant) -> Tensor:
    """The numbers that q - zero stand for, rounded to float32, in the dtype of ``q``."""
    return (q.float() * quant.scale).to(q.dtype)


def conv8(op: Conv8, q_BCHW: Tensor, kept_BOHW: Tensor | None, mask_BO: Tensor, quant: Quant | None) -> Tensor:
    """What a conv writes, (B, O, H, W): q - zero by ``quant``, or float32 numbers without one.

    Args:
        kept_BOHW: the residual, if there is one.
        mask_BO: filters that are off give the residual, or zero.
    """
    largest_O = 255 * op.weight.abs().long().sum((1, 2, 3)) + op.bias.long().abs()
    exact = torch.float32 if int(largest_O.max()) < 1 << 24 else torch.float64
    top, left, bottom, right = op.padding
    padded = F.pad(q_BCHW.to(exact), (left, right, top, bottom))
    sums = F.conv2d(padded, op.weight.to(exact), op.bias.to(exact), op.stride, 0, op.dilation, op.groups)
    y = sums.float() * op.multiplier[:, None, None]
    y = y.masked_fill(~mask_BO[:, :, None, None], 0)
    if kept_BOHW is not None:
        y = y + kept_BOHW.float() * op.residual_multiplier
    if quant is not None:
        y = rounded(y).clamp(op.low - quant.zero, op.high - quant.zero)
    return y.to(q_BCHW.dtype)

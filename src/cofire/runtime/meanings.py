"""What each op of a program computes, in plain torch: docs/program.md line by line.

Shapes: B images, C channels, O filters.
"""

from __future__ import annotations

from itertools import product
from math import ceil, floor, pi, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cofire.runtime.integers import conv8, dequantized, quantized
from cofire.runtime.program import (
    Activation,
    Add,
    Affine,
    Cat,
    Conv,
    Conv8,
    Deconv,
    Dequantize,
    Flatten,
    Move,
    Mul,
    Norm,
    Op,
    Pool,
    Quant,
    Quantize,
    Reduce,
    Resample,
    Rescale,
    Softmax,
    Strided,
)


class Value(NamedTuple):
    """A buffer: (B, C, H, W) with NaN where it is dead, and its live channels, bool (B, C).

    Of a quantised buffer the data are q - zero, so that zero is zero there too.
    """

    data: Tensor
    live: Tensor
    quant: Quant | None = None


# Ops: (op, sources as read, mask, shape of the destination) -> value


def _act(op: Conv | Affine | Activation | Add | Mul | Rescale, x: Tensor) -> Tensor:
    match op.act:
        case "none":
            return x
        case "relu":
            return x.clamp(min=0)
        case "relu6":
            return x.clamp(0, 6)
        case "leaky":
            return torch.where(x > 0, x, x * op.slope)
        case "silu":
            return x * torch.sigmoid(x)
        case "hardswish":
            return x * (x + 3).clamp(0, 6) / 6
        case "sigmoid":
            return torch.sigmoid(x)
        case "hardsigmoid":
            return (x + 3).clamp(0, 6) / 6
        case "gelu":
            return x * (1 + torch.erf(x / 2**0.5)) / 2
        case "gelu_tanh":
            return x * (1 + torch.tanh((2 / pi) ** 0.5 * (x + 0.044715 * x**3))) / 2
        case "elu":
            return torch.where(x < 0, op.slope * torch.expm1(x), x)
        case "tanh":
            return torch.tanh(x)
        case "hardtanh":
            return x.clamp(-op.slope, op.slope)
        case "mish":
            return x * torch.tanh(F.softplus(x))
        case "softplus":
            return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _keeps_zero(op: Conv | Affine | Activation | Add | Mul) -> bool:
    return op.act not in ("sigmoid", "hardsigmoid", "softplus")


def _alive(product: Tensor, live: Tensor) -> Tensor:
    """Zero where a channel is not live: what it was multiplied with, infinity even, makes nothing of it."""
    return product.masked_fill(~live[:, :, None, None], 0)


def conv(
    op: Conv, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int], factor: Tensor | None = None
) -> Value:
    x = src[0].data
    weight, bias = op.weight.to(x.dtype), op.bias.to(x.dtype)
    assert weight.shape == (shape[0], x.shape[1] // op.groups, *op.kernel)
    top, left, bottom, right = op.padding
    padded = F.pad(x, (left, right, top, bottom))
    y = F.conv2d(padded, weight, None, op.stride, 0, op.dilation, op.groups)
    added = bias[None]
    if op.shift is not None:
        assert factor is not None
        y, added = y * factor[:, :, None, None], factor * bias + op.shift.to(x.dtype)
    y = y + added[:, :, None, None]
    live = torch.ones(y.shape[:2], dtype=torch.bool) if mask is None else mask
    if op.residual:
        assert _keeps_zero(op), "a residual is fused only with activations that leave zero at zero"
        assert src[1].data.shape == y.shape
        y = _alive(y, live) + src[1].data
        live = live | src[1].live
    return Value(_act(op, y), live)


def macs(op: Conv | Deconv | Conv8, src: Value, mask: Tensor | None, shape: tuple[int, int, int]) -> Tensor:
    """For each group of the conv: live inputs times filters that are on; times taps times output positions.

    A transposed conv takes its taps at the positions of its input.
    """
    live_in, size = src.live, src.data.shape[2:] if isinstance(op, Deconv) else shape[1:]
    live_out = live_in.new_ones(len(live_in), shape[0]) if mask is None else mask
    ins, outs = (live.unflatten(1, (op.groups, -1)).sum(2) for live in (live_in, live_out))
    pairs: Tensor = (ins * outs).sum(1)
    return pairs * prod(op.kernel) * prod(size)


def _affine(op: Affine, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    (x,) = src
    scale, shift = (values.to(x.data.dtype)[:, None, None] for values in (op.scale, op.shift))
    assert len(scale) == len(shift) == shape[0]
    assert op.lift or (_keeps_zero(op) and not shift.any()), "an affine that makes something of zero lifts"
    return Value(_act(op, _alive(x.data * scale, x.live) + shift), torch.ones_like(x.live) if op.lift else x.live)


def rescale(op: Rescale, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int], factor: Tensor) -> Value:
    (x,) = src
    y = x.data * factor[:, :, None, None] + op.shift.to(x.data.dtype)[:, None, None]
    return Value(_act(op, y), torch.ones_like(x.live))


def _activation(op: Activation, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    (x,) = src
    return Value(_act(op, x.data), x.live if _keeps_zero(op) else torch.ones_like(x.live))


def _pointwise(op: Add | Mul, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    one, other = src
    assert one.data.shape[1:] == shape
    assert other.data.shape[1:] in (shape, (shape[0], 1, 1))
    if isinstance(op, Add):
        y, live = one.data + other.data, one.live | other.live
    else:
        live = one.live & other.live
        y = _alive(one.data * other.data, live)
    return Value(_act(op, y), live if _keeps_zero(op) else torch.ones_like(live))


def _cat(op: Cat, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    return Value(torch.cat([x.data for x in src], 1), torch.cat([x.live for x in src], 1))


def _move(op: Move, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    (x,) = src
    batch, channels, height, width = x.data.shape
    assert len(op.channels) == shape[0]
    assert min(op.stride) >= 1
    y = x.data.new_zeros(batch, *shape)
    live = x.live.new_zeros(batch, shape[0])
    rows = [row for row in range(shape[1]) if 0 <= row * op.stride[0] + op.offset[0] < height]
    columns = [column for column in range(shape[2]) if 0 <= column * op.stride[1] + op.offset[1] < width]
    from_rows = [row * op.stride[0] + op.offset[0] for row in rows]
    from_columns = [column * op.stride[1] + op.offset[1] for column in columns]
    for to, channel in enumerate(op.channels):
        assert -1 <= channel < channels
        if channel >= 0:
            live[:, to] = x.live[:, channel]
            if rows and columns:
                block = x.data[:, channel][:, from_rows][:, :, from_columns]
                y[:, to, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = block
    return Value(y, live)


def _window(size: int, start: int, count: int, dilation: int, pad: tuple[int, int]) -> tuple[list[int], int]:
    """Places of a window inside a map's side, and how many are inside it and its padding."""
    places = [start + i * dilation for i in range(count)]
    padded = [place for place in places if -pad[0] <= place < size + pad[1]]
    return [place for place in padded if 0 <= place < size], len(padded)


def _windows(op: Pool, dim: int, size: int, outputs: int) -> list[tuple[list[int], int]]:
    if op.adaptive:
        bounds = [(floor(i * size / outputs), ceil((i + 1) * size / outputs)) for i in range(outputs)]
        return [(list(range(low, high)), high - low) for low, high in bounds]
    pad = (op.padding[dim], op.padding[dim + 2])
    starts = [i * op.stride[dim] - pad[0] for i in range(outputs)]
    return [_window(size, start, op.kernel[dim], op.dilation[dim], pad) for start in starts]


def _pool(op: Pool, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    """Height, then width: a maximum of maxima, and a sum of sums divided by both sides' counts."""
    (x,) = src
    if op.adaptive:
        assert (op.kernel, op.stride, op.dilation, op.padding) == ((1, 1), (1, 1), (1, 1), (0, 0, 0, 0))
    y, counts = x.data, []
    for dim in (0, 1):
        windows = _windows(op, dim, y.shape[2 + dim], shape[1 + dim])
        assert all(places for places, _ in windows), "a window must touch the map"
        parts = [y.index_select(2 + dim, torch.tensor(places)) for places, _ in windows]
        y = torch.stack([part.amax(2 + dim) if op.op == "max" else part.sum(2 + dim) for part in parts], 2 + dim)
        counts.append(torch.tensor([padded if op.include_pad else len(places) for places, padded in windows]))
    if op.op == "avg":
        y = y / (counts[0][:, None] * counts[1])
        y = y if x.quant is None else dequantized(y, x.quant)
    return Value(y, x.live)


def _flatten(op: Flatten, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    (x,) = src
    return Value(x.data.flatten(1)[:, :, None, None], x.live.repeat_interleave(prod(x.data.shape[2:]), 1))


def _deconv(op: Deconv, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    """Each element of the source adds the kernel, times itself, to the output."""
    (x,) = src
    batch, channels, height, width = x.data.shape
    weight = op.weight.to(x.data.dtype)
    assert weight.shape == (channels, shape[0] // op.groups, *op.kernel)
    top, left = op.padding[:2]
    y = op.bias.to(x.data.dtype)[:, None, None].expand(batch, *shape).clone()
    parts = torch.stack(
        [
            torch.einsum("bihw,iokl->bohwkl", part, own)
            for part, own in zip(x.data.chunk(op.groups, 1), weight.chunk(op.groups), strict=True)
        ],
        1,
    ).flatten(1, 2)
    for row, column, i, j in product(range(height), range(width), range(op.kernel[0]), range(op.kernel[1])):
        to_row = row * op.stride[0] + i * op.dilation[0] - top
        to_column = column * op.stride[1] + j * op.dilation[1] - left
        if 0 <= to_row < shape[1] and 0 <= to_column < shape[2]:
            y[:, :, to_row, to_column] += parts[:, :, row, column, i, j]
    return Value(y, torch.ones(y.shape[:2], dtype=torch.bool))


def _resample(op: Resample, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    (x,) = src

    def along(data: Tensor, places: tuple[int, ...], weights: Tensor, dim: int) -> Tensor:
        taps = weights.shape[1]
        assert len(places) == weights.numel()
        lines = []
        for at, row in enumerate(weights.to(data.dtype).tolist()):
            line = torch.zeros_like(data.select(dim, 0))
            for place, weight in zip(places[at * taps : (at + 1) * taps], row, strict=True):
                if weight != 0:
                    line = line + weight * data.select(dim, place)
            lines.append(line)
        return torch.stack(lines, dim)

    return Value(along(along(x.data, op.rows, op.row_weights, 2), op.columns, op.column_weights, 3), x.live)


def _strided(op: Strided, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    """A channel with elements of several channels is live, another if its own is."""
    (x,) = src
    batch, _channels, height, width = x.data.shape
    assert prod(op.sizes) == prod(shape)
    places = torch.tensor([op.begin])
    for size, stride in zip(op.sizes, op.strides, strict=True):
        places = (places[:, None] + stride * torch.arange(size)).flatten()
    y = x.data.flatten(1)[:, places].view(batch, *shape)
    of = (places // (height * width)).view(shape[0], -1)
    mixed = (of != of[:, :1]).any(1)
    return Value(y, x.live[:, of[:, 0]] | mixed)


def _reduce(op: Reduce, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    (x,) = src
    apart = x.data.unflatten(1, (-1, shape[0]))
    y = {"sum": apart.sum(1), "avg": apart.mean(1), "max": apart.amax(1)}[op.op]
    return Value(y, torch.ones(y.shape[:2], dtype=torch.bool))


def _softmax(op: Softmax, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    (x,) = src
    apart = x.data.unflatten(1, (op.ways, -1))
    y = (apart.log_softmax(1) if op.log else apart.softmax(1)).flatten(1, 2)
    return Value(y, torch.ones_like(x.live))


def _norm(op: Norm, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    (x,) = src
    scale, shift = (values.to(x.data.dtype)[:, None, None] for values in (op.scale, op.shift))
    data = x.data
    if op.over == "group":
        grouped = data.reshape(len(data), op.groups, -1)
        away = grouped - grouped.mean(2, keepdim=True)
        y = (away / (away.square().mean(2, keepdim=True) + op.epsilon).sqrt()).view_as(data)
    elif op.over == "l2":
        y = data / data.square().sum(1, keepdim=True).sqrt().clamp(min=op.epsilon)
    else:
        away = data - data.mean(1, keepdim=True) if op.over == "layer" else data
        y = away / (away.square().mean(1, keepdim=True) + op.epsilon).sqrt()
    return Value(y * scale + shift, torch.ones_like(x.live))


def conv_in_int8(op: Conv8, src: list[Value], mask: Tensor | None, quant: Quant | None) -> Value:
    x = src[0]
    assert all(value.quant is not None for value in src), "a conv in int8 reads u8"
    on = torch.ones(len(x.data), len(op.weight), dtype=torch.bool) if mask is None else mask
    y = conv8(op, x.data, src[1].data if op.residual else None, on, quant)
    return Value(y, on | src[1].live if op.residual else on)


def to_u8(op: Quantize, src: list[Value], quant: Quant | None) -> Value:
    (x,) = src
    assert x.quant is None
    assert quant is not None
    return Value(quantized(x.data.float(), quant).to(x.data.dtype), x.live)


def _dequantize(op: Dequantize, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    (x,) = src
    assert x.quant is not None
    return Value(dequantized(x.data, x.quant), x.live)


OPS: dict[type[Op], Any] = {
    Conv: conv,
    Affine: _affine,
    Activation: _activation,
    Add: _pointwise,
    Mul: _pointwise,
    Cat: _cat,
    Move: _move,
    Pool: _pool,
    Flatten: _flatten,
    Dequantize: _dequantize,
    Deconv: _deconv,
    Resample: _resample,
    Strided: _strided,
    Reduce: _reduce,
    Softmax: _softmax,
    Norm: _norm,
}

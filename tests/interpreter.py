"""What a program means, in plain torch: docs/program.md line by line, and the oracle for every engine.

Strict: a channel that is not live holds NaN in memory, so that whoever reads it as anything but zero is found out; ops
may read only what was written and write only what they may. Computes in the dtype of the images: pass float64 for a
reference without rounding.

Shapes: B images, C channels, O filters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from itertools import product
from math import ceil, floor, pi, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cofire.runtime.program import (
    Activation,
    Add,
    Affine,
    Cat,
    Conv,
    Deconv,
    Flatten,
    Gate,
    Head,
    Move,
    Mul,
    Norm,
    Op,
    Pool,
    Program,
    Reduce,
    Resample,
    Rescale,
    Softmax,
    Strided,
    kind_of,
)

Masks = Mapping[str, Tensor]


class Value(NamedTuple):
    """A buffer: (B, C, H, W) with NaN where it is dead, and its live channels, bool (B, C)."""

    data: Tensor
    live: Tensor


class Trace(NamedTuple):
    """All that happened in a run."""

    out: Tensor
    masks: dict[str, Tensor]
    """Group -> bool (B, O)."""
    macs: dict[str, Tensor]
    """Conv op -> int64 (B,)."""
    logits: dict[str, Tensor]
    """Group -> (B, O), of forced groups too."""
    factors: dict[str, Tensor]
    """Group -> (B, O), of those whose head gives factors."""
    values: dict[str, Value]
    """Op -> what it wrote."""


def run(
    program: Program, x: Tensor, threshold: float | None = None, forced: Masks | None = None
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Outputs (B, *output_shape), masks by group, and MACs by conv op of a batch (B, C, H, W).

    Args:
        threshold: default: the program's.
        forced: group -> (O,) or (B, O) of 0/1; groups left out decide for themselves.
    """
    done = trace(program, x, threshold, forced)
    return done.out, done.masks, done.macs


@torch.no_grad()
def trace(
    program: Program,
    x: Tensor,
    threshold: float | None = None,
    forced: Masks | None = None,
    unscaled: Collection[str] | None = None,
) -> Trace:
    """The same with everything that happened on the way.

    Args:
        unscaled: groups whose factors are 1, whatever their heads say. Default: those that are forced.
    """
    assert tuple(x.shape[1:]) == program.buffers[program.input], "images must have the input buffer's shape"
    assert len({op.name for op in program.ops}) == len(program.ops), "names are unique"
    limit = program.threshold if threshold is None else threshold
    buffers = {program.input: Value(x, torch.ones(x.shape[:2], dtype=torch.bool))}
    done = Trace(x, {}, {}, {}, {}, {})
    for op in map(_normal, program.ops):
        residual_in_place = isinstance(op, Conv) and op.residual and op.dst == op.src[1]
        assert op.dst not in buffers or residual_in_place, f"{op.name} overwrites buffer {op.dst}"
        mask = _mask(program, op, buffers, limit, forced or {}, (forced or {}) if unscaled is None else unscaled, done)
        sources = [_read(buffers[src]) for src in op.src]
        if isinstance(op, Conv | Rescale) and op.shift is not None:
            assert op.gate is not None
            factor = done.factors[program.groups[op.gate.group].name]
            value = (_conv if isinstance(op, Conv) else _rescale)(op, sources, mask, program.buffers[op.dst], factor)
        else:
            value = _OPS[type(op)](op, sources, mask, program.buffers[op.dst])
        if isinstance(op, Conv | Deconv):
            done.macs[op.name] = _macs(op, buffers[op.src[0]], mask, program.buffers[op.dst])
        if mask is not None and not isinstance(op, Conv):
            value = Value(value.data, value.live & mask)
        assert value.data.shape == (len(x), *program.buffers[op.dst]), f"{op.name} gives {tuple(value.data.shape)}"
        assert value.live.shape == value.data.shape[:2]
        buffers[op.dst] = done.values[op.name] = _poisoned(value)
    out = _read(buffers[program.output]).data.reshape(len(x), *program.output_shape)
    return done._replace(out=out)


def _normal(part: Any) -> Any:
    """An op, a gate or a head whose weights below float32's normal range are zero, which is what they count as."""
    changed: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor) and value.is_floating_point():
            changed[field.name] = value.masked_fill(value.abs() < torch.finfo(torch.float32).tiny, 0)
        elif isinstance(value, Gate | Head):
            changed[field.name] = _normal(value)
    return replace(part, **changed)


def _read(value: Value) -> Value:
    """As ops see it: zero where it is dead."""
    return Value(value.data.masked_fill(~value.live[:, :, None, None], 0), value.live)


def _poisoned(value: Value) -> Value:
    return Value(value.data.masked_fill(~value.live[:, :, None, None], float("nan")), value.live)


# Gates


def _mask(
    program: Program,
    op: Op,
    buffers: dict[int, Value],
    threshold: float,
    forced: Masks,
    unscaled: Collection[str],
    done: Trace,
) -> Tensor | None:
    """The op's mask, bool (B, O); decided here, with the factors, if the op has a head."""
    if op.gate is None:
        return None
    group = program.groups[op.gate.group]
    if op.gate.head is None:
        assert group.name in done.masks, f"{op.name} follows a mask that was not decided yet"
    else:
        assert group.name not in done.masks, f"{op.name} decides a second time"
        head = op.gate.head
        x = _read(buffers[op.src[0] if head.src is None else head.src]).data
        logits = done.logits[group.name] = _logits(head, x).expand(-1, group.filters)
        mask = logits > threshold if head.top is None else _largest(logits, head.top)
        if group.name in forced:
            mask = (forced[group.name] > 0.5).expand(mask.shape)
        if head.scale:
            done.factors[group.name] = torch.ones_like(logits) if group.name in unscaled else logits.clamp(min=0)
        assert mask.shape == (len(x), group.filters)
        done.masks[group.name] = mask
    assert group.filters == program.buffers[op.dst][0]
    return done.masks[group.name]


def _logits(head: Head, x: Tensor) -> Tensor:
    x = x.flatten(2)
    pooled = {
        "max": lambda: x.amax(2),
        "avg": lambda: x.mean(2),
        "abs": lambda: x.abs().mean(2),
        "both": lambda: torch.cat([x.amax(2), x.mean(2)], 1),
    }[head.pool]()
    weight, bias = (None if w is None else w.to(x.dtype) for w in (head.weight, head.bias))
    return F.linear(pooled.softmax(1) if head.softmax else pooled, weight, bias)


def _largest(logits: Tensor, top: int) -> Tensor:
    """One after the other, the first of the largest that are left; NaN counts as less than any number."""
    mask = torch.zeros(logits.shape, dtype=torch.bool)
    for image, row in enumerate(logits.tolist()):
        order = sorted(range(len(row)), key=lambda o: (row[o] != row[o], 0 if row[o] != row[o] else -row[o], o))
        mask[image, order[:top]] = True
    return mask


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


def _keeps_zero(op: Activation | Add | Mul) -> bool:
    return op.act not in ("sigmoid", "hardsigmoid", "softplus")


def _conv(
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
        y = y.masked_fill(~live[:, :, None, None], 0) + src[1].data
        live = live | src[1].live
    return Value(_act(op, y), live)


def _macs(op: Conv | Deconv, src: Value, mask: Tensor | None, shape: tuple[int, int, int]) -> Tensor:
    """For each group of the conv: live inputs times filters that are on; times taps times output positions.

    A transposed conv takes its taps at the positions of its input.
    """
    live_in, size = src.live, src.data.shape[2:] if isinstance(op, Deconv) else shape[1:]
    live_out = live_in.new_ones(len(live_in), shape[0]) if mask is None else mask
    ins, outs = (live.unflatten(1, (op.groups, -1)).sum(2) for live in (live_in, live_out))
    return (ins * outs).sum(1) * prod(op.kernel) * prod(size)


def _affine(op: Affine, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    (x,) = src
    scale, shift = (values.to(x.data.dtype)[:, None, None] for values in (op.scale, op.shift))
    assert len(scale) == len(shift) == shape[0]
    assert op.lift or (_keeps_zero(op) and not shift.any()), "an affine that makes something of zero lifts"
    return Value(_act(op, x.data * scale + shift), torch.ones_like(x.live) if op.lift else x.live)


def _rescale(op: Rescale, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int], factor: Tensor) -> Value:
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
        y, live = one.data * other.data, one.live & other.live
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
    y = x.data
    for dim in (0, 1):
        parts = []
        for places, padded in _windows(op, dim, y.shape[2 + dim], shape[1 + dim]):
            assert places, "a window must touch the map"
            part = y.index_select(2 + dim, torch.tensor(places))
            if op.op == "max":
                parts.append(part.amax(2 + dim))
            else:
                parts.append(part.sum(2 + dim) / (padded if op.include_pad else len(places)))
        y = torch.stack(parts, 2 + dim)
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


_OPS = {
    Conv: _conv,
    Affine: _affine,
    Activation: _activation,
    Add: _pointwise,
    Mul: _pointwise,
    Cat: _cat,
    Move: _move,
    Pool: _pool,
    Flatten: _flatten,
    Deconv: _deconv,
    Resample: _resample,
    Strided: _strided,
    Reduce: _reduce,
    Softmax: _softmax,
    Norm: _norm,
}


def counts(program: Program) -> dict[str, int]:
    """Kind -> how many ops of it there are."""
    kinds = [kind_of(op) for op in program.ops]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

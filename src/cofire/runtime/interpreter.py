"""What a program means, in plain torch: docs/program.md line by line, and the oracle for every engine.

Strict: a channel that is not live holds NaN in memory, so that whoever reads it as anything but zero is found out; ops
may read only what was written and write only what they may. Computes in the dtype of the images: pass float64 for a
reference without rounding. What a program does in integers comes out bit for bit in either.

Shapes: B images, C channels, O filters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from math import ceil, floor, prod
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
    Dequantize,
    Flatten,
    Gate,
    Head,
    Move,
    Mul,
    Op,
    Pool,
    Program,
    Quant,
    Quantize,
    Rescale,
)

Masks = Mapping[str, Tensor]


class Value(NamedTuple):
    """A buffer: (B, C, H, W) with NaN where it is dead, and its live channels, bool (B, C).

    Of a quantised buffer the data are q - zero, so that zero is zero there too.
    """

    data: Tensor
    live: Tensor
    quant: Quant | None = None


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
    quants = {quant.buffer: quant for quant in program.quants}
    buffers = {program.input: Value(x, torch.ones(x.shape[:2], dtype=torch.bool))}
    done = Trace(x, {}, {}, {}, {}, {})
    for op in map(_normal, program.ops):
        residual_in_place = isinstance(op, Conv) and op.residual and op.dst == op.src[1]
        assert op.dst not in buffers or residual_in_place, f"{op.name} overwrites buffer {op.dst}"
        mask = _mask(program, op, buffers, limit, forced or {}, (forced or {}) if unscaled is None else unscaled, done)
        sources = [_read(buffers[src]) for src in op.src]
        value: Value
        if isinstance(op, Conv | Rescale) and op.shift is not None:
            assert op.gate is not None
            factor = done.factors[program.groups[op.gate.group].name]
            rescaling: Any = _conv if isinstance(op, Conv) else _rescale
            value = rescaling(op, sources, mask, program.buffers[op.dst], factor)
        elif isinstance(op, Conv8):
            value = _conv8(op, sources, mask, quants.get(op.dst))
        elif isinstance(op, Quantize):
            value = _quantize(op, sources, quants.get(op.dst))
        else:
            value = _OPS[type(op)](op, sources, mask, program.buffers[op.dst])
        value = value._replace(quant=quants.get(op.dst))
        if isinstance(op, Conv | Conv8):
            done.macs[op.name] = _macs(op, buffers[op.src[0]].live, mask, program.buffers[op.dst])
        elif mask is not None:
            value = value._replace(live=value.live & mask)
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
    return value._replace(data=value.data.masked_fill(~value.live[:, :, None, None], 0))


def _poisoned(value: Value) -> Value:
    return value._replace(data=value.data.masked_fill(~value.live[:, :, None, None], float("nan")))


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
        x = _read(buffers[op.src[0] if head.src is None else head.src])
        logits = done.logits[group.name] = _logits(head, x).expand(-1, group.filters)
        mask = logits > threshold if head.top is None else _largest(logits, head.top)
        if group.name in forced:
            mask = (forced[group.name] > 0.5).expand(mask.shape)
        if head.scale:
            done.factors[group.name] = torch.ones_like(logits) if group.name in unscaled else logits.clamp(min=0)
        assert mask.shape == (len(x.data), group.filters)
        done.masks[group.name] = mask
    assert group.filters == program.buffers[op.dst][0]
    return done.masks[group.name]


def _logits(head: Head, value: Value) -> Tensor:
    x = value.data.flatten(2)
    pooled = {
        "max": lambda: x.amax(2),
        "avg": lambda: x.mean(2),
        "abs": lambda: x.abs().mean(2),
        "both": lambda: torch.cat([x.amax(2), x.mean(2)], 1),
    }[head.pool]()
    if value.quant is not None:
        pooled = dequantized(pooled, value.quant)
    bias = None if head.bias is None else head.bias.to(x.dtype)
    return F.linear(pooled.softmax(1) if head.softmax else pooled, head.weight.to(x.dtype), bias)


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


def _keeps_zero(op: Conv | Affine | Activation | Add | Mul) -> bool:
    return op.act not in ("sigmoid", "hardsigmoid")


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


def _macs(op: Conv | Conv8, live_in: Tensor, mask: Tensor | None, shape: tuple[int, int, int]) -> Tensor:
    """For each group of the conv: live inputs times filters that are on; times taps times output positions."""
    live_out = live_in.new_ones(len(live_in), shape[0]) if mask is None else mask
    ins, outs = (live.unflatten(1, (op.groups, -1)).sum(2) for live in (live_in, live_out))
    pairs: Tensor = (ins * outs).sum(1)
    return pairs * prod(op.kernel) * prod(shape[1:])


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


def _conv8(op: Conv8, src: list[Value], mask: Tensor | None, quant: Quant | None) -> Value:
    x = src[0]
    assert all(value.quant is not None for value in src), "a conv in int8 reads u8"
    on = torch.ones(len(x.data), len(op.weight), dtype=torch.bool) if mask is None else mask
    y = conv8(op, x.data, src[1].data if op.residual else None, on, quant)
    return Value(y, on | src[1].live if op.residual else on)


def _quantize(op: Quantize, src: list[Value], quant: Quant | None) -> Value:
    (x,) = src
    assert x.quant is None
    assert quant is not None
    return Value(quantized(x.data.float(), quant).to(x.data.dtype), x.live)


def _dequantize(op: Dequantize, src: list[Value], mask: Tensor | None, shape: tuple[int, int, int]) -> Value:
    (x,) = src
    assert x.quant is not None
    return Value(dequantized(x.data, x.quant), x.live)


_OPS: dict[type[Op], Any] = {
    Conv: _conv,
    Affine: _affine,
    Activation: _activation,
    Add: _pointwise,
    Mul: _pointwise,
    Cat: _cat,
    Move: _move,
    Pool: _pool,
    Flatten: _flatten,
    Dequantize: _dequantize,
}

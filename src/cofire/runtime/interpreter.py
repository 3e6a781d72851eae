"""What a program means, in plain torch: docs/program.md line by line, and the oracle for every engine.

Strict: a channel that is not live holds NaN in memory, so that whoever reads it as anything but zero is found out; ops
may read only what was written and write only what they may. Computes in the dtype of the images: pass float64 for a
reference without rounding. What a program does in integers comes out bit for bit in either.

Shapes: B images, C channels, O filters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cofire.runtime.integers import dequantized
from cofire.runtime.meanings import OPS, Value, conv, conv_in_int8, macs, rescale, to_u8
from cofire.runtime.program import (
    Conv,
    Conv8,
    Deconv,
    Gate,
    Head,
    Op,
    Program,
    Quantize,
    Rescale,
)

Masks = Mapping[str, Tensor]


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
            rescaling: Any = conv if isinstance(op, Conv) else rescale
            value = rescaling(op, sources, mask, program.buffers[op.dst], factor)
        elif isinstance(op, Conv8):
            value = conv_in_int8(op, sources, mask, quants.get(op.dst))
        elif isinstance(op, Quantize):
            value = to_u8(op, sources, quants.get(op.dst))
        else:
            value = OPS[type(op)](op, sources, mask, program.buffers[op.dst])
        value = value._replace(quant=quants.get(op.dst))
        if isinstance(op, Conv | Deconv | Conv8):
            done.macs[op.name] = macs(op, buffers[op.src[0]], mask, program.buffers[op.dst])
        if mask is not None and not isinstance(op, Conv | Conv8):
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
    weight, features = head.weight.to(x.dtype), pooled.softmax(1) if head.softmax else pooled
    products = F.linear(features, weight).masked_fill(~(weight != 0).any(1), 0)  # also where features are not finite
    return products if head.bias is None else products + head.bias.to(x.dtype)


def _largest(logits: Tensor, top: int) -> Tensor:
    """One after the other, the first of the largest that are left; NaN counts as less than any number."""
    mask = torch.zeros(logits.shape, dtype=torch.bool)
    for image, row in enumerate(logits.tolist()):
        order = sorted(range(len(row)), key=lambda o: (row[o] != row[o], 0 if row[o] != row[o] else -row[o], o))
        mask[image, order[:top]] = True
    return mask

"""Program -> the same function in fewer ops: scales into convs, activations and residuals into what comes before.

Every rule follows from what ``docs/program.md`` says about two ops alone. Masks, live channels and MACs stay as they
are.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from cofire.runtime.program import (
    LIFTING,
    Act,
    Activation,
    Add,
    Affine,
    Conv,
    Deconv,
    Gate,
    Move,
    Mul,
    Op,
    Program,
    Rescale,
    Shape,
)

_HOMOGENEOUS: frozenset[Act] = frozenset({"none", "relu", "leaky"})  # act(factor * x) = factor * act(x), factor >= 0


def folded(program: Program) -> Program:
    """The same function of the input, with as few ops and buffers as the rules give."""
    ops = _pads_into_convs(program.ops, program.buffers)
    outputs = [output.buffer for output in program.outputs]
    ops = _into_producers(ops, program.buffers, outputs)
    ops = _scales_into_convs(ops, program)
    ops = _without_unread(ops, outputs)
    return _renumbered(_in_place(dataclasses.replace(program, ops=tuple(ops))))


def _readers(ops: Iterable[Op], outputs: list[int]) -> Counter[int]:
    """Buffer -> how often it is read."""
    return Counter(chain(outputs, *map(_read_by, ops)))


def _read_by(op: Op) -> tuple[int, ...]:
    """The buffers that an op reads, and the one that its head names."""
    pooled = None if op.gate is None or op.gate.head is None else op.gate.head.src
    return op.src if pooled is None else (*op.src, pooled)


def _pools_own_source(op: Op) -> bool:
    return op.gate is not None and op.gate.head is not None and op.gate.head.src is None


def reading(op: Op, holder: Mapping[int, int]) -> Op:
    """The op with other numbers for the buffers that it reads."""
    gate = op.gate
    if gate is not None and gate.head is not None and gate.head.src is not None:
        head = dataclasses.replace(gate.head, src=holder.get(gate.head.src, gate.head.src))
        gate = dataclasses.replace(gate, head=head)
    return dataclasses.replace(op, src=tuple(holder.get(buffer, buffer) for buffer in op.src), gate=gate)


# Padding


def _pads_into_convs(ops: Iterable[Op], buffers: tuple[Shape, ...]) -> list[Op]:
    pads = {op.dst: op for op in ops if isinstance(op, Move) and _only_pads(op, buffers)}
    return [_padding_itself(op, pads[op.src[0]], buffers) if _takes_pad(op, pads) else op for op in ops]


def _only_pads(move: Move, buffers: tuple[Shape, ...]) -> bool:
    (channels, *size), (_, *padded) = buffers[move.src[0]], buffers[move.dst]
    around = all(offset <= 0 and n - offset <= m for offset, n, m in zip(move.offset, size, padded, strict=True))
    return around and move.channels == tuple(range(channels)) and move.stride == (1, 1) and move.gate is None


def _takes_pad(op: Op, pads: dict[int, Move]) -> bool:
    # A head pools the padded map, so its conv has to read that.
    return isinstance(op, Conv) and op.src[0] in pads and not _pools_own_source(op)


def _padding_itself(op: Op, pad: Move, buffers: tuple[Shape, ...]) -> Op:
    assert isinstance(op, Conv)
    (_, height, width), (_, padded_height, padded_width) = buffers[pad.src[0]], buffers[pad.dst]
    before_h, before_w = -pad.offset[0], -pad.offset[1]
    more = (before_h, before_w, padded_height - height - before_h, padded_width - width - before_w)
    top, left, bottom, right = (own + extra for own, extra in zip(op.padding, more, strict=True))
    return dataclasses.replace(op, src=(pad.src[0], *op.src[1:]), padding=(top, left, bottom, right))


# An op and the one that alone reads it


def _into_producers(ops: Iterable[Op], buffers: tuple[Shape, ...], outputs: list[int]) -> list[Op]:
    ops = list(ops)
    readers = _readers(ops, outputs)
    done: dict[int, Op] = {}  # by the buffer they write, in order
    for op in ops:
        producers = [done[buffer] for buffer in op.src if readers[buffer] == 1 and buffer in done]
        # Of two convs that are added up the gated one, whose filters that are off then leave the sum alone; else the
        # later one. The result takes the place of the reader, where all that it reads is there.
        for first in sorted(reversed(producers), key=lambda producer: producer.gate is None):
            joined = _joined(first, op, buffers)
            if joined is not None:
                del done[first.dst]
                op = joined
                break
        done[op.dst] = op
    return list(done.values())


def _joined(first: Op, second: Op, buffers: tuple[Shape, ...]) -> Op | None:
    """One op that does what ``first`` and then ``second``, its only reader, do; None if there is none."""
    if isinstance(first, Conv) and isinstance(second, Rescale):
        return _with_factor(first, second)
    if not isinstance(first, Conv | Affine | Add | Mul | Rescale) or first.act != "none":
        return None
    if isinstance(second, Add):
        return _with_residual(first, second, buffers) if isinstance(first, Conv) else None
    if not isinstance(second, Affine | Activation):
        return None
    lifts = second.act in LIFTING or (isinstance(second, Affine) and second.lift)
    residual = isinstance(first, Conv) and first.residual
    if not _gates_join(first.gate, second.gate, lifts) or (residual and (lifts or second.gate is not None)):
        return None
    acted = dataclasses.replace(
        first, dst=second.dst, gate=first.gate or second.gate, act=second.act, slope=second.slope
    )
    if isinstance(acted, Affine):
        acted = dataclasses.replace(acted, lift=acted.lift or lifts)
    if isinstance(second, Activation):
        return acted
    if isinstance(acted, Conv) and not residual:
        weight, bias = _times(acted.weight, second.scale), acted.bias * second.scale
        if acted.shift is not None:
            return dataclasses.replace(acted, weight=weight, bias=bias, shift=acted.shift * second.scale + second.shift)
        return dataclasses.replace(acted, weight=weight, bias=bias + second.shift)
    if isinstance(acted, Affine):
        return dataclasses.replace(
            acted, scale=acted.scale * second.scale, shift=acted.shift * second.scale + second.shift
        )
    return None


def _with_factor(conv: Conv, rescale: Rescale) -> Op | None:
    """The conv that rescales its sums itself, before its activation or, where that is the same, after it."""
    assert rescale.gate is not None
    if conv.residual or conv.shift is not None or not _gates_join(conv.gate, rescale.gate, lifts=True):
        return None
    act, slope = rescale.act, rescale.slope
    if conv.act != "none":
        if conv.act not in _HOMOGENEOUS or act != "none" or rescale.shift.any():
            return None
        act, slope = conv.act, conv.slope
    gate = conv.gate or rescale.gate
    return dataclasses.replace(conv, dst=rescale.dst, gate=gate, shift=rescale.shift, act=act, slope=slope)


def _with_residual(conv: Conv, add: Add, buffers: tuple[Shape, ...]) -> Op | None:
    """The conv that adds the sum's other operand itself. Its own gate stays: what is off keeps the residual."""
    if conv.residual or add.gate is not None or add.act in LIFTING:
        return None
    others = [buffer for buffer in add.src if buffer != conv.dst]
    if len(others) != 1 or buffers[others[0]] != buffers[conv.dst]:
        return None
    return dataclasses.replace(
        conv, src=(*conv.src, others[0]), dst=add.dst, residual=True, act=add.act, slope=add.slope
    )


def _gates_join(first: Gate | None, second: Gate | None, lifts: bool) -> bool:
    """Whether one mask at the end does what the two ops' masks do; ``lifts``: the second makes something of zero."""
    if second is None:
        return first is None or not lifts
    if second.head is not None:  # it pools what only the second op reads
        return False
    return first is None or first.group == second.group


def _times(weight_OIHW: Tensor, scale_O: Tensor) -> Tensor:
    return (weight_OIHW.double() * scale_O[:, None, None, None]).to(weight_OIHW.dtype)


# A scale and the conv that alone reads it


def _scales_into_convs(ops: list[Op], program: Program) -> list[Op]:
    readers = _readers(ops, [output.buffer for output in program.outputs])
    scales = {op.dst: op for op in ops if isinstance(op, Affine) and readers[op.dst] == 1 and _may_follow(op, program)}
    return [_scaling_itself(op, scales[op.src[0]]) if _takes_scale(op, scales) else op for op in ops]


def _may_follow(scale: Affine, program: Program) -> bool:
    # With gates, a shift brings dead channels to life, and the conv has to read them all.
    return scale.act == "none" and scale.gate is None and not (scale.lift and program.groups)


def _takes_scale(op: Op, scales: dict[int, Affine]) -> bool:
    if not isinstance(op, Conv) or op.src[0] not in scales or _pools_own_source(op):
        return False
    return not any(op.padding) or not bool(scales[op.src[0]].shift.any())  # what is padded must be zero


def _scaling_itself(op: Op, scale: Affine) -> Op:
    assert isinstance(op, Conv)
    per_filter = (op.groups, -1), len(op.weight) // op.groups  # the inputs of each group, for each of its filters
    scale_OI11, shift_OI11 = (
        values.view(per_filter[0]).repeat_interleave(per_filter[1], 0)[:, :, None, None]
        for values in (scale.scale, scale.shift)
    )
    weight = op.weight.double()
    bias = op.bias + (weight * shift_OI11).sum((1, 2, 3))
    weight = (weight * scale_OI11).to(op.weight.dtype)
    return dataclasses.replace(op, src=(scale.src[0], *op.src[1:]), weight=weight, bias=bias)


# Buffers


def _without_unread(ops: list[Op], outputs: list[int]) -> list[Op]:
    """Without what nobody reads any more; convs stay, for their MACs are counted."""
    readers = _readers(ops, outputs)
    kept: list[Op] = []
    for op in reversed(ops):
        if readers[op.dst] or isinstance(op, Conv | Deconv):
            kept.append(op)
        else:
            readers.subtract(_read_by(op))
    return kept[::-1]


def _in_place(program: Program) -> Program:
    """A conv writes into its residual's buffer where it is the last to read it."""
    last = {buffer: place for place, op in enumerate(program.ops) for buffer in _read_by(op)}
    callers = [program.input, *(output.buffer for output in program.outputs)]
    last |= dict.fromkeys(callers, len(program.ops))
    holder: dict[int, int] = {}
    ops = []
    for place, op in enumerate(program.ops):
        old, op = op, reading(op, holder)
        if isinstance(op, Conv) and op.residual and last[old.src[1]] == place and old.src[0] != old.src[1]:
            holder[op.dst] = op.src[1]
        ops.append(dataclasses.replace(op, dst=holder.get(op.dst, op.dst)))
    return _giving(dataclasses.replace(program, ops=tuple(ops)), holder)


def _giving(program: Program, holder: Mapping[int, int]) -> Program:
    """The program with other numbers for the buffers that its caller gets."""
    first, *more = [dataclasses.replace(out, buffer=holder.get(out.buffer, out.buffer)) for out in program.outputs]
    return dataclasses.replace(program, output=first.buffer, more_outputs=tuple(more))


def _renumbered(program: Program) -> Program:
    """Buffers and groups in the order in which they are written and decided, without gaps; weights in float32."""
    buffers = list(dict.fromkeys([program.input, *(op.dst for op in program.ops)]))
    groups = [op.gate.group for op in program.ops if op.gate is not None and op.gate.head is not None]
    buffer_number = {old: new for new, old in enumerate(buffers)}
    group_number = {old: new for new, old in enumerate(groups)}

    def renumbered(op: Op) -> Op:
        weights: dict[str, Any] = {name: value.float() for name, value in vars(op).items() if isinstance(value, Tensor)}
        op = reading(op, buffer_number)
        gate = None if op.gate is None else dataclasses.replace(op.gate, group=group_number[op.gate.group])
        return dataclasses.replace(op, dst=buffer_number[op.dst], gate=gate, **weights)

    return dataclasses.replace(
        _giving(program, buffer_number),
        input=buffer_number[program.input],
        buffers=tuple(program.buffers[buffer] for buffer in buffers),
        groups=tuple(program.groups[group] for group in groups),
        ops=tuple(renumbered(op) for op in program.ops),
    )

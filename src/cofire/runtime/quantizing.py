"""Program -> the same in int8: which ops, which buffers, which weights.

Convs compute in integers; ops that only move or compare numbers take them as they are; all others stay in float32, with
a conversion where the two meet.

Shapes: O filters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from cofire.runtime.folding import reading
from cofire.runtime.integers import in_steps
from cofire.runtime.program import (
    Act,
    Activation,
    Cat,
    Conv,
    Conv8,
    Dequantize,
    Flatten,
    Gate,
    Move,
    Op,
    Pool,
    Program,
    Quant,
    Quantize,
)
from cofire.runtime.ranges import SCALES, Ranges, as_float32

_CLAMPS: frozenset[Act] = frozenset({"none", "relu", "relu6"})
_MOST_BIAS = 1 << 30  # leaves the other half of int32 to the sum


def quantized_program(program: Program, images: Iterable[Tensor], keep: Collection[str]) -> Program:
    """The program in int8, with ranges that fit ``images``, batches (B, C, H, W); ops in ``keep`` stay in float32."""
    return _Quantizer(_one_op_per_buffer(program), images, keep).run()


def _is_conv(op: Op) -> bool:
    """Whether an op is a conv that integers can compute: all that follows its sum is a clamp."""
    return isinstance(op, Conv) and op.act in _CLAMPS and op.shift is None


def _passes(op: Op) -> bool:
    """Whether an op's outputs are among its inputs, so that it works on numbers of either form."""
    return isinstance(op, Move | Cat | Flatten) or (isinstance(op, Pool) and op.op == "max")


def _averages(op: Op) -> bool:
    """Whether an op may read u8 but writes float32."""
    return isinstance(op, Pool) and op.op == "avg"


def _one_op_per_buffer(program: Program) -> Program:
    """Without convs that write into their residual's buffer, for the two have scales of their own."""
    buffers, ops, now = list(program.buffers), [], {program.input: program.input}
    for op in program.ops:
        dst = op.dst
        if dst in now:
            dst = len(buffers)
            buffers.append(program.buffers[op.dst])
        ops.append(dataclasses.replace(reading(op, now), dst=dst))
        now[op.dst] = dst
    more = tuple(dataclasses.replace(output, buffer=now[output.buffer]) for output in program.more_outputs)
    output = now[program.output]
    return dataclasses.replace(program, buffers=tuple(buffers), ops=tuple(ops), output=output, more_outputs=more)


def _chosen(program: Program, keep: Collection[str]) -> tuple[set[int], set[int]]:
    """The ops that compute in int8, by the buffers they write; and the buffers that someone wants as u8.

    What only passes numbers on does so in int8 where its output is wanted so.
    """
    able = {op.dst for op in program.ops if op.name not in keep and (_is_conv(op) or _passes(op))}
    eights: set[int] = set()
    wanted: set[int] = set()
    for op in reversed(program.ops):
        if op.dst in able and (isinstance(op, Conv) or op.dst in wanted):
            eights.add(op.dst)
            wanted.update(op.src)
        elif _averages(op) and op.src[0] in able:
            wanted.add(op.src[0])
    return eights, wanted


def _alike(program: Program, eights: Collection[int]) -> dict[int, set[int]]:
    """Buffer -> all that share its scale and zero: those between which numbers are only passed on."""
    alike = {buffer: {buffer} for buffer in range(len(program.buffers))}
    for op in program.ops:
        if op.dst in eights and _passes(op):
            joined = alike[op.dst].union(*(alike[source] for source in op.src))
            alike |= dict.fromkeys(joined, joined)
    return alike


class _Quantizer:
    """Writes the ops anew, one after the other, with conversions before the first op that needs them."""

    def __init__(self, program: Program, images: Iterable[Tensor], keep: Collection[str]) -> None:
        self.old = program
        self.eights, self.wanted = _chosen(program, keep)
        self.alike = _alike(program, self.eights)
        self.ranges = Ranges(program, images)
        self.names = {op.dst: op.name for op in program.ops} | {program.input: "input"}
        self.buffers = [program.buffers[program.input]]
        self.ops: list[Op] = []
        self.float32 = {program.input: 0}  # old buffer -> the new one that holds it in this form
        self.u8: dict[int, Quant] = {}

    def run(self) -> Program:
        """The quantised program."""
        for op in self.old.ops:
            self._write(op)
        output = self._as_float32(self.old.output)
        more = tuple(
            dataclasses.replace(output, buffer=self._as_float32(output.buffer)) for output in self.old.more_outputs
        )
        quants = tuple(sorted(self.u8.values(), key=lambda quant: quant.buffer))
        buffers, ops = tuple(self.buffers), tuple(self.ops)
        return dataclasses.replace(
            self.old, input=0, output=output, buffers=buffers, ops=ops, quants=quants, more_outputs=more
        )

    def _write(self, op: Op) -> None:
        gate = self._gate(op)
        if op.dst in self.eights:
            sources = [self._as_u8(source) for source in op.src]
            if isinstance(op, Conv):
                self._write_conv(op, sources, gate)
            else:
                src = tuple(source.buffer for source in sources)
                self.ops.append(dataclasses.replace(op, src=src, dst=self._new_u8(op.dst).buffer, gate=gate))
        else:
            u8 = [op.src[0]] if _averages(op) and op.src[0] in self.u8 else []
            src = tuple(self.u8[source].buffer if source in u8 else self._as_float32(source) for source in op.src)
            self.ops.append(dataclasses.replace(op, src=src, dst=self._new_float32(op.dst), gate=gate))

    def _write_conv(self, conv: Conv, sources: Sequence[Quant], gate: Gate | None) -> None:
        if conv.dst in self.wanted:
            self.ops.append(_conv8(conv, sources, self._new_u8(conv.dst), gate))
            return
        sums = self._new_float32(conv.dst)
        self.ops.append(_conv8(conv, sources, sums, gate))
        if conv.act != "none":
            name, dst = self._unique(f"{conv.name}.{conv.act}"), self._new_float32(conv.dst)
            self.ops.append(Activation(name=name, src=(sums,), dst=dst, gate=None, act=conv.act, slope=conv.slope))

    def _gate(self, op: Op) -> Gate | None:
        """The op's gate, whose head reads a buffer as it was written, with weights that fit into bytes."""
        head = None if op.gate is None else op.gate.head
        if op.gate is None or head is None:
            return op.gate
        weight = head.weight if head.scale else in_steps(head.weight)
        src = head.src
        if src is not None:
            src = self.u8[src].buffer if src in self.u8 else self.float32[src]
        return dataclasses.replace(op.gate, head=dataclasses.replace(head, weight=weight, src=src))

    def _as_u8(self, old: int) -> Quant:
        if old not in self.u8:
            source, name = self.float32[old], self._unique(f"{self.names[old]}.u8")
            self.ops.append(Quantize(name=name, src=(source,), dst=self._new_u8(old).buffer, gate=None))
        return self.u8[old]

    def _as_float32(self, old: int) -> int:
        if old not in self.float32:
            source, name = self.u8[old].buffer, self._unique(f"{self.names[old]}.float32")
            self.ops.append(Dequantize(name=name, src=(source,), dst=self._new_float32(old), gate=None))
        return self.float32[old]

    def _new_u8(self, old: int) -> Quant:
        self.u8[old] = self.ranges.quant(len(self.buffers), self.alike[old])
        self.buffers.append(self.old.buffers[old])
        return self.u8[old]

    def _new_float32(self, old: int) -> int:
        self.float32[old] = len(self.buffers)
        self.buffers.append(self.old.buffers[old])
        return self.float32[old]

    def _unique(self, name: str) -> str:
        taken = {*self.names.values(), *(op.name for op in self.ops)}
        while name in taken:
            name += "_"
        return name


def _conv8(conv: Conv, sources: Sequence[Quant], to: Quant | int, gate: Gate | None) -> Conv8:
    """The conv in int8; ``to`` is a buffer of float32 if it is only a number."""
    unit = to.scale if isinstance(to, Quant) else 1.0
    weight, bias = conv.weight.double(), conv.bias.double()
    scale_O = weight.abs().amax((1, 2, 3)) / 127
    scale_O = torch.where(scale_O > 0, scale_O, torch.ones_like(scale_O))
    scale_O = scale_O.maximum(bias.abs() / (sources[0].scale * _MOST_BIAS))
    multiplier_O = (scale_O * sources[0].scale / unit).clamp(*SCALES)
    zero = to.zero if isinstance(to, Quant) else 0
    bends = isinstance(to, Quant) and conv.act != "none"
    six = isinstance(to, Quant) and conv.act == "relu6"
    return Conv8(
        name=conv.name,
        src=tuple(source.buffer for source in sources),
        dst=to.buffer if isinstance(to, Quant) else to,
        gate=gate,
        kernel=conv.kernel,
        stride=conv.stride,
        padding=conv.padding,
        dilation=conv.dilation,
        groups=conv.groups,
        residual=conv.residual,
        low=zero if bends else 0,
        high=min(255, zero + round(6 / unit)) if six else 255,
        residual_multiplier=as_float32(sources[1].scale / unit) if conv.residual else 0.0,
        weight=(weight / scale_O[:, None, None, None]).round().to(torch.int8),
        bias=(bias / (scale_O * sources[0].scale)).round().to(torch.int32),
        multiplier=multiplier_O.float(),
    )

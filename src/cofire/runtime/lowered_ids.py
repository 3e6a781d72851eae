"""What every lowering of a call needs: ids and the buffers that hold them, and ops on one or two operands."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx, nn

from cofire.errors import CompileError
from cofire.graph.graph import Graph
from cofire.graph.ops import Op as Call
from cofire.graph.walk import Walk
from cofire.runtime.building import ArrangementError, Builder
from cofire.runtime.elementwise import Bend, Scaling
from cofire.runtime.gates import LoweredGates
from cofire.runtime.program import (
    Activation,
    Add,
    Affine,
    Mul,
    Output,
)

SUPPORTED = (
    "convs of one or two dimensions, with any padding, and transposed ones; Linear; batch, group, layer, instance and "
    "RMS norms; ReLU, ReLU6, LeakyReLU, PReLU, SiLU, Hardswish, Sigmoid, Hardsigmoid, GELU, ELU, Tanh, Hardtanh, "
    "clamp, Mish, Softplus; softmax and log-softmax; L2 normalisation; adding and multiplying tensors, numbers and "
    "parameters per channel; concatenating, splitting, stacking, choosing, shuffling, slicing, turning and padding; "
    "upsampling and pixel shuffle; max, average and adaptive pooling; mean, sum and maximum over channels or space; "
    "flatten; dropout"
)

_SECOND = 2.0**48  # an id of the second image is that of the first, and this


class AbstractLowering(Walk):
    """The state of a walk that lowers calls."""

    def __init__(self, graph: Graph, gates: LoweredGates, inside: AbstractLowering | None = None) -> None:
        """``inside`` is the walk whose input and ops this one shares."""
        super().__init__(graph.root, graph.calls)
        self.input_shape = graph.input_shape
        self.extra_traceback = False  # our errors name the call themselves
        self.calls = {call.name: call for call in graph.ops}
        self.gates, self.shifts, self.looks = dict(gates.of_call), gates.shifts, gates.looks
        self.answers = gates.answers
        self.looked: dict[nn.Module, list[Output]] = {}  # what modules that see the image gave
        self.choices, self.inners = gates.choices, gates.inners
        own = "" if inside is None else "gates."  # apart from the network's layers, whatever those are called
        self.layers = {op.name: own + name for name, op in graph.layers.items()}
        self.builder: Builder = Builder(set(self.layers.values())) if inside is None else inside.builder
        self.first: int = -1 if inside is None else inside.first
        self.outputs: list[Output] = []
        self.structure: Any = None

    def _read(self, source: fx.Node) -> int:
        """The buffer with what ``source`` gave; of more than three dimensions the first ones are channels."""
        ids = of_one(self.ids[source])
        buffer = self._gathered(ids, source.name)
        # The next reader finds it in one piece.
        self.ids[source] = of_both(self.builder.ids(buffer, tuple(ids.shape)))
        return buffer

    def _gathered(self, ids: Tensor, name: str) -> int:
        return self.builder.gathered(ids.reshape(as_map(tuple(ids.shape))), name)

    def _refused(self, n: fx.Node, why: str) -> CompileError:
        path = str(n.target) if n.op == "call_module" else n.meta.get("inside", "")
        where = f"module {path!r}" if path else "the model's own forward"
        before = self.builder.ops[-1].name if self.builder.ops else None
        rest = f"\nWhat comes before it can be, up to {before!r}: compile that part alone." if before else ""
        what = f"{n.name!r} ({self.calls[n.name].what} in {where})"
        return CompileError(f"{what} cannot be compiled: {why}.{rest}\nSupported: {SUPPORTED}.")

    def _channels_first(self, n: fx.Node, source: fx.Node) -> int:
        """A buffer whose channels are the last dimension of what ``source`` gave."""
        ids = of_one(self.ids[source]).movedim(-1, 0)
        return self.builder.gathered(ids.reshape(len(ids), ids.shape[1], -1), n.name)

    def _channels_last(self, buffer: int, shape: tuple[int, ...]) -> Tensor:
        """The ids of a buffer whose channels are the last dimension of ``shape``."""
        return of_both(self.builder.ids(buffer, (shape[-1], *shape[:-1])).movedim(0, -1))

    def _affine(self, n: fx.Node, call: Call, buffer: int, scaling: Scaling, *, lift: bool) -> int:
        return self.builder.emit(
            Affine,
            n.name,
            (buffer,),
            call.shape,
            self.gates.get(n.name),
            lift=lift,
            act="none",
            slope=0.0,
            scale=scaling.scale_C.cpu(),
            shift=scaling.shift_C.cpu(),
        )

    def _activation(self, n: fx.Node, buffer: int, bend: Bend) -> int:
        gate, shape = self.gates.get(n.name), self.builder.buffers[buffer]
        made = self.builder.emit(Activation, n.name, (buffer,), shape, gate, act=bend.act, slope=bend.slope)
        return self._scaled(n, made, bend.factor)

    # Two operands

    def _add(self, n: fx.Node, call: Call, sources: list[fx.Node]) -> int:
        """Factors are found by trying, for subtraction and ``alpha`` make additions too."""

        def tried(*values: float) -> float:
            ones = [1] * (1 + len(call.shape))
            return float(self._call(n, {place: torch.full(ones, value) for place, value in enumerate(values)}))

        factors = (tried(1.0, 0.0), tried(0.0, 1.0))
        src = [self._operand(n, call, source) for source in sources]
        scaled = [self._scaled(n, buffer, factor) for buffer, factor in zip(src, factors, strict=True)]
        return self._combined(n, call, Add, scaled)

    def _scaled(self, n: fx.Node, buffer: int, factor: float, more: float = 0.0) -> int:
        if factor == 1 and more == 0:
            return buffer
        shape = self.builder.buffers[buffer]
        scale, shift = (torch.full(shape[:1], float(value)).double() for value in (factor, more))
        attrs: dict[str, Any] = {"lift": more != 0, "act": "none", "slope": 0.0, "scale": scale, "shift": shift}
        return self.builder.emit(Affine, n.name, (buffer,), shape, **attrs)

    def _operand(self, n: fx.Node, call: Call, source: fx.Node) -> int:
        """An operand of the result's shape, or with one element per channel; what else is broadcast is written out."""
        shape = tuple(self.ids[source].shape[1:])
        per_channel = (*call.shape[:-2], 1, 1)
        if shape in (call.shape, per_channel):
            return self._read(source)
        wanted = per_channel if shape[-2:] == (1, 1) and len(shape) > 2 else call.shape
        return self._gathered(of_one(self.ids[source]).expand(wanted), n.name)

    def _combined(self, n: fx.Node, call: Call, kind: type[Add] | type[Mul], src: list[int]) -> int:
        shape = as_map(call.shape)
        whole = self.builder.buffers[src[0]] == (*shape, 1, 1)[:3]
        ordered = tuple(src if whole else src[::-1])  # what is broadcast comes second
        return self.builder.emit(kind, n.name, ordered, shape, self.gates.get(n.name), act="none", slope=0.0)


def as_map(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(C, H, W) or (C) of the same elements in the same order: all but the last two dimensions are channels."""
    if len(shape) == 2:
        return (shape[0], shape[1], 1)
    return shape if len(shape) < 4 else (math.prod(shape[:-2]), *shape[-2:])


def of_both(ids: Tensor) -> Tensor:
    """The ids of both images; those of the second are out of the first one's range."""
    return torch.stack([ids, ids + _SECOND])


def of_one(ids: Any) -> Tensor:
    """The ids of the first image, where those of the second are the same, moved likewise."""
    if not isinstance(ids, Tensor) or len(ids) != 2 or not torch.equal(ids[0] + _SECOND * (ids[0] > 0), ids[1]):
        raise ArrangementError("it must keep the images of a batch apart")
    return ids[0]

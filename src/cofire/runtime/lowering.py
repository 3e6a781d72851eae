"""Model -> Program: the calls of a plain or gated model, in eval mode, as the ops the native engine has."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from cofire.errors import CompileError
from cofire.gates.gating import GatedModel
from cofire.graph.graph import Graph, trace
from cofire.graph.ops import Op as Call
from cofire.graph.tracing import evaluating, norm_activates
from cofire.graph.walk import Walk
from cofire.runtime.building import ArrangementError, Builder
from cofire.runtime.elementwise import Bend, Scaling, recognised
from cofire.runtime.folding import folded
from cofire.runtime.gates import LoweredGates, after_choice, copied, lower_gates
from cofire.runtime.program import Activation, Add, Affine, Conv, Group, Mul, Pool, Program, Rescale
from cofire.runtime.windows import CONV, arguments, conv_window, own_padding, pool_window

SUPPORTED = (
    "Conv2d with zero padding; Linear on vectors; BatchNorm2d, and norms that in eval mode compute like it; "
    "ReLU, ReLU6, LeakyReLU, SiLU, Hardswish, Sigmoid, Hardsigmoid; "
    "adding and multiplying tensors, numbers and parameters per channel; "
    "concatenating, splitting, choosing, shuffling and zero-padding channels; slices and zero padding of maps; "
    "max, average and adaptive pooling; mean and amax over (2, 3); flatten; dropout"
)

_SECOND = 2.0**48  # an id of the second image is that of the first, and this


def lower(model: nn.Module, input_shape: tuple[int, int, int] | None = None) -> Program:
    """The program of ``model``, plain or gated, as it computes in eval mode; ``model`` is left alone.

    Args:
        input_shape: (C, H, W) of an image. Default: the shape a gated model or a registered backbone was made for,
            else 224 x 224.

    Raises:
        CompileError: the engine has nothing like some call or gate; names it and lists what there is.
        TraceError: the model cannot be traced, or does not run at ``input_shape``.
    """
    threshold, gates = 0.0, LoweredGates()
    if isinstance(model, GatedModel):
        graph = model.graph.at(input_shape or model.graph.input_shape)
        threshold, gates = model.threshold or 0.0, lower_gates(model, graph)
    else:
        graph = trace(model, input_shape)
    walk = _Lowering(graph, gates)
    with torch.no_grad(), evaluating(graph.root):
        walk.run(_two_images(graph.root, graph.input_shape))
    return folded(walk.program(tuple(gates.groups), threshold))


def _two_images(model: nn.Module, shape: tuple[int, int, int]) -> Tensor:
    tensors = [*model.parameters(), *model.buffers()]
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.zeros(1))
    return torch.zeros(2, *shape, device=like.device, dtype=like.dtype)


class _Lowering(Walk):
    """The walk that found the calls' kinds, once more, with an id for each element in place of one for each channel.

    Every call becomes one op or more, unfused; calls that only move data become ops where something reads the result.
    """

    def __init__(self, graph: Graph, gates: LoweredGates, inside: _Lowering | None = None) -> None:
        """``inside`` is the walk whose input and ops this one shares."""
        super().__init__(graph.root, graph.calls)
        self.input_shape = graph.input_shape
        self.extra_traceback = False  # our errors name the call themselves
        self.calls = {call.name: call for call in graph.ops}
        self.gates, self.shifts, self.looks = dict(gates.of_call), gates.shifts, gates.looks
        self.choices = gates.choices
        own = "" if inside is None else "gates."  # apart from the network's layers, whatever those are called
        self.layers = {op.name: own + name for name, op in graph.layers.items()}
        self.builder: Builder = Builder(set(self.layers.values())) if inside is None else inside.builder
        self.first: int = -1 if inside is None else inside.first
        self.last = -1
        self.last_shape: tuple[int, ...] = ()

    def program(self, groups: tuple[Group, ...], threshold: float) -> Program:
        """What the walk has lowered."""
        return Program(
            input=self.first,
            output=self.last,
            output_shape=self.last_shape,
            buffers=tuple(self.builder.buffers),
            groups=groups,
            threshold=threshold,
            ops=tuple(self.builder.ops),
        )

    def _record(self, n: fx.Node, sources: list[fx.Node], operands: list[Any], result: Any) -> None:
        call = self.calls.get(n.name)
        if call is None:
            return  # sizes, checks, parameters
        try:
            if call.kind == "output":
                self._end(n, result)
            else:
                self.ids[n] = self._lowered(n, call, sources)
                if n.name in self.shifts:
                    self._rescale(n, call)
                self._follow_writes(n, result)
        except ArrangementError as error:
            raise self._refused(n, str(error)) from None
        for node in self.user_to_last_uses.get(n, ()):
            self.ids.pop(node, None)

    def _lowered(self, n: fx.Node, call: Call, sources: list[fx.Node]) -> Any:
        """The ids of a call's result."""
        callee = self._callee(n)
        if call.kind == "move":
            moved = self._moved(n, callee)
            if moved is None:
                raise self._refused(n, "there is no such op")
            if callee not in (torch.cat, torch.concat):
                return moved
            buffer = self.builder.gathered(_of_one(moved), n.name)  # once, for many may read what is joined here
        elif call.kind in ("activation", "lift", "pass"):
            attrs = pool_window(n, callee, self.env)
            made = (
                self._elementwise(n, call, callee, sources[0])
                if attrs is None
                else self._pool(n, call, attrs, sources[0])
            )
            if made is None:
                return self.ids[sources[0]]
            buffer = made
        elif call.kind == "input":
            buffer = self._begin(call)
        elif call.kind == "conv":
            buffer = self._conv2d(n, call, callee, sources[0])
        elif call.kind == "linear":
            buffer = self._linear(n, call, callee, sources[0])
        elif call.kind == "norm":
            buffer = self._norm(n, call, callee, sources[0])
        elif call.kind == "add":
            buffer = self._add(n, call, sources)
        elif call.kind == "mul":
            buffer = self._combined(n, call, Mul, [self._operand(n, call, source) for source in sources])
        else:
            raise self._refused(n, "there is no such op")
        return _of_both(self.builder.ids(buffer, call.shape))

    def _begin(self, call: Call) -> int:
        """The input's buffer, and behind it what heads want to see of the image."""
        if self.first >= 0:
            return self.first
        self.first = self.builder.buffer(call.shape)
        seen: dict[nn.Module, int] = {}
        for conv, module in self.looks.items():
            if module not in seen:
                look = _Lowering(trace(module, self.input_shape), LoweredGates(), self)
                with evaluating(module):
                    look.run(_two_images(module, self.input_shape))
                seen[module] = look.last
            gate = self.gates[conv]
            assert gate.head is not None
            self.gates[conv] = replace(gate, head=replace(gate.head, src=seen[module]))
        return self.first

    def _rescale(self, n: fx.Node, call: Call) -> None:
        """Filters are multiplied with their factors behind a call, and shifted."""
        buffer, gate = self._read(n), replace(self.gates[n.name], head=None)
        attrs: dict[str, Any] = {"act": "none", "slope": 0.0, "shift": self.shifts[n.name]}
        scaled = self.builder.emit(Rescale, n.name, (buffer,), call.shape, gate, **attrs)
        self.ids[n] = _of_both(self.builder.ids(scaled, call.shape))

    def _end(self, n: fx.Node, result: Any) -> None:
        if not isinstance(result, Tensor) or len(n.all_input_nodes) != 1:
            raise self._refused(n, f"the model must return one tensor, got {type(result).__name__}")
        self.last, self.last_shape = self._read(n.all_input_nodes[0]), tuple(result.shape[1:])
        if self.last == self.first:
            raise self._refused(n, "the model must not return its input")

    def _read(self, source: fx.Node) -> int:
        """The buffer with what ``source`` gave."""
        ids = _of_one(self.ids[source])
        buffer = self.builder.gathered(ids, source.name)
        # The next reader finds it in one piece.
        self.ids[source] = _of_both(self.builder.ids(buffer, tuple(ids.shape)))
        return buffer

    def _follow_writes(self, n: fx.Node, result: Any) -> None:
        """After a call in place, everyone who holds its operand holds its result."""
        written = [node for node in self.ids if node is not n and self.env.get(node) is result]
        if not written or torch.equal(self.ids[written[0]], self.ids[n]):
            return
        for node in [node for node in self.ids if node in self.env and node not in written]:
            if _overlap(result, self.env[node]):
                raise self._refused(n, f"in place, it changes {node.name!r} too, one being a view of the other")
        for node in written:
            self.ids[node] = self.ids[n]

    def _refused(self, n: fx.Node, why: str) -> CompileError:
        path = str(n.target) if n.op == "call_module" else n.meta.get("inside", "")
        where = f"module {path!r}" if path else "the model's own forward"
        return CompileError(
            f"{n.name!r} ({self.calls[n.name].what} in {where}) cannot be compiled: {why}.\nSupported: {SUPPORTED}."
        )

    # Convs

    def _conv2d(self, n: fx.Node, call: Call, callee: Any, source: fx.Node) -> int:
        if isinstance(callee, nn.Module) and not isinstance(callee, nn.Conv2d):
            raise self._refused(n, "convs must be two-dimensional and not transposed")
        if getattr(callee, "padding_mode", "zeros") != "zeros":
            raise self._refused(n, f"padding_mode must be 'zeros', got {callee.padding_mode!r}")
        given = arguments(n, callee, CONV, self.env)
        window = conv_window(given)
        if isinstance(callee, nn.Conv2d) and type(callee).forward is not nn.Conv2d.forward:
            height, width = self.ids[source].shape[2:]
            window["padding"] = own_padding(callee, (height, width), window["padding"])
            if window["padding"] is None:
                raise self._refused(n, "its class has a forward of its own, which does not compute like Conv2d's")
        return self._emit_conv(n, call, self._read(source), copied(given["weight"]), given.get("bias"), **window)

    def _linear(self, n: fx.Node, call: Call, callee: Any, source: fx.Node) -> int:
        """As a conv whose window is the whole map, so that nothing has to be flattened for it."""
        given = arguments(n, callee, CONV[:3], self.env)
        ids_N = _of_one(self.ids[source])
        if ids_N.ndim != 1:
            raise self._refused(n, f"its input must be a vector for each image, got shape {tuple(ids_N.shape)}")
        weight_ON = copied(given["weight"])
        found = self.builder.permuted(ids_N)
        if found is not None:
            buffer, place_N = found
            weight_ON = weight_ON[:, place_N.argsort()]
        else:
            buffer = self._read(source)
        weight = weight_ON.view(-1, *self.builder.buffers[buffer])
        return self._emit_conv(n, call, buffer, weight, given.get("bias"), **conv_window({"weight": weight}))

    def _emit_conv(
        self, n: fx.Node, call: Call, buffer: int, weight: Tensor, bias: Tensor | None, **window: Any
    ) -> int:
        if n.name in self.choices:
            choice = self.choices[n.name]
            self.gates[n.name] = after_choice(self.builder, self.gates[n.name], choice, buffer, self.layers[n.name])
        return self.builder.emit(
            Conv,
            self.layers[n.name],
            (buffer,),
            call.shape,
            self.gates.get(n.name),
            own_name=True,
            residual=False,
            act="none",
            slope=0.0,
            weight=weight,
            bias=torch.zeros(len(weight)).double() if bias is None else copied(bias).double(),
            **window,
        )

    # One operand

    def _norm(self, n: fx.Node, call: Call, callee: nn.Module, source: fx.Node) -> int:
        plain, acts = _taken_apart(callee)
        ndim = 1 + len(call.shape)
        scaling = recognised(plain, call.channels, ndim)
        bends = [recognised(act, call.channels, ndim) for act in acts]
        if not isinstance(scaling, Scaling):
            raise self._refused(n, "in eval mode it is not a scale and shift per channel")
        buffer = self._affine(n, call, self._read(source), scaling, lift=True)
        for bend in bends:
            if not isinstance(bend, Bend):
                raise self._refused(n, "it holds an activation that there is not")
            buffer = self._activation(n, call, buffer, bend)
        return buffer

    def _pool(self, n: fx.Node, call: Call, attrs: Mapping[str, Any], source: fx.Node) -> int:
        if self.ids[source].ndim != 4:
            raise self._refused(n, f"it must pool maps (C, H, W), got shape {tuple(self.ids[source].shape[1:])}")
        return self.builder.emit(Pool, n.name, (self._read(source),), call.shape, self.gates.get(n.name), **attrs)

    def _elementwise(self, n: fx.Node, call: Call, callee: Any, source: fx.Node) -> int | None:
        """None if the call changes nothing, as dropout in eval mode."""

        def function(x: Tensor) -> Any:
            if isinstance(callee, nn.Module):
                return copy.deepcopy(callee).double()(x)
            return self._run_with(n, lambda node: x if node is source else _as_double(self.env[node]))

        found = recognised(function, call.channels, 1 + len(call.shape))
        if found is None:
            raise self._refused(n, "it is no activation, pooling, or scale and shift per channel that there is")
        if isinstance(found, Bend):
            return self._activation(n, call, self._read(source), found)
        if found.is_identity:
            return None
        return self._affine(n, call, self._read(source), found, lift=call.kind == "lift")

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

    def _activation(self, n: fx.Node, call: Call, buffer: int, bend: Bend) -> int:
        gate = self.gates.get(n.name)
        return self.builder.emit(Activation, n.name, (buffer,), call.shape, gate, act=bend.act, slope=bend.slope)

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

    def _scaled(self, n: fx.Node, buffer: int, factor: float) -> int:
        if factor == 1:
            return buffer
        shape = self.builder.buffers[buffer]
        scale, shift = (torch.full(shape[:1], value).double() for value in (factor, 0.0))
        attrs: dict[str, Any] = {"lift": False, "act": "none", "slope": 0.0, "scale": scale, "shift": shift}
        return self.builder.emit(Affine, n.name, (buffer,), shape, **attrs)

    def _operand(self, n: fx.Node, call: Call, source: fx.Node) -> int:
        """An operand of the result's shape, or with one element per channel; what else is broadcast is written out."""
        shape = tuple(self.ids[source].shape[1:])
        if shape in (call.shape, (*call.shape[:1], 1, 1)):
            return self._read(source)
        wanted = (call.shape[0], 1, 1) if shape[1:] == (1, 1) else call.shape
        return self.builder.gathered(_of_one(self.ids[source]).expand(wanted), n.name)

    def _combined(self, n: fx.Node, call: Call, kind: type[Add] | type[Mul], src: list[int]) -> int:
        whole = self.builder.buffers[src[0]] == (*call.shape, 1, 1)[:3]
        ordered = tuple(src if whole else src[::-1])  # what is broadcast comes second
        return self.builder.emit(kind, n.name, ordered, call.shape, self.gates.get(n.name), act="none", slope=0.0)


def _of_both(ids: Tensor) -> Tensor:
    """The ids of both images; those of the second are out of the first one's range."""
    return torch.stack([ids, ids + _SECOND])


def _of_one(ids: Any) -> Tensor:
    """The ids of the first image, where those of the second are the same, moved likewise."""
    if not isinstance(ids, Tensor) or len(ids) != 2 or not torch.equal(ids[0] + _SECOND * (ids[0] > 0), ids[1]):
        raise ArrangementError("it must keep the images of a batch apart")
    return ids[0]


def _taken_apart(norm: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """A norm in float64 without the activation that it may hold, and the activation."""
    plain = copy.deepcopy(norm).double()
    children = list(plain.named_children()) if norm_activates(norm) else []
    for name, _ in children:
        setattr(plain, name, nn.Identity())
    return plain, [child for _, child in children if not isinstance(child, nn.Identity | nn.Dropout)]


def _overlap(written: Tensor, other: Any) -> bool:
    """Whether a tensor shares memory with another, or one of several; found by trying."""
    if not isinstance(other, Tensor):
        return isinstance(other, tuple | list) and any(_overlap(written, part) for part in other)
    kept = written.clone()
    written.fill_(float("nan"))
    found = bool(other.isnan().any())
    written.copy_(kept)
    return found


def _as_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

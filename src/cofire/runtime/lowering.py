"""Model -> Program: the calls of a plain or gated model, in eval mode, as the ops the native engine has."""

from __future__ import annotations

import copy
import math
import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cofire.errors import CompileError
from cofire.gates.base import AbstractGate
from cofire.gates.ftwt import FTWTGate
from cofire.gating import GatedModel
from cofire.graph import Graph, trace
from cofire.ops import Op as Call
from cofire.runtime.building import ArrangementError, Builder
from cofire.runtime.elementwise import Bend, Scaling, recognised
from cofire.runtime.folding import folded
from cofire.runtime.program import Activation, Add, Affine, Conv, Gate, Group, Head, Mul, Padding, Pair, Pool, Program
from cofire.tracing import evaluating, norm_activates
from cofire.walk import Walk

SUPPORTED = (
    "Conv2d with zero padding, Linear on vectors, BatchNorm2d and norms that compute like it in eval mode, "
    "ReLU, ReLU6, LeakyReLU, SiLU, Hardswish, Sigmoid, Hardsigmoid, "
    "adding and multiplying tensors, numbers and per-channel parameters, concatenating, splitting, shuffling, choosing "
    "and zero-padding channels, strided slices and zero padding of maps, MaxPool2d, AvgPool2d, adaptive pooling, mean and "
    "amax over (2, 3), flatten, dropout"
)
# Names of a function's arguments, in order; a module has attributes of the same names.
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_MAX_POOL = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVG_POOL = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_MAX_POOLS = (nn.MaxPool2d, F.max_pool2d, torch.max_pool2d)
_AVG_POOLS = (nn.AvgPool2d, F.avg_pool2d)
_ADAPTIVE: dict[Any, Literal["max", "avg"]] = {
    **dict.fromkeys((nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d, torch.mean, "mean"), "avg"),
    **dict.fromkeys((nn.AdaptiveMaxPool2d, F.adaptive_max_pool2d, torch.amax, "amax"), "max"),
}


def lower(model: nn.Module, input_shape: tuple[int, int, int] | None = None) -> Program:
    """The program of ``model``, plain or gated, as it computes in eval mode; ``model`` is left alone.

    Args:
        input_shape: (C, H, W) of an image. Default: the shape a gated model or a registered backbone was made for,
            else 224 x 224.

    Raises:
        CompileError: the engine has nothing like some call or gate; names it and lists what there is.
        TraceError: the model cannot be traced, or does not run at ``input_shape``.
    """
    if isinstance(model, GatedModel):
        graph = model.graph.at(input_shape or model.graph.input_shape)
        groups, gates, threshold = *_gates(graph, model.gates), model.threshold
    else:
        graph, groups, gates, threshold = trace(model, input_shape), (), {}, 0.0
    walk = _Lowering(graph, gates)
    with torch.no_grad(), evaluating(graph.root):
        walk.run(_zeros(graph))
    return folded(walk.program(groups, threshold))


def _zeros(graph: Graph) -> Tensor:
    tensors = [*graph.root.parameters(), *graph.root.buffers()]
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.zeros(1))
    return torch.zeros(2, *graph.input_shape, device=like.device, dtype=like.dtype)


# Gates


def _gates(graph: Graph, gates: Any) -> tuple[tuple[Group, ...], dict[str, Gate]]:
    """The groups, and call -> its gate: on every call from a unit's conv to its end, with the head on the first conv."""
    groups, found = [], dict[str, Gate]()
    thresholds = {gate.threshold for gate in gates.values()}
    if len(thresholds) != 1 or not all(map(math.isfinite, thresholds)):
        raise CompileError(f"the gates must share one finite threshold, got {sorted(thresholds)}; set gated.threshold")
    for number, (name, units) in enumerate(graph.units.groups.items()):
        groups.append(Group(name=name, filters=units[-1].out_channels))
        head = _head(name, gates[name])
        for unit in units:
            for call in _from_to(graph, unit.conv, unit.out):
                if call.conv is not None and call.name != unit.conv:
                    raise CompileError(
                        f"unit {unit.name!r}: its mask sits on {unit.out!r}, behind {call.name!r}, which mixes channels, so its "
                        "filters cannot be left out; gate the model with site='pre_add'"
                    )
                first = unit is units[0] and call.name == unit.conv
                found[call.name] = Gate(group=number, head=head if first else None)
    return tuple(groups), found


def _head(group: str, gate: AbstractGate) -> Head:
    if not isinstance(gate, FTWTGate) or type(gate).decide is not FTWTGate.decide:
        raise CompileError(
            f"group {group!r}: the engine cannot run a gate of type {type(gate).__name__}; it can run FTWTGate"
        )
    linear = gate.head.linear
    bias = None if linear.bias is None else _copied(linear.bias)
    return Head(pool=gate.head.pool, softmax=gate.head.softmax, weight=_copied(linear.weight), bias=bias)


def _from_to(graph: Graph, first: str, last: str) -> list[Call]:
    """The calls on the ways from one to another, both included."""
    after, before = {first}, {last}
    for call in graph.ops:
        if after & set(call.sources):
            after.add(call.name)
    for call in reversed(graph.ops):
        if call.name in before:
            before.update(call.sources)
    return [call for call in graph.ops if call.name in after & before]


# Calls


class _Lowering(Walk):
    """The walk that found the calls' kinds, once more, with an id for each element instead of each channel."""

    def __init__(self, graph: Graph, gates: Mapping[str, Gate]) -> None:
        super().__init__(graph.root, graph.calls)
        self.extra_traceback = False  # our errors name the call themselves
        self.calls = {call.name: call for call in graph.ops}
        self.gates = gates
        self.layers = _layer_names(graph)
        self.builder = Builder(set(self.layers.values()))
        self.entry = self.exit = -1
        self.exit_shape: tuple[int, ...] = ()

    def program(self, groups: tuple[Group, ...], threshold: float) -> Program:
        """What was lowered, one op or more for each call."""
        return Program(
            input=self.entry,
            output=self.exit,
            output_shape=self.exit_shape,
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
                self.ids[n] = self._lowered(n, call, sources, result)
                self._follow_writes(n, result)
        except ArrangementError as error:
            raise self._refused(n, str(error)) from None
        for node in self.user_to_last_uses.get(n, ()):
            self.ids.pop(node, None)

    def _lowered(self, n: fx.Node, call: Call, sources: list[fx.Node], result: Any) -> Any:
        """The ids of a call's result."""
        callee = self._callee(n)
        if call.kind == "move":
            moved = self._moved(n, callee)
            if moved is None:
                raise self._refused(n, "the engine has no such rearrangement")
            if callee not in (torch.cat, torch.concat):
                return moved
            # Many may read what is joined here, so it is joined once.
            buffer = self.builder.gathered(_of_one(moved), n.name)
        elif call.kind == "input":
            buffer = self.entry = self.builder.buffer(call.shape)
        elif call.kind == "conv":
            buffer = self._conv(n, call, callee, sources[0])
        elif call.kind == "linear":
            buffer = self._linear(n, call, callee, sources[0])
        elif call.kind == "norm":
            buffer = self._norm(n, call, callee, sources[0])
        elif call.kind == "add":
            buffer = self._add(n, call, sources)
        elif call.kind == "mul":
            buffer = self._mul(n, call, sources)
        elif call.kind in ("activation", "lift", "pass"):
            made = self._pool(n, call, callee, sources[0])
            made = self._elementwise(n, call, callee, sources[0]) if made is None else made
            if made is None:
                return self.ids[sources[0]]
            buffer = made
        else:
            raise self._refused(n, "the engine has no such op")
        return self.builder.ids(buffer, (1, *call.shape)).expand(result.shape)

    def _end(self, n: fx.Node, result: Any) -> None:
        if not isinstance(result, Tensor):
            raise self._refused(n, f"the model must return one tensor, got {type(result).__name__}")
        (source,) = n.all_input_nodes
        self.exit, self.exit_shape = self._read(source), tuple(result.shape[1:])
        if self.exit == self.entry:
            raise self._refused(n, "the model returns its input")

    def _read(self, source: fx.Node) -> int:
        """The buffer with what ``source`` gave."""
        ids = _of_one(self.ids[source])
        buffer = self.builder.gathered(ids, source.name)
        # The next reader finds it in one piece.
        self.ids[source] = self.builder.ids(buffer, (1, *ids.shape)).expand(self.ids[source].shape)
        return buffer

    def _follow_writes(self, n: fx.Node, result: Any) -> None:
        """After a call in place, everyone who holds its operand holds its result."""
        written = [node for node in self.ids if node is not n and self.env.get(node) is result]
        if not written or torch.equal(self.ids[written[0]], self.ids[n]):
            return
        for node, ids in self.ids.items():
            view = self.env.get(node)
            if node in written or not isinstance(view, Tensor) or not _share_memory(view, result):
                continue
            if bool(torch.isin(ids, self.ids[written[0]]).any()):
                raise self._refused(
                    n, f"it changes {node.name!r} too, for one is a view of the other; use it out of place"
                )
        for node in written:
            self.ids[node] = self.ids[n]

    def _refused(self, n: fx.Node, why: str) -> CompileError:
        where = str(n.target) if n.op == "call_module" else n.meta.get("inside", "")
        what = self.calls[n.name].what
        module = f"in module {where!r}" if where else "in the model's own forward"
        return CompileError(f"{n.name!r} ({what}, {module}) cannot be compiled: {why}.\nSupported: {SUPPORTED}.")

    def _arguments(self, n: fx.Node, callee: Any, names: tuple[str, ...]) -> dict[str, Any]:
        """What a function was called with, or a module of the same kind holds."""
        if isinstance(callee, nn.Module):
            return {name: getattr(callee, name) for name in names if hasattr(callee, name)}
        args, kwargs = (fx.node.map_arg(a, lambda node: self.env[node]) for a in (n.args, n.kwargs))
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def _conv(self, n: fx.Node, call: Call, callee: Any, source: fx.Node) -> int:
        if isinstance(callee, nn.Module) and not isinstance(callee, nn.Conv2d):
            raise self._refused(n, "the only convs of the engine are two-dimensional and not transposed")
        given = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1} | self._arguments(
            n, callee, _CONV
        )
        if getattr(callee, "padding_mode", "zeros") != "zeros":
            raise self._refused(n, f"padding_mode must be 'zeros', got {callee.padding_mode!r}")
        weight, stride, dilation = given["weight"], _pair(given["stride"]), _pair(given["dilation"])
        kernel = (weight.shape[2], weight.shape[3])
        padding = _padding(given["padding"], kernel, dilation)
        if isinstance(callee, nn.Conv2d) and type(callee).forward is not nn.Conv2d.forward:
            padding = self._found_padding(n, callee, source, padding)
        return self.builder.emit(
            Conv,
            self.layers[n.name],
            (self._read(source),),
            call.shape,
            self.gates.get(n.name),
            own_name=True,
            kernel=kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=given["groups"],
            residual=False,
            act="none",
            slope=0.0,
            weight=_copied(weight),
            bias=_bias(given["bias"], len(weight)),
        )

    def _found_padding(self, n: fx.Node, conv: nn.Conv2d, source: fx.Node, plain: Padding) -> Padding:
        """A subclass with a forward of its own may pad by TensorFlow's rule; anything else is refused."""
        size = tuple(self.ids[source].shape[2:])
        probe = torch.randn(1, conv.in_channels, *size, generator=torch.Generator().manual_seed(0)).to(conv.weight)
        wanted = conv(probe)
        for padding in (plain, _same_padding(size, conv)):
            top, left, bottom, right = padding
            padded = F.pad(probe, (left, right, top, bottom))
            try:
                found = F.conv2d(padded, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)
            except RuntimeError:  # larger than the map
                continue
            if found.shape == wanted.shape and torch.allclose(
                found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.std())
            ):
                return padding
        raise self._refused(n, "it is a Conv2d with a forward of its own, which does not compute like one")

    def _linear(self, n: fx.Node, call: Call, callee: Any, source: fx.Node) -> int:
        given = {"bias": None} | self._arguments(n, callee, _CONV[:3])
        ids_N = _of_one(self.ids[source])
        if ids_N.ndim != 1:
            raise self._refused(n, f"its input must be a vector for each image, got shape {tuple(ids_N.shape)}")
        weight_ON = _copied(given["weight"])
        found = self.builder.permuted(ids_N)
        if found is None:
            buffer = self._read(source)
        else:  # a flattened map, or a permuted one: its elements are the taps of one window
            buffer, place_N = found
            weight_ON = weight_ON[:, place_N.argsort()]
        channels, *kernel = self.builder.buffers[buffer]
        return self.builder.emit(
            Conv,
            self.layers[n.name],
            (buffer,),
            call.shape,
            own_name=True,
            kernel=tuple(kernel),
            stride=(1, 1),
            padding=(0, 0, 0, 0),
            dilation=(1, 1),
            groups=1,
            residual=False,
            act="none",
            slope=0.0,
            weight=weight_ON.view(-1, channels, *kernel),
            bias=_bias(given["bias"], len(weight_ON)),
        )

    def _norm(self, n: fx.Node, call: Call, callee: nn.Module, source: fx.Node) -> int:
        plain, acts = _taken_apart(callee)
        ndim = 1 + len(call.shape)
        scaling = recognised(plain, call.channels, ndim)
        bends = [recognised(act, call.channels, ndim) for act in acts]
        if not isinstance(scaling, Scaling) or not all(isinstance(bend, Bend) for bend in bends):
            raise self._refused(n, "in eval mode it is not a scale and shift per channel with a known activation")
        buffer = self._affine(n, call, self._read(source), scaling, lift=True)
        for bend in bends:
            assert isinstance(bend, Bend)
            buffer = self._activation(n, call, buffer, bend)
        return buffer

    def _elementwise(self, n: fx.Node, call: Call, callee: Any, source: fx.Node) -> int | None:
        """None if the call changes nothing, as dropout in eval mode."""

        def function(x: Tensor) -> Any:
            if isinstance(callee, nn.Module):
                return copy.deepcopy(callee).double()(x)
            return self._run_with(n, lambda node: x if node is source else _as_double(self.env[node]))

        found = recognised(function, call.channels, 1 + len(call.shape))
        if found is None:
            raise self._refused(n, "it is neither a scale and shift per channel nor an activation or pooling we know")
        if isinstance(found, Bend):
            return self._activation(n, call, self._read(source), found)
        if found.is_identity:
            return None
        return self._affine(n, call, self._read(source), found, lift=call.kind == "lift")

    def _affine(self, n: fx.Node, call: Call, buffer: int, scaling: Scaling, *, lift: bool) -> int:
        scale, shift = (values.contiguous().cpu() for values in scaling)
        attrs = {"lift": lift, "act": "none", "slope": 0.0, "scale": scale, "shift": shift}
        return self.builder.emit(Affine, n.name, (buffer,), call.shape, self.gates.get(n.name), **attrs)

    def _activation(self, n: fx.Node, call: Call, buffer: int, bend: Bend) -> int:
        gate = self.gates.get(n.name)
        return self.builder.emit(Activation, n.name, (buffer,), call.shape, gate, act=bend.act, slope=bend.slope)

    def _add(self, n: fx.Node, call: Call, sources: list[fx.Node]) -> int:
        """a * x + b * y: found by trying, for subtraction and ``alpha`` are additions too."""

        def tried(*values: float) -> float:
            given = {i: torch.full([1] * (1 + len(call.shape)), value).double() for i, value in enumerate(values)}
            return float(self._call(n, given))

        factors = (tried(1, 0), tried(0, 1))
        src = []
        for source, factor in zip(sources, factors, strict=True):
            buffer, shape = self._operand(n, call, source)
            if factor != 1:
                scaling = Scaling(torch.full(shape[:1], factor).double(), torch.zeros(shape[0]).double())
                attrs = {"lift": False, "act": "none", "slope": 0.0, "scale": scaling.scale_C, "shift": scaling.shift_C}
                buffer = self.builder.emit(Affine, n.name, (buffer,), shape, **attrs)
            src.append(buffer)
        return self._combined(n, call, Add, src)

    def _mul(self, n: fx.Node, call: Call, sources: list[fx.Node]) -> int:
        return self._combined(n, call, Mul, [self._operand(n, call, source)[0] for source in sources])

    def _combined(self, n: fx.Node, call: Call, kind: type[Add] | type[Mul], src: list[int]) -> int:
        whole = self.builder.buffers[src[0]][1:] == (*call.shape, 1, 1)[1:3]
        ordered = tuple(src if whole else src[::-1])  # what is broadcast comes second
        return self.builder.emit(kind, n.name, ordered, call.shape, self.gates.get(n.name), act="none", slope=0.0)

    def _operand(self, n: fx.Node, call: Call, source: fx.Node) -> tuple[int, tuple[int, ...]]:
        """An operand of the result's shape, or (C, 1, 1); what else is broadcast is written out."""
        shape = tuple(self.ids[source].shape[1:])
        if shape not in (call.shape, (*call.shape[:1], 1, 1)):
            wanted = (call.shape[0], *shape[1:]) if shape[1:] == (1, 1) else call.shape
            ids = self.builder.ids(self._read(source), shape).expand(wanted)
            return self.builder.gathered(ids, n.name), wanted
        return self._read(source), shape

    def _pool(self, n: fx.Node, call: Call, callee: Any, source: fx.Node) -> int | None:
        """None if the call pools nothing."""
        key = type(callee) if isinstance(callee, nn.Module) else callee
        attrs: dict[str, Any]
        if key in _ADAPTIVE:
            attrs = {"op": _ADAPTIVE[key], "kernel": (1, 1), "stride": (1, 1), "padding": (0, 0, 0, 0)}
            attrs |= {"dilation": (1, 1), "include_pad": False, "adaptive": True}
        elif key in _MAX_POOLS or key in _AVG_POOLS:
            defaults = {
                "padding": 0,
                "dilation": 1,
                "count_include_pad": True,
                "stride": None,
                "divisor_override": None,
            }
            names = _MAX_POOL if key in _MAX_POOLS else _AVG_POOL
            given = defaults | self._arguments(n, callee, names)
            if given["divisor_override"] is not None:
                raise self._refused(n, "divisor_override must be None")
            kernel, (top, left) = _pair(given["kernel_size"]), _pair(given["padding"])
            attrs = {"op": "max" if key in _MAX_POOLS else "avg", "kernel": kernel, "padding": (top, left, top, left)}
            attrs |= {
                "stride": _pair(given["stride"] or kernel),
                "dilation": _pair(given["dilation"]),
                "adaptive": False,
            }
            attrs |= {"include_pad": key in _AVG_POOLS and bool(given["count_include_pad"])}
        else:
            return None
        if len(self.ids[source].shape) != 4:
            raise self._refused(n, f"it must pool a map (C, H, W) per image, got {tuple(self.ids[source].shape[1:])}")
        return self.builder.emit(Pool, n.name, (self._read(source),), call.shape, self.gates.get(n.name), **attrs)


def _layer_names(graph: Graph) -> dict[str, str]:
    """Conv or linear call -> its layer's name in a cost table: the second call of a module is ``module#2``."""
    calls: Counter[str] = Counter()
    names = {}
    for call in graph.ops:
        if call.conv is not None:
            calls[call.conv.module] += 1
            number = calls[call.conv.module]
            names[call.name] = call.conv.module if number == 1 else f"{call.conv.module}#{number}"
    return names


def _of_one(ids: Any) -> Tensor:
    """The ids of one sample, which must be those of every other."""
    if not isinstance(ids, Tensor) or len(ids) != 2 or not torch.equal(ids[0], ids[1]):
        raise ArrangementError("it does not keep the samples of a batch apart")
    return ids[0]


def _taken_apart(norm: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """A norm in float64 without the activation it may hold, and the activation."""
    plain = copy.deepcopy(norm).double()
    acts = [(name, child) for name, child in plain.named_children() if norm_activates(norm)]
    for name, _ in acts:
        setattr(plain, name, nn.Identity())
    return plain, [child for _, child in acts if not isinstance(child, nn.Identity | nn.Dropout)]


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _copied(weight: Tensor) -> Tensor:
    return weight.detach().to("cpu", torch.float32, copy=True).contiguous()


def _bias(bias: Tensor | None, filters: int) -> Tensor:
    return torch.zeros(filters).double() if bias is None else _copied(bias).double()


def _as_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _pair(value: Any) -> Pair:
    """A size given as one number or two."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return (int(values[0]), int(values[-1]))


def _padding(given: Any, kernel: Pair, dilation: Pair) -> Padding:
    if given == "valid":
        return (0, 0, 0, 0)
    if given == "same":
        total_h, total_w = (d * (k - 1) for d, k in zip(dilation, kernel, strict=True))
        return (total_h // 2, total_w // 2, total_h - total_h // 2, total_w - total_w // 2)
    top, left = _pair(given)
    return (top, left, top, left)


def _same_padding(size: tuple[int, ...], conv: nn.Conv2d) -> Padding:
    """TensorFlow's SAME: as much as gives ceil(size / stride) outputs, the odd one below and right."""
    totals = [
        max((math.ceil(n / s) - 1) * s + d * (k - 1) + 1 - n, 0)
        for n, s, d, k in zip(size, _pair(conv.stride), _pair(conv.dilation), _pair(conv.kernel_size), strict=True)
    ]
    before = [total // 2 for total in totals]
    return (before[0], before[1], totals[0] - before[0], totals[1] - before[1])

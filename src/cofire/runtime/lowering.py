"""Model -> Program: the calls of a plain or gated model, in eval mode, as the ops the native engine has."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cofire.errors import CompileError
from cofire.gates.gating import GatedModel
from cofire.graph.graph import Graph, trace
from cofire.graph.ops import Op as Call
from cofire.graph.tracing import evaluating, norm_activates
from cofire.graph.walk import Walk
from cofire.runtime.building import ArrangementError, Builder
from cofire.runtime.elementwise import Bend, Cut, Scaling, Slopes, recognised
from cofire.runtime.folding import folded
from cofire.runtime.gates import LoweredGates, after_choice, copied, lower_gates
from cofire.runtime.maps import (
    REDUCTIONS,
    RESAMPLES,
    SHUFFLES,
    SOFTMAXES,
    conv_inside,
    normalising,
    scale_and_shift,
    taps,
)
from cofire.runtime.program import (
    Activation,
    Add,
    Affine,
    Conv,
    Deconv,
    Group,
    Mul,
    Norm,
    Output,
    Pool,
    Program,
    Reduce,
    Resample,
    Rescale,
    Softmax,
)
from cofire.runtime.windows import CONV, arguments, conv_window, pool_window

SUPPORTED = (
    "convs of one or two dimensions, with any padding, and transposed ones; Linear; batch, group, layer, instance and "
    "RMS norms; ReLU, ReLU6, LeakyReLU, PReLU, SiLU, Hardswish, Sigmoid, Hardsigmoid, GELU, ELU, Tanh, Hardtanh, "
    "clamp, Mish, Softplus; softmax and log-softmax; L2 normalisation; adding and multiplying tensors, numbers and "
    "parameters per channel; concatenating, splitting, stacking, choosing, shuffling, slicing, turning and padding; "
    "upsampling and pixel shuffle; max, average and adaptive pooling; mean, sum and maximum over channels or space; "
    "flatten; dropout"
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
        self.outputs: list[Output] = []
        self.structure: Any = None

    def program(self, groups: tuple[Group, ...], threshold: float) -> Program:
        """What the walk has lowered."""
        return Program(
            input=self.first,
            output=self.outputs[0].buffer,
            output_shape=self.outputs[0].shape,
            more_outputs=tuple(self.outputs[1:]),
            structure=self.structure,
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
            buffer = self._gathered(_of_one(moved), n.name)  # once, for many may read what is joined here
        elif (found := self._over_channels_or_maps(n, call, callee, sources)) is not None:
            return found
        elif call.kind in ("activation", "lift", "pass"):
            attrs = pool_window(n, callee, self.env)
            made = (
                self._elementwise(n, call, callee, sources[0])
                if attrs is None
                else self._pool(n, call, attrs, sources[0])
            )
            if not isinstance(made, int):
                return made
            buffer = made
        elif call.kind == "input":
            buffer = self._begin(call)
        elif call.kind == "conv":
            buffer = self._conv2d(n, call, callee, sources[0])
        elif call.kind == "linear" and self.ids[sources[0]].ndim > 2:
            return self._pointwise(n, call, callee, sources[0])
        elif call.kind == "linear":
            buffer = self._linear(n, call, callee, sources[0])
        elif call.kind == "norm":
            return self._norm(n, call, callee, sources[0])
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
                seen[module] = look.outputs[0].buffer
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
        structure = self._given(n, n.args[0])
        self.structure = None if isinstance(structure, int) else structure
        if any(output.buffer == self.first for output in self.outputs):
            raise self._refused(n, "the model must not return its input")

    def _given(self, n: fx.Node, value: Any) -> Any:
        """The structure of what the model returns; its tensors become outputs."""
        if isinstance(value, Mapping):
            return {"dict": {str(key): self._given(n, part) for key, part in value.items()}}
        if isinstance(value, tuple | list):  # fx has lists of its own
            return {"tuple" if isinstance(value, tuple) else "list": [self._given(n, part) for part in value]}
        ids = self.ids.get(value) if isinstance(value, fx.Node) else None
        if isinstance(ids, tuple | list):
            kind = "tuple" if isinstance(ids, tuple) else "list"
            return {kind: [self._output(n, self._gathered(_of_one(part), n.name), part) for part in ids]}
        if not isinstance(ids, Tensor):
            raise self._refused(n, f"the model must return tensors that it computes, got {value!r} among them")
        return self._output(n, self._read(value), ids)

    def _output(self, n: fx.Node, buffer: int, ids: Tensor) -> int:
        self.outputs.append(Output(buffer=buffer, shape=tuple(ids.shape[1:])))
        return len(self.outputs) - 1

    def _read(self, source: fx.Node) -> int:
        """The buffer with what ``source`` gave; of more than three dimensions the first ones are channels."""
        ids = _of_one(self.ids[source])
        buffer = self._gathered(ids, source.name)
        # The next reader finds it in one piece.
        self.ids[source] = _of_both(self.builder.ids(buffer, tuple(ids.shape)))
        return buffer

    def _gathered(self, ids: Tensor, name: str) -> int:
        return self.builder.gathered(ids.reshape(_as_map(tuple(ids.shape))), name)

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
        before = self.builder.ops[-1].name if self.builder.ops else None
        rest = f"\nWhat comes before it can be, up to {before!r}: compile that part alone." if before else ""
        what = f"{n.name!r} ({self.calls[n.name].what} in {where})"
        return CompileError(f"{what} cannot be compiled: {why}.{rest}\nSupported: {SUPPORTED}.")

    # Convs

    def _conv2d(self, n: fx.Node, call: Call, callee: Any, source: fx.Node) -> int:
        if isinstance(callee, nn.ConvTranspose2d):
            return self._transposed(n, call, callee, source)
        if isinstance(callee, nn.Conv1d) or callee is F.conv1d:
            return self._conv1d(n, call, callee, source)
        if isinstance(callee, nn.Module) and not isinstance(callee, nn.Conv2d):
            raise self._refused(n, "convs must have one or two dimensions")
        given = arguments(n, callee, CONV, self.env)
        window = conv_window(given)
        if isinstance(callee, nn.Conv2d) and type(callee).forward is not nn.Conv2d.forward:
            height, width = self.ids[source].shape[2:]
            inside = conv_inside(callee, (height, width))
            if inside is None:
                raise self._refused(n, "its class has a forward of its own, which does not compute like Conv2d's")
            given, window["padding"] = inside, inside["padding"]
        buffer = self._read(source)
        mode = callee.padding_mode if isinstance(callee, nn.Conv2d) else "zeros"
        if mode != "zeros" and any(window["padding"]):
            top, left, bottom, right = window["padding"]
            ids = self.builder.ids(buffer, self.builder.buffers[buffer])[None]
            padded = F.pad(ids, (left, right, top, bottom), mode=mode)[0]
            buffer, window["padding"] = self.builder.gathered(padded, n.name), (0, 0, 0, 0)
        return self._emit_conv(n, call, buffer, copied(given["weight"]), given.get("bias"), **window)

    def _transposed(self, n: fx.Node, call: Call, callee: nn.ConvTranspose2d, source: fx.Node) -> int:
        if callee.padding_mode != "zeros":
            raise self._refused(n, f"padding_mode must be 'zeros', got {callee.padding_mode!r}")
        window = conv_window({name: getattr(callee, name) for name in ("weight", "stride", "padding", "dilation")})
        window["groups"] = callee.groups
        bias = torch.zeros(callee.out_channels).double() if callee.bias is None else copied(callee.bias).double()
        gate, weight = self.gates.get(n.name), copied(callee.weight)
        own: dict[str, Any] = {"own_name": True, "weight": weight, "bias": bias, **window}
        return self.builder.emit(Deconv, self.layers[n.name], (self._read(source),), call.shape, gate, **own)

    def _conv1d(self, n: fx.Node, call: Call, callee: Any, source: fx.Node) -> int:
        """As a conv on maps of one row."""
        given = arguments(n, callee, CONV, self.env)
        if given.get("padding_mode", "zeros") != "zeros" or isinstance(given.get("padding", 0), str):
            raise self._refused(n, "its padding must be a number of zeros")
        window = conv_window({**given, "weight": given["weight"][:, :, None]})
        window["stride"], window["dilation"] = (1, window["stride"][1]), (1, window["dilation"][1])
        window["padding"] = (0, window["padding"][1], 0, window["padding"][3])
        ids = _of_one(self.ids[source])
        if ids.ndim != 2:
            raise self._refused(n, f"its input must have the shape (C, L) for each image, got {tuple(ids.shape)}")
        buffer = self.builder.gathered(ids[:, None], n.name)
        weight = copied(given["weight"])[:, :, None]
        return self._emit_conv(n, call, buffer, weight, given.get("bias"), **window)

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
        weight = weight_ON.reshape(-1, *self.builder.buffers[buffer])
        return self._emit_conv(n, call, buffer, weight, given.get("bias"), **conv_window({"weight": weight}))

    def _pointwise(self, n: fx.Node, call: Call, callee: Any, source: fx.Node) -> Tensor:
        """A linear layer on the last dimension of a tensor with more of them: a conv of one tap."""
        given = arguments(n, callee, CONV[:3], self.env)
        buffer = self._channels_first(n, source)
        weight = copied(given["weight"])[:, :, None, None]
        shape = (len(weight), *self.builder.buffers[buffer][1:])
        made = self._emit_conv(
            n, replace(call, shape=shape), buffer, weight, given.get("bias"), **conv_window({"weight": weight})
        )
        return self._channels_last(made, call.shape)

    def _channels_first(self, n: fx.Node, source: fx.Node) -> int:
        """A buffer whose channels are the last dimension of what ``source`` gave."""
        ids = _of_one(self.ids[source]).movedim(-1, 0)
        return self.builder.gathered(ids.reshape(len(ids), ids.shape[1], -1), n.name)

    def _channels_last(self, buffer: int, shape: tuple[int, ...]) -> Tensor:
        """The ids of a buffer whose channels are the last dimension of ``shape``."""
        return _of_both(self.builder.ids(buffer, (shape[-1], *shape[:-1])).movedim(0, -1))

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
            call.shape if len(call.shape) != 2 else (call.shape[0], 1, call.shape[1]),
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

    def _norm(self, n: fx.Node, call: Call, callee: nn.Module, source: fx.Node) -> Tensor:
        plain, acts = _taken_apart(callee)
        ndim = 1 + len(call.shape)
        scaling = recognised(plain, call.channels, ndim)
        bends = [recognised(act, call.channels, ndim) for act in acts]
        if isinstance(scaling, Scaling):
            buffer, last = self._affine(n, call, self._read(source), scaling, lift=True), False
        else:
            buffer, last = self._normalised(n, call, plain, source)
        for bend in bends:
            if not isinstance(bend, Bend) or last:
                raise self._refused(n, "it holds an activation that there is not")
            buffer = self._activation(n, buffer, bend)
        return self._channels_last(buffer, call.shape) if last else _of_both(self.builder.ids(buffer, call.shape))

    def _normalised(self, n: fx.Node, call: Call, norm: nn.Module, source: fx.Node) -> tuple[int, bool]:
        """The buffer of a norm that takes mean and variance of each image, and whether its channels come last."""
        found = normalising(norm, call.shape)
        if found is None:
            raise self._refused(n, "it is no scale and shift per channel, group, layer or RMS norm")
        last = found.dim == -1 and len(call.shape) > 1
        buffer = self._channels_first(n, source) if last else self._read(source)
        shape = self.builder.buffers[buffer]
        scale, shift = scale_and_shift(norm)
        attrs: dict[str, Any] = {"over": found.over, "groups": found.groups, "epsilon": found.epsilon}
        attrs["scale"] = torch.ones(shape[0]) if scale is None else copied(scale).flatten()
        attrs["shift"] = torch.zeros(shape[0]) if shift is None else copied(shift).flatten()
        return self.builder.emit(Norm, n.name, (buffer,), shape, self.gates.get(n.name), **attrs), last

    def _pool(self, n: fx.Node, call: Call, attrs: Mapping[str, Any], source: fx.Node) -> int:
        if self.ids[source].ndim != 4:
            raise self._refused(n, f"it must pool maps (C, H, W), got shape {tuple(self.ids[source].shape[1:])}")
        return self.builder.emit(Pool, n.name, (self._read(source),), call.shape, self.gates.get(n.name), **attrs)

    def _elementwise(self, n: fx.Node, call: Call, callee: Any, source: fx.Node) -> int | Tensor:
        """A buffer, or ids: of the source if the call changes nothing, as dropout in eval mode."""

        def function(x: Tensor) -> Any:
            if isinstance(callee, nn.Module):
                return copy.deepcopy(callee).double()(x)
            return self._run_with(n, lambda node: x if node is source else _as_double(self.env[node]))

        found = recognised(function, call.channels, 1 + len(call.shape))
        if found is None and len(call.shape) == 3:
            found = recognised(lambda x: function(x.movedim(1, -1)).movedim(-1, 1), call.shape[-1], 4)
            if isinstance(found, Scaling):  # channels come last
                buffer = self._channels_first(n, source)
                shape = self.builder.buffers[buffer]
                made = self._affine(n, replace(call, shape=shape), buffer, found, lift=call.kind == "lift")
                return self._channels_last(made, call.shape)
        if found is None:
            raise self._refused(n, "it is no activation, pooling, or scale and shift per channel that there is")
        if isinstance(found, Bend | Cut):
            return self._bent(n, source, found)
        if isinstance(found, Slopes):
            return self._leaking(n, call, self._read(source), found)
        if found.is_identity:
            same: Tensor = self.ids[source]
            return same
        return self._affine(n, call, self._read(source), found, lift=call.kind == "lift")

    def _bent(self, n: fx.Node, source: fx.Node, found: Bend | Cut) -> Tensor:
        """The ids after an activation, which takes a buffer as it lies, whatever view of it the call was given."""
        ids = _of_one(self.ids[source])
        whole = self.builder.permuted(ids.flatten())
        buffer, place_N = (self._read(source), None) if whole is None or self.gates.get(n.name) else whole
        made = self._activation(n, buffer, found) if isinstance(found, Bend) else self._cut(n, buffer, found)
        new = self.builder.ids(made, self.builder.buffers[made]).flatten()
        return _of_both((new if place_N is None else new[place_N]).view(ids.shape))

    def _cut(self, n: fx.Node, buffer: int, cut: Cut) -> int:
        """By relu6 or hardtanh between two scales; what begins at zero keeps it."""
        half = (cut.high - cut.low) / 2
        shift = 0.0 if cut.low == 0 else -(cut.low + half)
        factor, bend = (3 / half, Bend("relu6")) if cut.low == 0 else (1.0, Bend("hardtanh", half))
        middle = self._activation(n, self._scaled(n, buffer, factor, shift), bend)
        return self._scaled(n, middle, 1 / factor, -shift)

    def _leaking(self, n: fx.Node, call: Call, buffer: int, slopes: Slopes) -> int:
        """max(x, 0) and what lies below zero, times the slopes."""
        above = self._activation(n, buffer, Bend("relu"))
        turned = self._activation(n, self._scaled(n, buffer, -1.0), Bend("relu"))
        scaling = Scaling(-slopes.slope_C, torch.zeros_like(slopes.slope_C))
        return self._combined(n, call, Add, [above, self._affine(n, call, turned, scaling, lift=False)])

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

    # Maps of other sizes, and ops over channels

    def _over_channels_or_maps(self, n: fx.Node, call: Call, callee: Any, sources: list[fx.Node]) -> Any:
        """The ids of a resampling, reduction, softmax or L2 normalisation; None if the call is none of these."""
        key = type(callee) if isinstance(callee, nn.Module) else callee
        if not sources or not isinstance(self.ids[sources[0]], Tensor):
            return None
        if key in SHUFFLES and (moved := self._moved(n, callee)) is not None:
            return moved
        if key in RESAMPLES:
            return self._resampled(n, call, callee, sources[0])
        if key in SOFTMAXES:
            dim = 1 if key is nn.Softmax2d else arguments(n, callee, ("input", "dim"), self.env).get("dim")
            return self._softmax(n, call, dim, sources[0], log=SOFTMAXES[key])
        if key is F.normalize:
            return self._unit_length(n, call, sources[0])
        if key in REDUCTIONS and len(sources) == 1:
            given = arguments(n, callee, ("input", "dim", "keepdim"), self.env)
            return self._reduced(n, callee, given, sources[0])
        return None

    def _resampled(self, n: fx.Node, call: Call, callee: Any, source: fx.Node) -> Tensor:
        ids = self.ids[source]

        def function(x: Tensor) -> Any:
            return self._run_with(n, lambda node: x if node is source else self.env[node])

        found = taps(function, tuple(ids.shape[2:]), self.env[source]) if ids.ndim == 4 else None
        if found is None:
            raise self._refused(n, "it is no resampling of maps along rows and columns")
        (rows, row_weights), (columns, column_weights) = found
        own: dict[str, Any] = {
            "rows": rows,
            "columns": columns,
            "row_weights": row_weights,
            "column_weights": column_weights,
        }
        gate, buffer = self.gates.get(n.name), self._read(source)
        return _of_both(
            self.builder.ids(self.builder.emit(Resample, n.name, (buffer,), call.shape, gate, **own), call.shape)
        )

    def _softmax(self, n: fx.Node, call: Call, dim: Any, source: fx.Node, *, log: bool) -> Tensor:
        ids = _of_one(self.ids[source])
        if not isinstance(dim, int) or dim % (1 + ids.ndim) == 0:
            raise self._refused(n, f"softmax must have a dim that is not the batch, got {dim}")
        first = ids.movedim(dim % (1 + ids.ndim) - 1, 0)  # the others may be channels as well
        ways = len(first)
        shape = _as_map(tuple(first.shape)) if first.ndim > 2 else (first.numel(), 1, 1)
        buffer = self.builder.gathered(first.reshape(shape), n.name)
        made = self.builder.emit(Softmax, n.name, (buffer,), shape, self.gates.get(n.name), ways=ways, log=log)
        return _of_both(self.builder.ids(made, tuple(first.shape)).movedim(0, dim % (1 + ids.ndim) - 1))

    def _unit_length(self, n: fx.Node, call: Call, source: fx.Node) -> Tensor:
        given = {"p": 2.0, "dim": 1, "eps": 1e-12} | arguments(n, F.normalize, ("input", "p", "dim", "eps"), self.env)
        if given["p"] != 2 or given["dim"] not in (1, -len(call.shape)):
            raise self._refused(n, f"p must be 2 and dim 1, got {given['p']} and {given['dim']}")
        buffer = self._read(source)
        shape = self.builder.buffers[buffer]
        ones, zeros = torch.ones(shape[0]), torch.zeros(shape[0])
        attrs: dict[str, Any] = {
            "over": "l2",
            "groups": 1,
            "epsilon": float(given["eps"]),
            "scale": ones,
            "shift": zeros,
        }
        made = self.builder.emit(Norm, n.name, (buffer,), shape, self.gates.get(n.name), **attrs)
        return _of_both(self.builder.ids(made, call.shape))

    def _reduced(self, n: fx.Node, callee: Any, given: Mapping[str, Any], source: fx.Node) -> Any:
        """Over space by pooling, over the first dimension after the batch by a reduction."""
        op = REDUCTIONS[callee]
        ids = _of_one(self.ids[source])
        dims = given.get("dim", ())
        dims = sorted(dim % (1 + ids.ndim) for dim in ((dims,) if isinstance(dims, int) else dims or ()))
        if dims and dims[0] > ids.ndim - 2 and ids.ndim >= 3:
            buffer = self._read(source)
            kept = tuple(1 if dim in dims else size for dim, size in enumerate(ids.shape, start=1))
            shape = _as_map(kept)
            count = ids.numel() // math.prod(kept)
            gate, still = self.gates.get(n.name), {"kernel": (1, 1), "stride": (1, 1), "dilation": (1, 1)}
            own: dict[str, Any] = {**still, "padding": (0,) * 4, "include_pad": False, "adaptive": True}
            made = self.builder.emit(Pool, n.name, (buffer,), shape, gate, op="max" if op == "max" else "avg", **own)
            made = self._scaled(n, made, count) if op == "sum" else made
        elif dims == [1]:
            buffer = self._gathered(ids, n.name)
            kept = (1, *ids.shape[1:])
            _, height, width = self.builder.buffers[buffer]
            shape = (math.prod(kept) // (height * width), height, width)
            made = self.builder.emit(Reduce, n.name, (buffer,), shape, self.gates.get(n.name), op=op)
        else:
            raise self._refused(n, f"it must reduce channels or space, got dim={given.get('dim')}")
        given_shape = kept if given.get("keepdim") else [n for dim, n in enumerate(kept, start=1) if dim not in dims]
        found = _of_both(self.builder.ids(made, tuple(given_shape)))
        return (found, None) if callee in (torch.max, "max") else found  # with indices, which nobody may read

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
        return self._gathered(_of_one(self.ids[source]).expand(wanted), n.name)

    def _combined(self, n: fx.Node, call: Call, kind: type[Add] | type[Mul], src: list[int]) -> int:
        shape = _as_map(call.shape)
        whole = self.builder.buffers[src[0]] == (*shape, 1, 1)[:3]
        ordered = tuple(src if whole else src[::-1])  # what is broadcast comes second
        return self.builder.emit(kind, n.name, ordered, shape, self.gates.get(n.name), act="none", slope=0.0)


def _as_map(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(C, H, W) or (C) of the same elements in the same order: all but the last two dimensions are channels."""
    if len(shape) == 2:
        return (shape[0], shape[1], 1)
    return shape if len(shape) < 4 else (math.prod(shape[:-2]), *shape[-2:])


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

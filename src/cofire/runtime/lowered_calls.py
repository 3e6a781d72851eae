"""Calls with one operand as ops: convs, norms, activations, maps of other sizes, ops over channels."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cofire.graph.ops import Op as Call
from cofire.graph.tracing import norm_activates
from cofire.runtime.elementwise import Bend, Cut, Scaling, Slopes, recognised
from cofire.runtime.gates import after_choice, after_inner, copied
from cofire.runtime.lowered_ids import AbstractLowering, as_map, of_both, of_one
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
    Add,
    Conv,
    Deconv,
    Norm,
    Pool,
    Reduce,
    Resample,
    Softmax,
)
from cofire.runtime.windows import CONV, arguments, conv_window


class AbstractCalls(AbstractLowering):
    """Each method appends the ops of one kind of call."""

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
        ids = of_one(self.ids[source])
        if ids.ndim != 2:
            raise self._refused(n, f"its input must have the shape (C, L) for each image, got {tuple(ids.shape)}")
        buffer = self.builder.gathered(ids[:, None], n.name)
        weight = copied(given["weight"])[:, :, None]
        return self._emit_conv(n, call, buffer, weight, given.get("bias"), **window)

    def _linear(self, n: fx.Node, call: Call, callee: Any, source: fx.Node) -> int:
        """As a conv whose window is the whole map, so that nothing has to be flattened for it."""
        given = arguments(n, callee, CONV[:3], self.env)
        ids_N = of_one(self.ids[source])
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

    def _emit_conv(
        self, n: fx.Node, call: Call, buffer: int, weight: Tensor, bias: Tensor | None, **window: Any
    ) -> int:
        if n.name in self.choices:
            choice = self.choices[n.name]
            self.gates[n.name] = after_choice(self.builder, self.gates[n.name], choice, buffer, self.layers[n.name])
        if n.name in self.inners:
            head = self.inners[n.name]
            self.gates[n.name] = after_inner(self.builder, self.gates[n.name], head, buffer, self.layers[n.name])
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
        if isinstance(scaling, Scaling) and _holds_on_maps(scaling, plain, call.shape):
            buffer, last = self._affine(n, call, self._read(source), scaling, lift=True), False
        else:
            buffer, last = self._normalised(n, call, plain, source)
        for bend in bends:
            if not isinstance(bend, Bend) or last:
                raise self._refused(n, "it holds an activation that there is not")
            buffer = self._activation(n, buffer, bend)
        return self._channels_last(buffer, call.shape) if last else of_both(self.builder.ids(buffer, call.shape))

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

        ndim = 1 + len(call.shape)
        found = None if call.last else recognised(function, call.channels, ndim)
        if call.last or (found is None and ndim == 4):
            found = recognised(lambda x: function(x.movedim(1, -1)).movedim(-1, 1), call.shape[-1], ndim)
            if isinstance(found, Scaling) and not found.is_identity:  # channels come last
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
        call, ids = self.calls[n.name], of_one(self.ids[source])
        whole = None if n.name in self.gates else self.builder.permuted(ids.flatten())
        last = whole is None and call.last
        buffer, place_N = whole or (self._channels_first(n, source) if last else self._read(source), None)
        made = self._activation(n, buffer, found) if isinstance(found, Bend) else self._cut(n, buffer, found)
        if last:
            return self._channels_last(made, call.shape)
        new = self.builder.ids(made, self.builder.buffers[made]).flatten()
        return of_both((new if place_N is None else new[place_N]).view(ids.shape))

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
        return of_both(
            self.builder.ids(self.builder.emit(Resample, n.name, (buffer,), call.shape, gate, **own), call.shape)
        )

    def _softmax(self, n: fx.Node, call: Call, dim: Any, source: fx.Node, *, log: bool) -> Tensor:
        ids = of_one(self.ids[source])
        if not isinstance(dim, int) or dim % (1 + ids.ndim) == 0:
            raise self._refused(n, f"softmax must have a dim that is not the batch, got {dim}")
        first = ids.movedim(dim % (1 + ids.ndim) - 1, 0)  # the others may be channels as well
        ways = len(first)
        shape = as_map(tuple(first.shape)) if first.ndim > 2 else (first.numel(), 1, 1)
        buffer = self.builder.gathered(first.reshape(shape), n.name)
        made = self.builder.emit(Softmax, n.name, (buffer,), shape, self.gates.get(n.name), ways=ways, log=log)
        return of_both(self.builder.ids(made, tuple(first.shape)).movedim(0, dim % (1 + ids.ndim) - 1))

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
        return of_both(self.builder.ids(made, call.shape))

    def _reduced(self, n: fx.Node, callee: Any, given: Mapping[str, Any], source: fx.Node) -> Any:
        """Over space by pooling, over the first dimension after the batch by a reduction."""
        op = REDUCTIONS[callee]
        ids = of_one(self.ids[source])
        dims = given.get("dim", ())
        dims = sorted(dim % (1 + ids.ndim) for dim in ((dims,) if isinstance(dims, int) else dims or ()))
        if dims and dims[0] > ids.ndim - 2 and ids.ndim >= 3:
            buffer = self._read(source)
            kept = tuple(1 if dim in dims else size for dim, size in enumerate(ids.shape, start=1))
            shape = as_map(kept)
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
        found = of_both(self.builder.ids(made, tuple(given_shape)))
        return (found, None) if callee in (torch.max, "max") else found  # with indices, which nobody may read


def _taken_apart(norm: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """A norm in float64 without the activation that it may hold, and the activation."""
    plain = copy.deepcopy(norm).double()
    children = list(plain.named_children()) if norm_activates(norm) else []
    for name, _ in children:
        setattr(plain, name, nn.Identity())
    return plain, [child for _, child in children if not isinstance(child, nn.Identity | nn.Dropout)]


def _holds_on_maps(scaling: Scaling, norm: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether ``norm`` scales and shifts more than the single element per channel that it was tried on."""
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).double()
    scale, shift = (values.view(-1, *[1] * (len(shape) - 1)) for values in scaling)
    return torch.allclose(norm(x), x * scale + shift, rtol=1e-6, atol=1e-6)


def _as_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

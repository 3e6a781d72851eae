"""Calls -> Ops, by running them once: shapes, kinds, and beside each tensor the ids of its channels.

Each call that makes new channels owns a range of *ids*; calls that only move data (view, cat, chunk, pad,
slice ...) are run on the ids themselves, so any of them, in any combination, is followed exactly without a rule
of its own.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from cofire.graph.following import thawed
from cofire.graph.ops import DEAD, LIVE, Conv, Kind, Op
from cofire.graph.tracing import is_elementwise, is_norm, norm_activates, norm_mixes

_MOVES: set[Any] = {
    *(torch.flatten, torch.reshape, torch.permute, torch.transpose, torch.cat, torch.concat, torch.stack),
    *(torch.chunk, torch.split, torch.unbind, torch.narrow, torch.squeeze, torch.unsqueeze, torch.roll),
    *(torch.flip, torch.clone, torch.swapaxes, torch.channel_shuffle, operator.getitem, F.pad, F.channel_shuffle),
    *("flatten", "reshape", "view", "permute", "transpose", "contiguous", "chunk", "split", "unbind", "narrow"),
    *("squeeze", "unsqueeze", "expand", "repeat", "roll", "flip", "clone", "swapaxes", "detach", "select"),
    *("reshape_as", "view_as", "expand_as"),
    *(nn.Flatten, nn.Unflatten, nn.ChannelShuffle, nn.ZeroPad2d, nn.ConstantPad2d, nn.ReflectionPad2d),
    *(nn.ReplicationPad2d, nn.PixelUnshuffle),
}
VIEWS: set[Any] = {"view", "view_as"}
CASTS: set[Any] = {"to", "type", "type_as", "half", "bfloat16", "float", "double", "cpu", "cuda"}
_REDUCTIONS: set[Any] = {torch.mean, torch.sum, torch.amax, "mean", "sum", "amax"}
_POOLS: set[Any] = {
    *_REDUCTIONS,
    *(F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.lp_pool2d, F.interpolate),
    torch.max_pool2d,
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.LPPool2d, nn.Upsample),
    *(nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
}
_ACTIVATIONS: set[Any] = {
    *(F.relu, F.relu_, F.relu6, F.leaky_relu, F.leaky_relu_, F.silu, F.hardswish, F.hardsigmoid, F.gelu, F.elu),
    *(F.elu_, F.selu, F.celu, F.mish, F.softplus, F.softsign, F.hardtanh, F.tanhshrink, F.hardshrink, F.prelu),
    *(F.sigmoid, F.tanh, torch.relu, torch.relu_, torch.sigmoid, torch.tanh, torch.clamp, torch.clip, torch.abs),
    *("relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_", "clamp", "clamp_", "clip", "hardshrink", "abs"),
    *(torch.neg, torch.exp, torch.sqrt, operator.neg, "neg", "exp", "sqrt"),
}
_NEUTRAL: set[Any] = {F.dropout, F.dropout2d, F.alpha_dropout, torch.dropout}
_ADDS: set[Any] = {operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub}
_ADDS |= {"add", "add_", "sub", "sub_"}
_MULS: set[Any] = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
_DIVS: set[Any] = {operator.truediv, operator.itruediv, torch.div, "div", "div_"}
_NOT_ELEMENTWISE = (nn.Softmax, nn.LogSoftmax, nn.Softmax2d, nn.Softmin, nn.MultiheadAttention, nn.GLU)


WALKED = 2  # samples


class Walk(fx.Interpreter):
    """Runs the calls once on some samples, and beside each tensor keeps a tensor of channel ids."""

    def __init__(self, root: nn.Module, calls: fx.Graph) -> None:
        super().__init__(root, graph=calls)
        self.root = root
        self.ids: dict[fx.Node, Any] = {}
        self.ops: list[Op] = []
        self.num_ids = 2
        self.inside: tuple[Conv, ...] = ()  # layers that the last call ran in a module that is one opaque call

    def run_node(self, n: fx.Node) -> Any:
        sources = [source for source in n.all_input_nodes if source in self.ids]
        operands = [self.env[source] for source in sources]
        # Copies, because a call may work in place and the probes below need its operands as they were.
        before = [value.clone() if isinstance(value, Tensor) else value for value in operands]
        versions = [_versions(value) for value in operands]
        with _layers_run(self._callee(n) if "opaque" in n.meta else None, str(n.target)) as inside:
            result = super().run_node(n)
        self.inside = tuple(inside.values())
        self._record(n, sources, before, result)
        if "opaque" in n.meta:
            for source, operand, version in zip(sources, operands, versions, strict=True):
                if _versions(operand) != version:  # it was written on: nothing is known of it any more
                    self.ids[source] = _always_live(operand)
        for source, operand in zip(sources, operands, strict=True):
            if operand is result and n in self.ids:  # in place: who reads the operand later reads the result
                self.ids[source] = self.ids[n]
        return result

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return (thawed(args), thawed(kwargs)) if "opaque" in n.meta else (args, kwargs)

    def _record(self, n: fx.Node, sources: list[fx.Node], operands: list[Any], result: Any) -> None:
        if n.op == "output":
            reads = tuple(self.channels_of(self.ids[source]) for source in sources)
            self.ops.append(Op(n.name, "output", "output", tuple(s.name for s in sources), reads, 0, 0, ()))
            return
        if n.op != "placeholder" and not sources:
            return  # parameters, constants, sizes: nothing that a mask could reach
        callee = self._callee(n)
        kind = self._kind(n, callee, operands, result)
        if kind is None:
            return
        names = tuple(source.name for source in sources)
        shape = tuple(result.shape[1:]) if isinstance(result, Tensor) else ()
        what = type(callee).__name__ if isinstance(callee, nn.Module) else getattr(callee, "__name__", str(callee))
        if kind == "move":
            moved = self._moved(n, callee)
            if moved is not None:
                self.ids[n] = moved
                self.ops.append(Op(n.name, "move", what, names, (), 0, 0, shape))
                return
            kind = "opaque"
        if kind == "opaque" or not isinstance(result, Tensor):
            self.ids[n] = _always_live(result)
            why = n.meta.get("opaque", "")
            self.ops.append(Op(n.name, "opaque", what, names, (), 0, 0, shape, inside=self.inside, reason=why))
            return
        last = result.ndim > 2 and (kind == "linear" or self._keeps_last(kind, callee, sources))
        dim = -1 if last else 1
        channels = result.shape[dim]
        first, self.num_ids = self.num_ids, self.num_ids + channels
        view = [1] * result.ndim
        view[dim] = channels
        own = torch.arange(first, first + channels, dtype=torch.float64).view(view)
        self.ids[n] = own.expand(result.shape)
        reads = tuple(self.channels_of(self.ids[source], dim) for source in sources)
        activates = kind in ("activation", "lift") and callee not in _ADDS
        activates = activates or (isinstance(callee, nn.Module) and norm_activates(callee))
        conv = self._conv(n, callee, operands[0], result) if kind in ("conv", "linear") else None
        nonnegative = kind in ("activation", "lift") and bool((self._call(n, {0: _probe(operands[0])}) >= 0).all())
        mixes = kind == "norm" and norm_mixes(callee)
        self.ops.append(
            Op(n.name, kind, what, names, reads, first, channels, shape, conv, activates, nonnegative, mixes, last=last)
        )

    def _keeps_last(self, kind: Kind, callee: Any, sources: list[fx.Node]) -> bool:
        """Whether a call on elements is given a tensor whose channels are its last dimension, and no other."""
        per_channel = isinstance(callee, nn.PReLU) and callee.num_parameters > 1
        if kind not in ("activation", "pass", "lift") or len(sources) != 1 or per_channel:
            return False
        first, last = (self.channels_of(self.ids[sources[0]], dim) for dim in (1, -1))
        return _names_some(last) and not _names_some(first)

    def _callee(self, n: fx.Node) -> Any:
        return self.root.get_submodule(str(n.target)) if n.op == "call_module" else n.target

    def _kind(self, n: fx.Node, callee: Any, operands: list[Any], result: Any) -> Kind | None:
        """None for calls that give no tensor (sizes, shapes, checks)."""
        if not any(isinstance(part, Tensor) for part in _leaves(result)):
            return None
        if n.op == "placeholder":
            return "input"
        if "opaque" in n.meta:
            return "opaque"
        key = type(callee) if isinstance(callee, nn.Module) else callee
        if key in _MOVES or key in CASTS:
            pads = [v for v in (n.kwargs.get("value"), getattr(callee, "value", None)) if v]
            return "opaque" if pads or (key is F.pad and len(n.args) > 3 and n.args[3]) else "move"
        if isinstance(callee, (_ConvNd, nn.Linear)) or key in (F.conv1d, F.conv2d, F.conv3d, F.linear):
            return "linear" if isinstance(callee, nn.Linear) or key is F.linear else "conv"
        if isinstance(callee, nn.Module) and is_norm(callee):
            return "norm"
        if not isinstance(result, Tensor) or result.ndim < 2 or not isinstance(operands[0], Tensor):
            return "opaque"
        pairs = len(operands) == 2 and all(isinstance(o, Tensor) for o in operands)
        if key in _ADDS and len(operands) == 1:  # a parameter may become something other than zero
            return self._elementwise_kind(n, operands[0]) if len(n.all_input_nodes) == 1 else "lift"
        if key in _ADDS:
            return "add" if pairs and self._aligned(operands, result) else "opaque"
        if key in _MULS:
            return "mul" if pairs and self._aligned(operands, result) else "pass" if len(operands) == 1 else "opaque"
        if key in _POOLS:
            return "pass" if self._pools_space(n, key, operands[0]) else "opaque"
        if len(operands) == 1 and operands[0].shape == result.shape and self._is_elementwise(key, callee):
            return self._elementwise_kind(n, operands[0])
        return "opaque"

    @staticmethod
    def _aligned(operands: list[Tensor], result: Tensor) -> bool:
        return all(o.ndim == result.ndim and o.shape[1] in (1, result.shape[1]) for o in operands)

    @staticmethod
    def _pools_space(n: fx.Node, key: Any, x: Tensor) -> bool:
        if key not in _REDUCTIONS:
            return x.ndim == 4
        dims = n.kwargs.get("dim", n.args[1] if len(n.args) > 1 else None)
        given = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, (list, tuple)) else []
        return bool(given) and all(isinstance(d, int) and d % x.ndim > 1 for d in given)

    @staticmethod
    def _is_elementwise(key: Any, callee: Any) -> bool:
        if key in _ACTIVATIONS or key in _NEUTRAL or key in _DIVS:
            return True
        if not isinstance(callee, nn.Module) or isinstance(callee, _NOT_ELEMENTWISE):
            return False
        return isinstance(callee, nn.PReLU) or is_elementwise(callee)

    def _elementwise_kind(self, n: fx.Node, x: Tensor) -> Kind:
        """By trial: does zero stay zero (else every channel is live afterwards), and is it more than identity?"""
        keeps_zero = not bool(self._call(n, {0: torch.zeros_like(x)}).any())
        probe = _probe(x)
        identity = torch.equal(self._call(n, {0: probe.clone()}), probe)  # a copy: the call may work in place
        if not keeps_zero:
            return "lift"
        return "pass" if identity or n.target in _NEUTRAL | _DIVS | _ADDS else "activation"

    def _call(self, n: fx.Node, replaced: dict[int, Tensor]) -> Any:
        """The call of ``n`` with its tensor operands replaced (by position among them)."""
        swap = {node: replaced[i] for i, node in enumerate(s for s in n.all_input_nodes if s in self.ids)}
        return self._run_with(n, lambda node: swap.get(node, self.env.get(node)))

    def _moved(self, n: fx.Node, callee: Any) -> Any:
        """The ids after a move, by running it on them; None where it cannot be run on them."""
        if callee in CASTS:  # the ids would be cast as well
            return self.ids.get(n.all_input_nodes[0])

        def ids(node: fx.Node) -> Any:
            found = self.ids.get(node, self.env.get(node))
            # Ids are spread over a map without memory of their own, which only a copy can be viewed in another shape.
            return found.contiguous() if callee in VIEWS and isinstance(found, Tensor) else found

        try:
            return self._run_with(n, ids)
        except Exception:
            return None

    def _run_with(self, n: fx.Node, value: Callable[[fx.Node], Any]) -> Any:
        args = fx.node.map_arg(n.args, value)
        kwargs = fx.node.map_arg(n.kwargs, value)
        if n.op == "call_module":
            return self.root.get_submodule(str(n.target))(*args, **kwargs)
        if n.op == "call_method":
            return getattr(args[0], str(n.target))(*args[1:], **kwargs)
        return n.target(*args, **kwargs)  # type: ignore[operator]

    @staticmethod
    def channels_of(ids: Any, dim: int = 1) -> Tensor | slice:
        """(C,) ids along ``dim``; a channel that mixes several ids counts as live."""
        if not isinstance(ids, Tensor) or ids.ndim < 2:
            return torch.tensor([LIVE])
        rows = ids[0].movedim(dim - 1 if dim > 0 else dim, 0).flatten(1) if ids.ndim > 2 else ids[0].unsqueeze(1)
        own = rows.amax(1, keepdim=True)  # zeros beside it are spatial padding
        uniform = ((rows == own) | (rows == DEAD)).all(1)
        found = torch.where(uniform, own[:, 0], LIVE).long()
        first = int(found[0])
        return slice(first, first + len(found)) if bool((found.diff() == 1).all()) else found

    def _conv(self, n: fx.Node, callee: Any, x: Tensor, result: Tensor) -> Conv:
        """Channels and MACs of a conv or linear call, from its shapes."""
        if isinstance(callee, nn.Module):
            return _layer(str(n.target), callee, x, result)
        if callee is F.linear:
            return Conv(n.name, x.shape[-1], result.shape[-1], 1, (), prod(result.shape[1:-1]))
        weight: Any = fx.node.map_arg(n.args[1] if len(n.args) > 1 else n.kwargs["weight"], self.env.__getitem__)
        kernel = tuple(weight.shape[2:])
        taps = prod(kernel) * prod(result.shape[2:])
        return Conv(n.name, x.shape[1], result.shape[1], x.shape[1] // weight.shape[1], kernel, taps)


def _layer(name: str, module: nn.Module, x: Tensor, result: Tensor) -> Conv:
    if not isinstance(module, _ConvNd):
        return Conv(name, x.shape[-1], result.shape[-1], 1, (), prod(result.shape[1:-1]))
    kernel = tuple(module.kernel_size)
    positions = prod((x if isinstance(module, _ConvTransposeNd) else result).shape[2:])
    return Conv(name, x.shape[1], result.shape[1], module.groups, kernel, prod(kernel) * positions)


@contextmanager
def _layers_run(module: nn.Module | None, path: str) -> Iterator[dict[str, Conv]]:
    """The convs and linear layers that run in ``module`` inside the block, in execution order.

    It may call one several times, or on batches of its own making; each counts as one sample's share of the whole.
    """
    found: dict[str, Conv] = {}

    def noting(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def note(layer: nn.Module, inputs: tuple[Tensor, ...], result: Tensor) -> None:
            conv = _layer(name, layer, inputs[0], result)
            before = found[name].macs_per_pair if name in found else 0
            share = before + conv.macs_per_pair * len(inputs[0]) // WALKED
            found[name] = dataclasses.replace(conv, macs_per_pair=share)

        return note

    with ExitStack() as stack:
        for name, layer in module.named_modules(prefix=path) if module is not None else ():
            if isinstance(layer, (_ConvNd, nn.Linear)):
                stack.callback(layer.register_forward_hook(noting(name)).remove)
        yield found


def _names_some(read: Tensor | slice) -> bool:
    """Whether ids of channels name any, rather than that all of them may be non-zero."""
    return read.start > LIVE if isinstance(read, slice) else bool((read > LIVE).any())


def _probe(x: Tensor) -> Tensor:
    """Noise of the shape of ``x``, the same each time."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)


def _always_live(result: Any) -> Any:
    if isinstance(result, Tensor):
        return torch.full((1,), LIVE, dtype=torch.float64).expand(result.shape)
    if isinstance(result, dict):
        return {key: _always_live(part) for key, part in result.items()}
    return tuple(_always_live(part) for part in result) if isinstance(result, (tuple, list)) else None


def _leaves(value: Any) -> list[Any]:
    """What tuples, lists and dicts hold."""
    if isinstance(value, dict):
        return _leaves(list(value.values()))
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, (tuple, list)) else [value]


def _versions(value: Any) -> list[int]:
    """How often each tensor was written on."""
    return [leaf._version for leaf in _leaves(value) if isinstance(leaf, Tensor)]

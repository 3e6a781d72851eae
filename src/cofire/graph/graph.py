"""nn.Module -> Graph: its calls in execution order, at one input shape, with what gates may sit on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx, nn

from cofire.backbones.registry import Backbone
from cofire.errors import TraceError
from cofire.graph.following import reason
from cofire.graph.ops import Op
from cofire.graph.tracing import evaluating, trace_calls, trace_training_calls
from cofire.graph.units import Site, Units
from cofire.graph.walk import WALKED, Walk


@dataclass(frozen=True)
class Graph:
    """A model's calls in execution order, at one input shape (C, H, W)."""

    calls: fx.Graph
    root: nn.Module
    ops: tuple[Op, ...]
    input_shape: tuple[int, int, int]
    units: Units = field(default_factory=Units)
    sites: tuple[Site, ...] = ()
    training: fx.Graph | TraceError | None = None
    """The calls in training mode, or why there are none; None if they are the same."""

    def __getitem__(self, name: str) -> Op:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    @cached_property
    def _users(self) -> dict[str, list[Op]]:
        users: dict[str, list[Op]] = {op.name: [] for op in self.ops}
        for op in self.ops:
            for source in dict.fromkeys(op.sources):
                users[source].append(op)
        return users

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """Every module of the model by its qualified name."""
        return dict(self.root.named_modules())

    def module(self, op: str) -> nn.Module:
        """The module that an op calls."""
        return self.modules[next(str(node.target) for node in self.calls.nodes if node.name == op)]

    def users(self, op: Op) -> list[Op]:
        """The ops that read ``op``, in execution order."""
        return self._users[op.name]

    @property
    def opaque(self) -> tuple[Op, ...]:
        """Calls cofire has no rule for; all their channels count as live."""
        return tuple(op for op in self.ops if op.kind == "opaque")

    @cached_property
    def layers(self) -> dict[str, Op]:
        """Conv and linear calls by a name each; the second call of a module is named ``module#2``."""
        named: dict[str, Op] = {}
        calls = Counter[str]()
        for op in self.ops:
            if op.conv is not None:
                module = op.conv.module
                calls[module] += 1
                named[module if calls[module] == 1 else f"{module}#{calls[module]}"] = op
        return named

    @property
    def macs_inside(self) -> dict[str, int]:
        """Layers inside modules that are one opaque call -> their MACs, which no mask changes."""
        macs = Counter[str]()
        for op in self.ops:
            for conv in op.inside:
                macs[conv.module] += conv.macs
        return dict(macs)

    @cached_property
    def dense_macs(self) -> int:
        """MACs of one sample with all gates open."""
        return sum(op.conv.macs for op in self.layers.values() if op.conv is not None) + sum(self.macs_inside.values())

    def at(self, input_shape: tuple[int, int, int]) -> Graph:
        """The same calls at another input shape; each shape is walked once."""
        if input_shape == self.input_shape:
            return self
        if input_shape not in self._others:
            found = _describe(self.calls, self.root, input_shape)
            self._others[input_shape] = dataclasses.replace(
                found, units=self.units, sites=self.sites, training=self.training
            )
        return self._others[input_shape]

    def in_training(self) -> Graph:
        """The graph of the forward in training mode, without units; itself where that makes the same calls.

        Raises:
            TraceError: the forward in training mode cannot be traced.
        """
        if self.training is None:
            return self
        if isinstance(self.training, TraceError):
            raise self.training
        return _describe(self.training, self.root, self.input_shape)

    @cached_property
    def _others(self) -> dict[tuple[int, int, int], Graph]:
        return {}


def trace(model: nn.Module, input_shape: tuple[int, int, int] | None = None) -> Graph:
    """The graph of ``model``, which is left as it was.

    Args:
        model: any module torch.fx can trace, taking one (B, C, H, W) batch.
        input_shape: (C, H, W) of an image. Default: the shape a registered backbone was made for, else
            224 x 224 with the first conv's number of channels.
    """
    shape = input_shape or default_input_shape(model)
    if len(shape) != 3 or min(shape) < 1:
        raise TraceError(f"input_shape must be (C, H, W) with positive sizes, got {tuple(shape)}")
    size = (int(shape[0]), int(shape[1]), int(shape[2]))
    calls = trace_calls(model, size)
    try:
        training: fx.Graph | TraceError | None = trace_training_calls(model, size, calls)
    except TraceError as error:
        training = error
    return dataclasses.replace(_describe(calls, model, size), training=training)


def default_input_shape(model: nn.Module) -> tuple[int, int, int]:
    """(C, H, W) a backbone was made for; for other models a guess, 224 x 224."""
    if isinstance(model, Backbone):
        return model.input_shape
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return (convs[0].in_channels if convs else 3, 224, 224)


def _describe(calls: fx.Graph, root: nn.Module, input_shape: tuple[int, int, int]) -> Graph:
    tensors = [*root.parameters(), *root.buffers()]
    like = next((t for t in tensors if t.is_floating_point()), torch.zeros(1))
    image = torch.zeros(WALKED, *input_shape, device=like.device, dtype=like.dtype)
    walk = Walk(root, calls)
    try:
        with torch.no_grad(), evaluating(root):
            walk.run(image)
    except Exception as error:
        raise TraceError(
            f"the model does not run on images of shape {input_shape}: {reason(error)}\n"
            "Pass the shape it was made for: input_shape=(C, H, W)."
        ) from error
    return Graph(calls=calls, root=root, ops=tuple(walk.ops), input_shape=input_shape)

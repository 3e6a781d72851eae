"""nn.Module -> Graph: its calls, and how channels that can be non-zero ("live") flow through them.

Shapes: B samples, C channels of a tensor, O output channels of a conv.

Live channels are structural: they follow from the masks, never from values.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce

import torch
from torch import Tensor, fx, nn

from cofire.backbones.registry import Backbone
from cofire.errors import TraceError
from cofire.ops import DEAD, Op
from cofire.tracing import evaluating, trace_calls
from cofire.units import Units
from cofire.walk import Walk


@dataclass(frozen=True)
class Graph:
    """A model's calls in execution order, at one input shape (C, H, W)."""

    calls: fx.Graph
    root: nn.Module
    ops: tuple[Op, ...]
    input_shape: tuple[int, int, int]
    units: Units = field(default_factory=Units)

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

    def users(self, op: Op) -> list[Op]:
        """The ops that read ``op``, in execution order."""
        return self._users[op.name]

    @property
    def opaque(self) -> tuple[Op, ...]:
        """Calls cofire has no rule for; all their channels count as live."""
        return tuple(op for op in self.ops if op.kind == "opaque")

    def at(self, input_shape: tuple[int, int, int]) -> Graph:
        """The same calls at another input shape."""
        if input_shape == self.input_shape:
            return self
        return dataclasses.replace(_describe(self.calls, self.root, input_shape), units=self.units)


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
    return _describe(trace_calls(model), model, (int(shape[0]), int(shape[1]), int(shape[2])))


def default_input_shape(model: nn.Module) -> tuple[int, int, int]:
    """(C, H, W) a backbone was made for; for other models a guess, 224 x 224."""
    if isinstance(model, Backbone):
        return model.input_shape
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return (convs[0].in_channels if convs else 3, 224, 224)


def live_inputs(
    graph: Graph, masks: Mapping[str, Tensor], add: Callable[[Op, list[Tensor]], Tensor]
) -> dict[str, Tensor]:
    """Conv or linear op -> which of its input channels can be non-zero, bool (I, B).

    Args:
        masks: op name -> (O, B) bool; the op's channels are live only where its mask is on.
        add: what an addition makes of its operands' live channels, e.g. their union.
    """
    some = next(iter(masks.values()), torch.ones(1, 1))
    live = _Live(some.shape[1], some.device)
    inputs = {}
    for op in graph.ops:
        operands = [live.read(ids) for ids in op.reads]
        if op.conv is not None:
            inputs[op.name] = operands[0].expand(op.conv.in_channels, -1)
        if op.channels:
            live.define(op, _live_after(op, operands, masks.get(op.name), live.all, add))
    return inputs


def _live_after(
    op: Op, operands: list[Tensor], mask: Tensor | None, all_live: Tensor, add: Callable[[Op, list[Tensor]], Tensor]
) -> Tensor:
    if op.kind in ("pass", "activation"):
        found = operands[0]
    elif op.kind == "add":
        found = add(op, operands)
    elif op.kind == "mul":
        found = reduce(torch.logical_and, operands)
    else:
        return all_live if mask is None else mask
    return found if mask is None else found & mask


class _Live:
    """Live channels by id. What one op defines stays one tensor, which its readers share and nobody changes."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.all = torch.ones(1, batch, dtype=torch.bool, device=device)
        self.firsts = [DEAD]
        self.parts = [torch.cat([~self.all, self.all])]  # the ids DEAD and LIVE

    def define(self, op: Op, live_CB: Tensor) -> None:
        self.firsts.append(op.first)
        self.parts.append(live_CB.expand(op.channels, -1))

    def read(self, ids: Tensor | slice) -> Tensor:
        """The rows (C, B) of some ids: those of one op as they are, others gathered."""
        if isinstance(ids, slice):
            n = bisect_right(self.firsts, ids.start) - 1
            rows = self.parts[n][ids.start - self.firsts[n] : ids.stop - self.firsts[n]]
            if len(rows) == ids.stop - ids.start:
                return rows
            ids = torch.arange(ids.start, ids.stop)
        part_C = torch.searchsorted(torch.tensor(self.firsts), ids, right=True) - 1
        used, place_C = part_C.unique(return_inverse=True)
        parts = [self.parts[n] for n in used.tolist()]
        first_P = torch.tensor([0, *(len(part) for part in parts[:-1])]).cumsum(0)
        row_C = ids - torch.tensor(self.firsts)[part_C] + first_P[place_C]
        return torch.cat(parts)[row_C.to(self.all.device)]


def _describe(calls: fx.Graph, root: nn.Module, input_shape: tuple[int, int, int]) -> Graph:
    tensors = [*root.parameters(), *root.buffers()]
    like = next((t for t in tensors if t.is_floating_point()), torch.zeros(1))
    image = torch.zeros(2, *input_shape, device=like.device, dtype=like.dtype)
    walk = Walk(root, calls)
    try:
        with torch.no_grad(), evaluating(root):
            walk.run(image)
    except Exception as error:
        raise TraceError(
            f"the model does not run on images of shape {input_shape}: {error}\n"
            "Pass the shape it was made for: input_shape=(C, H, W)."
        ) from error
    return Graph(calls=calls, root=root, ops=tuple(walk.ops), input_shape=input_shape)

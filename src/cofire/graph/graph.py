"""nn.Module -> Graph: its calls, and how channels that can be non-zero ("live") flow through them.

Shapes: B samples, C channels of a tensor, R masks.

Live channels are structural: they follow from the masks, never from values.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import and_

import torch
from torch import Tensor, fx, nn

from cofire.backbones.registry import Backbone
from cofire.errors import TraceError
from cofire.graph.ops import DEAD, Op
from cofire.graph.tracing import evaluating, trace_calls
from cofire.graph.units import Units
from cofire.graph.walk import Walk


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


@dataclass(frozen=True, eq=False)
class Live:
    """Which channels can be non-zero under R masks, each of which keeps what the one before keeps.

    ``level_BC`` is the first of the masks, from 0, that has a channel on; R if none has. So one small tensor stands
    for all R, and a plain mask is the case R = 1. Nobody changes it, so that all who read the channels share it.
    """

    level_BC: Tensor
    num_masks: int = 1

    @classmethod
    def under(cls, mask_BC: Tensor) -> Live:
        """Where a single bool mask is on."""
        return cls(mask_BC.logical_not().view(torch.uint8))

    @property
    def channels(self) -> int:
        """How many there are, live or not."""
        return self.level_BC.shape[1]

    @cached_property
    def count(self) -> Tensor:
        """How many are live under each mask for each sample, int64 (R * B,)."""
        batch, slots = len(self.level_BC), self.num_masks + 1
        first_B1 = torch.arange(0, batch * slots, slots, device=self.level_BC.device)[:, None]
        found = torch.bincount((self.level_BC + first_B1).flatten(), minlength=batch * slots)
        return found.view(batch, slots).cumsum(1)[:, :-1].T.flatten()

    def __or__(self, other: Live) -> Live:
        return Live(torch.minimum(self.level_BC, other.level_BC), self.num_masks)

    def __and__(self, other: Live) -> Live:
        return self if other is self else Live(torch.maximum(self.level_BC, other.level_BC), self.num_masks)

    def expand(self, channels: int) -> Live:
        """One channel as many alike."""
        return self if self.channels == channels else Live(self.level_BC.expand(-1, channels), self.num_masks)

    def split(self, groups: int) -> Live:
        """Each group of channels as a sample of its own."""
        return Live(self.level_BC.reshape(-1, self.channels // groups), self.num_masks)


def live_inputs(graph: Graph, masks: Mapping[str, Live], add: Callable[[Op, list[Live]], Live]) -> dict[str, Live]:
    """Conv or linear op -> which of its input channels can be non-zero.

    Args:
        masks: op name -> where the op's channels are let through.
        add: what an addition makes of its operands' live channels, e.g. their union.
    """
    table = _Table(next(iter(masks.values()), Live(torch.zeros(1, 1, dtype=torch.uint8))))
    inputs = {}
    for op in graph.ops:
        operands = [table.read(ids) for ids in op.reads]
        if op.conv is not None:
            inputs[op.name] = operands[0].expand(op.conv.in_channels)
        if op.channels:
            table.define(op, _live_after(op, operands, masks.get(op.name), table.all(op.channels), add))
    return inputs


def _live_after(
    op: Op, operands: list[Live], mask: Live | None, all_live: Live, add: Callable[[Op, list[Live]], Live]
) -> Live:
    if op.kind in ("pass", "activation"):
        found = operands[0]
    elif op.kind == "add":
        found = add(op, operands)
    elif op.kind == "mul":
        found = reduce(and_, operands)
    else:
        return all_live if mask is None else mask
    if mask is None:
        return found
    return mask if found is all_live else found & mask  # the mask itself, so that it is counted only once


class _Table:
    """Live channels by id; what one op defines stays one part."""

    def __init__(self, like: Live) -> None:
        level_B1 = torch.zeros_like(like.level_BC[:, :1])
        self._all = {1: Live(level_B1, like.num_masks)}
        self.firsts = [DEAD]
        self.parts = [Live(torch.cat([level_B1 + like.num_masks, level_B1], 1), like.num_masks)]  # ids DEAD and LIVE

    def all(self, channels: int) -> Live:
        """That many channels, all live; the same object each time."""
        if channels not in self._all:
            self._all[channels] = self._all[1].expand(channels)
        return self._all[channels]

    def define(self, op: Op, live: Live) -> None:
        self.firsts.append(op.first)
        self.parts.append(live.expand(op.channels))

    def read(self, ids: Tensor | slice) -> Live:
        """The channels of some ids: those of one op as they are, others gathered."""
        if isinstance(ids, slice):
            n = bisect_right(self.firsts, ids.start) - 1
            part, start, stop = self.parts[n], ids.start - self.firsts[n], ids.stop - self.firsts[n]
            if stop <= part.channels:
                return part if stop - start == part.channels else Live(part.level_BC[:, start:stop], part.num_masks)
            ids = torch.arange(ids.start, ids.stop)
        part_C = torch.searchsorted(torch.tensor(self.firsts), ids, right=True) - 1
        used, place_C = part_C.unique(return_inverse=True)
        parts = [self.parts[n].level_BC for n in used.tolist()]
        first_P = torch.tensor([0, *(part.shape[1] for part in parts[:-1])]).cumsum(0)
        column_C = ids - torch.tensor(self.firsts)[part_C] + first_P[place_C]
        level_BC = torch.cat(parts, 1)
        return Live(level_BC[:, column_C.to(level_BC.device)], self.parts[0].num_masks)


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

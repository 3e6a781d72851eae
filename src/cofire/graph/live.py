"""Which channels can be non-zero ("live") at each point of a graph, given masks; pure.

Shapes: B samples, C channels of a tensor, R masks.

Live channels are structural: they follow from the masks, never from values. The same walk serves masks (`Live`) and
probabilities (`Chance`), because it only ever joins, meets, spreads and picks channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import and_, or_
from typing import Generic, Self, TypeVar, final

import torch
from torch import Tensor

from cofire.graph.graph import Graph
from cofire.graph.ops import DEAD, Op


@dataclass(frozen=True, eq=False)
class AbstractLive(ABC):
    """How live each channel of a tensor is for each sample. Nobody changes it, so that all who read it share it."""

    table_BC: Tensor

    @property
    def channels(self) -> int:
        """How many there are, live or not."""
        return self.table_BC.shape[1]

    @property
    @abstractmethod
    def count(self) -> Tensor:
        """How many channels are live, or are expected to be."""

    @abstractmethod
    def one(self, live: bool) -> Self:
        """A single channel that is always live, or never."""

    @abstractmethod
    def __or__(self, other: Self) -> Self:
        """Live where either is: what an addition makes of its operands."""

    @abstractmethod
    def __and__(self, other: Self) -> Self:
        """Live where both are: what a product makes of its operands."""

    @abstractmethod
    def like(self, table_BC: Tensor) -> Self:
        """Other channels of the same kind."""

    def expand(self, channels: int) -> Self:
        """One channel as many alike."""
        return self if self.channels == channels else self.like(self.table_BC.expand(-1, channels))

    def split(self, groups: int) -> Self:
        """Each group of channels as a sample of its own."""
        return self.like(self.table_BC.reshape(-1, self.channels // groups))


@final
@dataclass(frozen=True, eq=False)
class Live(AbstractLive):
    """Which channels can be non-zero under R masks, each of which keeps what the one before keeps.

    ``table_BC`` is the first of the masks, from 0, that has a channel on; R if none has. So one small tensor stands
    for all R, and a plain mask is the case R = 1.
    """

    num_masks: int = 1

    @classmethod
    def under(cls, mask_BC: Tensor) -> Live:
        """Where a single bool mask is on."""
        return cls(mask_BC.logical_not().view(torch.uint8))

    @cached_property
    def count(self) -> Tensor:
        """How many are live under each mask for each sample, int64 (R * B,)."""
        batch, slots = len(self.table_BC), self.num_masks + 1
        first_B1 = torch.arange(0, batch * slots, slots, device=self.table_BC.device)[:, None]
        found = torch.bincount((self.table_BC + first_B1).flatten(), minlength=batch * slots)
        return found.view(batch, slots).cumsum(1)[:, :-1].T.flatten()

    def one(self, live: bool) -> Live:
        return self.like(torch.zeros_like(self.table_BC[:, :1]) + (0 if live else self.num_masks))

    def __or__(self, other: Live) -> Live:
        return self.like(torch.minimum(self.table_BC, other.table_BC))

    def __and__(self, other: Live) -> Live:
        return self if other is self else self.like(torch.maximum(self.table_BC, other.table_BC))

    def like(self, table_BC: Tensor) -> Live:
        return Live(table_BC, self.num_masks)


@final
@dataclass(frozen=True, eq=False)
class Chance(AbstractLive):
    """The probability that a channel is live, in [0, 1], where decisions are independent of each other."""

    @cached_property
    def count(self) -> Tensor:
        """How many are expected to be live, (B,); carries a gradient."""
        return self.table_BC.sum(1)

    def one(self, live: bool) -> Chance:
        return Chance(torch.full_like(self.table_BC[:, :1], float(live)))

    def __or__(self, other: Chance) -> Chance:
        return Chance(self.table_BC + other.table_BC - self.table_BC * other.table_BC)

    def __and__(self, other: Chance) -> Chance:
        return self if other is self else Chance(self.table_BC * other.table_BC)

    def like(self, table_BC: Tensor) -> Chance:
        return Chance(table_BC)


L = TypeVar("L", bound=AbstractLive)
Join = Callable[[Op, list[L]], L]


def union(op: Op, operands: list[L]) -> L:
    """What an addition really makes of its operands' live channels."""
    return reduce(or_, operands)


def live_inputs(graph: Graph, masks: Mapping[str, L], like: L, add: Join[L] = union) -> dict[str, L]:
    """Conv or linear op -> which of its input channels can be non-zero.

    Args:
        masks: op name -> where the op's channels are let through.
        like: of the kind and batch size of the masks.
        add: what an addition makes of its operands' live channels.
    """
    table = _Table(like)
    inputs = {}
    for op in graph.ops:
        operands = [table.read(ids) for ids in op.reads]
        if op.conv is not None:
            inputs[op.name] = operands[0].expand(op.conv.in_channels)
        if op.channels:
            table.define(op, _live_after(op, operands, masks.get(op.name), table.all(op.channels), add))
    return inputs


def _live_after(op: Op, operands: list[L], mask: L | None, all_live: L, add: Join[L]) -> L:
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


class _Table(Generic[L]):
    """Live channels by id; what one op defines stays one part."""

    def __init__(self, like: L) -> None:
        self._all = {1: like.one(True)}
        self.firsts = [DEAD]
        self.parts = [like.like(torch.cat([like.one(False).table_BC, like.one(True).table_BC], 1))]  # ids DEAD and LIVE

    def all(self, channels: int) -> L:
        """That many channels, all live; the same object each time."""
        if channels not in self._all:
            self._all[channels] = self._all[1].expand(channels)
        return self._all[channels]

    def define(self, op: Op, live: L) -> None:
        self.firsts.append(op.first)
        self.parts.append(live.expand(op.channels))

    def read(self, ids: Tensor | slice) -> L:
        """The channels of some ids: those of one op as they are, others gathered."""
        if isinstance(ids, slice):
            n = bisect_right(self.firsts, ids.start) - 1
            part, start, stop = self.parts[n], ids.start - self.firsts[n], ids.stop - self.firsts[n]
            if stop <= part.channels:
                return part if stop - start == part.channels else part.like(part.table_BC[:, start:stop])
            ids = torch.arange(ids.start, ids.stop)
        part_C = torch.searchsorted(torch.tensor(self.firsts), ids, right=True) - 1
        used, place_C = part_C.unique(return_inverse=True)
        parts: Sequence[Tensor] = [self.parts[n].table_BC for n in used.tolist()]
        first_P = torch.tensor([0, *(part.shape[1] for part in parts[:-1])]).cumsum(0)
        column_C = ids - torch.tensor(self.firsts)[part_C] + first_P[place_C]
        table_BC = torch.cat(list(parts), 1)
        return self.parts[0].like(table_BC[:, column_C.to(table_BC.device)])

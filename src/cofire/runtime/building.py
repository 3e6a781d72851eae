"""Ops and buffers under construction; and any arrangement of the buffers' elements as a buffer of its own.

Every element of every buffer has an *id*, and id 0 is the number zero. A tensor of ids, as views, slices, shuffles and
padding leave it, says all there is to know about such calls, whatever they were and in whatever combination.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from cofire.runtime.program import Add, Affine, Cat, Flatten, Gate, Move, Op, Pair, Resample, Shape, Strided


class ArrangementError(ValueError):
    """The elements are arranged in a way that no op expresses."""


@dataclass(frozen=True)
class _Part:
    """Channels of one buffer that are moved alike: ``channels`` in the source, ``places`` in the target."""

    buffer: int
    stride: Pair
    offset: Pair
    channels: tuple[int, ...]
    places: tuple[int, ...]


class Builder:
    """Collects ops; each writes a buffer of its own."""

    def __init__(self, names: set[str]) -> None:
        """``names`` are taken: no op gets one of them unless it asks for it with ``own_name``."""
        self.ops: list[Op] = []
        self.buffers: list[Shape] = []
        self.firsts: list[int] = []
        self.num_ids = 1
        self.names = names

    def buffer(self, shape: tuple[int, ...]) -> int:
        """The number of a new buffer for a tensor (C, H, W) or (C)."""
        if len(shape) not in (1, 3):
            raise ArrangementError(f"a tensor must have the shape (C, H, W) or (C) for one image, got {shape}")
        channels, height, width = (*shape, 1, 1)[:3]
        self.buffers.append((channels, height, width))
        self.firsts.append(self.num_ids)
        self.num_ids += prod(shape)
        return len(self.buffers) - 1

    def emit(
        self,
        kind: type[Op],
        name: str,
        src: tuple[int, ...],
        shape: tuple[int, ...],
        gate: Gate | None = None,
        own_name: bool = False,
        **attrs: Any,
    ) -> int:
        """Append an op and return its buffer."""
        if not own_name:
            name = self._fresh(name)
        self.names.add(name)
        dst = self.buffer(shape)
        self.ops.append(kind(name=name, src=src, dst=dst, gate=gate, **attrs))
        return dst

    def _fresh(self, name: str) -> str:
        """``name``, or ``name#2`` and so on where it is taken."""
        number, fresh = 1, name
        while fresh in self.names:
            number += 1
            fresh = f"{name}#{number}"
        return fresh

    def ids(self, buffer: int, shape: tuple[int, ...]) -> Tensor:
        """The ids of a buffer's elements, float64 as the walk wants them, seen as ``shape``."""
        first = self.firsts[buffer]
        return torch.arange(first, first + prod(shape), dtype=torch.float64).view(shape)

    def gathered(self, ids: Tensor, name: str) -> int:
        """A buffer with the elements of ``ids``, (C, H, W) or (C): the one that holds them just so, or a new one.

        Raises:
            ArrangementError: no ops make it.
        """
        if ids.ndim not in (1, 3):
            raise ArrangementError(
                f"a tensor must have the shape (C, H, W) or (C) for one image, got {tuple(ids.shape)}"
            )
        ids = ids.long()
        target = ids if ids.ndim == 3 else self._flattened(ids, name)[:, None, None]
        holder = self._owner(target.flatten()[:1]).item()
        if holder >= 0 and self._holds(int(holder), target):
            return int(holder)
        try:
            return self._assembled(target, self._parts(target), name)
        except ArrangementError:
            found = self._indexed(target, name)
            found = self._strided(target, name) if found is None else found
            found = self._side_by_side(target, name) if found is None else found
            if found is None:
                raise
            return found

    def _side_by_side(self, target: Tensor, name: str) -> int | None:
        """Parts of a map from several buffers, each with zeros where the others are, added up."""
        owner = self._owner(target)
        owners = [buffer for buffer in owner.unique().tolist() if buffer >= 0]
        if len(owners) < 2:
            return None
        parts = [self._alone(target, owner == buffer, name) for buffer in owners]
        shape = tuple(target.shape)
        total = parts[0]
        for part in parts[1:]:
            total = self.emit(Add, name, (total, part), shape, act="none", slope=0.0)
        # A channel that mixes several counts as live, here as in a cost.
        same: dict[str, Any] = {"scale": torch.ones(len(target)).double(), "shift": torch.zeros(len(target)).double()}
        return self.emit(Affine, name, (total,), shape, lift=True, act="none", slope=0.0, **same)

    def _alone(self, target: Tensor, mine: Tensor, name: str) -> int:
        """What is ``mine`` of a map, in its place, and zeros around it."""
        rows, columns = (mine.any(0).any(dim).nonzero()[:, 0] for dim in (1, 0))
        box = (slice(None), slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1))
        inside = self.gathered(torch.where(mine, target, 0)[box], name)
        placed = torch.zeros_like(target)
        placed[box] = self.ids(inside, self.buffers[inside]).long()
        return self.gathered(placed, name)

    def _indexed(self, target: Tensor, name: str) -> int | None:
        """Channels, rows and columns of one buffer, each chosen by itself: reflections, repeats, turns."""
        buffer = int(self._owner(target.flatten()[:1]).item())
        if buffer < 0 or not bool((self._owner(target) == buffer).all()):
            return None
        channels, height, width = self.buffers[buffer]
        place = target - self.firsts[buffer]
        channel_C = place[:, 0, 0] // (height * width)
        rows, columns = place[0, :, 0] // width % height, place[0, 0, :] % width
        found = channel_C[:, None, None] * (height * width) + rows[:, None] * width + columns
        if not torch.equal(found, place):
            return None
        if not torch.equal(channel_C, torch.arange(channels)):
            part = _Part(buffer, (1, 1), (0, 0), (), ())
            buffer = self._move(part, channel_C.tolist(), (height, width), name)
        return self.emit(
            Resample,
            name,
            (buffer,),
            tuple(target.shape),
            rows=tuple(rows.tolist()),
            columns=tuple(columns.tolist()),
            row_weights=torch.ones(len(rows), 1),
            column_weights=torch.ones(len(columns), 1),
        )

    def _strided(self, target: Tensor, name: str) -> int | None:
        """Elements of one buffer in an order that digits and strides describe: other shapes, axes swapped."""
        buffer = int(self._owner(target.flatten()[:1]).item())
        if buffer < 0 or not bool((self._owner(target) == buffer).all()):
            return None
        place_N = target.flatten() - self.firsts[buffer]
        digits = _digits(place_N - place_N[0], len(target))
        if digits is None:
            return None
        sizes, strides = zip(*digits, strict=True)
        begin = int(place_N[0])
        return self.emit(Strided, name, (buffer,), tuple(target.shape), sizes=sizes, strides=strides, begin=begin)

    def permuted(self, ids_N: Tensor) -> tuple[int, Tensor] | None:
        """The buffer whose elements these are, each of them once, and where in it each is; None if there is none."""
        ids_N = ids_N.long()
        buffer = int(self._owner(ids_N[:1]).item())
        if buffer < 0 or len(ids_N) != prod(self.buffers[buffer]):
            return None
        place_N = ids_N - self.firsts[buffer]
        return (buffer, place_N) if torch.equal(place_N.sort().values, torch.arange(len(ids_N))) else None

    def _owner(self, ids: Tensor) -> Tensor:
        """Which buffer holds each id; -1 for the number zero."""
        return torch.searchsorted(torch.tensor(self.firsts), ids.contiguous(), right=True) - 1

    def _holds(self, buffer: int, target: Tensor) -> bool:
        shape = self.buffers[buffer]
        return target.shape == shape and torch.equal(target, self.ids(buffer, shape).long())

    def _flattened(self, ids_N: Tensor, name: str) -> Tensor:
        """The ids after every map among their buffers was flattened, which keeps the order in memory."""
        for buffer in self._owner(ids_N).unique().tolist():
            if buffer < 0 or self.buffers[buffer][1:] == (1, 1):
                continue
            size = prod(self.buffers[buffer])
            inside = (ids_N >= self.firsts[buffer]) & (ids_N < self.firsts[buffer] + size)
            flat = self.emit(Flatten, name, (buffer,), (size,))
            ids_N = torch.where(inside, ids_N - self.firsts[buffer] + self.firsts[flat], ids_N)
        return ids_N

    def _parts(self, target: Tensor) -> list[_Part]:
        """The target's channels by the buffer they come from and the way they are moved in space."""
        inside = target > 0
        owner = self._owner(target)
        shapes = torch.tensor(self.buffers)[owner.clamp(min=0)]
        height, width = shapes[..., 1], shapes[..., 2]
        place = target - torch.tensor(self.firsts)[owner.clamp(min=0)]

        def bounds(values: Tensor) -> tuple[Tensor, Tensor]:
            rows = values.expand(target.shape)
            highest = torch.where(inside, rows, -1).flatten(1).amax(1)
            return torch.where(inside, rows, 2**62).flatten(1).amin(1), highest

        def motion(of_target: Tensor, of_source: Tensor) -> tuple[Tensor, Tensor]:
            (low, high), (source_low, source_high) = bounds(of_target), bounds(of_source)
            stride = torch.where(high > low, (source_high - source_low) // (high - low).clamp(min=1), 1)
            return stride, source_low - low * stride

        rows, columns = (torch.arange(size) for size in target.shape[1:])
        (stride_h, offset_h), (stride_w, offset_w) = (
            motion(rows[:, None], place // width % height),
            motion(columns, place % width),
        )
        channel_C, _ = bounds(place // (width * height))
        keys = torch.stack([bounds(owner)[1], stride_h, stride_w, offset_h, offset_w], 1).tolist()
        found: dict[tuple[int, ...], list[int]] = {}
        for at, key in enumerate(keys):
            if key[0] >= 0:  # else the channel is zero throughout
                found.setdefault(tuple(key), []).append(at)
        parts = []
        for (buffer, sh, sw, oh, ow), places in found.items():
            channels = tuple(channel_C[places].tolist())
            part = _Part(buffer, (sh, sw), (oh, ow), channels, tuple(places))
            if min(sh, sw) < 1 or not torch.equal(self._moved(part, target.shape[1:]), target[places]):
                raise ArrangementError("it is neither a choice of channels nor a slice, crop or zero padding of a map")
            parts.append(part)
        if not parts:
            raise ArrangementError("it is zero throughout")
        return parts

    def _moved(self, part: _Part, size: torch.Size) -> Tensor:
        """The ids that a move would give for a part."""
        shape = self.buffers[part.buffer]
        moved = self.ids(part.buffer, shape).long()[list(part.channels)]
        for dim, (length, stride, offset) in enumerate(zip(size, part.stride, part.offset, strict=True), start=1):
            at = torch.arange(length) * stride + offset
            outside = (at < 0) | (at >= shape[dim])
            moved = moved.index_select(dim, at.clamp(0, shape[dim] - 1)).index_fill(dim, outside.nonzero()[:, 0], 0)
        return moved

    def _assembled(self, target: Tensor, parts: list[_Part], name: str) -> int:
        num_channels, height, width = target.shape
        chosen = [-1] * num_channels
        if len(parts) == 1:
            for place, channel in zip(parts[0].places, parts[0].channels, strict=True):
                chosen[place] = channel
            return self._move(parts[0], chosen, (height, width), name)
        buffers: list[int] = []
        end = 0
        for part in parts:
            if self._is_whole(part, (height, width)):
                buffer, order = part.buffer, part.channels
            else:
                buffer, order = self._move(part, part.channels, (height, width), name), tuple(range(len(part.channels)))
            for place, channel in zip(part.places, order, strict=True):
                chosen[place] = end + channel
            end += self.buffers[buffer][0]
            buffers.append(buffer)
        cat = self.emit(Cat, name, tuple(buffers), (end, height, width))
        if chosen == list(range(end)):
            return cat
        return self._move(_Part(cat, (1, 1), (0, 0), (), ()), chosen, (height, width), name)

    def _is_whole(self, part: _Part, size: Pair) -> bool:
        channels, *map_size = self.buffers[part.buffer]
        still = (part.stride, part.offset, tuple(map_size)) == ((1, 1), (0, 0), size)
        return still and sorted(part.channels) == list(range(channels))

    def _move(self, part: _Part, channels: Sequence[int], size: Pair, name: str) -> int:
        shape = (len(channels), *size)
        attrs: dict[str, Any] = {"channels": tuple(channels), "stride": part.stride, "offset": part.offset}
        return self.emit(Move, name, (part.buffer,), shape, **attrs)


_MOST_DIGITS = 8  # of a strided op


def _digits(place_N: Tensor, channels: int) -> list[tuple[int, int]] | None:
    """(size, stride) of the digits, the last of which counts fastest; None if there are none.

    Some of the first ones make up the channels, as the op wants it.
    """
    digits: list[tuple[int, int]] = []
    inner = 1  # elements that the digits so far make up
    area = len(place_N) // channels
    while inner < len(place_N):
        stride = int(place_N[inner])
        steps_M = place_N[::inner]
        straight = (steps_M == stride * torch.arange(len(steps_M))).int()
        size = int(straight.cumprod(0).sum())
        if inner < area:  # a digit is cut in two where a channel ends
            size = min(size, area // inner)
            while area % (inner * size):
                size -= 1
        while len(place_N) % (inner * size):
            size -= 1
        if size == 1:
            return None
        digits.append((size, stride))
        inner *= size
    digits = digits[::-1] or [(1, 0)]
    found_N = torch.zeros(1, dtype=torch.long)
    for size, stride in digits:
        found_N = (found_N[:, None] + stride * torch.arange(size)).flatten()
    return digits if torch.equal(found_N, place_N) and len(digits) <= _MOST_DIGITS else None

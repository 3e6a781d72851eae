"""What buffers hold for a few images -> the scale and zero that lose least of it in 8 bits.

Shapes: B images, C channels, N numbers that were drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from math import prod

import torch
from torch import Tensor

from cofire.errors import DataError
from cofire.runtime.integers import dequantized, quantized
from cofire.runtime.interpreter import trace
from cofire.runtime.program import Program, Quant

_NUMBERS = 1 << 18  # drawn of each buffer, over all images
_ELEMENTS = 1 << 27  # of all buffers at a time
_SHRINKS = torch.linspace(1, 0.2, 65).tolist()
SCALES = 2.0**-64, 2.0**64
"""The smallest and the largest scale or multiplier that a program may have."""


class Ranges:
    """Numbers drawn of every buffer of a program in which each op writes a buffer of its own."""

    def __init__(self, program: Program, images: Iterable[Tensor]) -> None:
        """``images`` are batches, (B, C, H, W)."""
        self._drawn: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._extremes: defaultdict[int, list[float]] = defaultdict(list)
        batches = [x.float() for x in images]
        share = _NUMBERS // sum(map(len, batches))
        most = max(1, _ELEMENTS // sum(map(prod, program.buffers)))
        for x_BCHW in (part for batch in batches for part in batch.split(most)):
            self._draw(program.input, x_BCHW, share)
            values = trace(program, x_BCHW).values
            for op in program.ops:
                self._draw(op.dst, values[op.name].data, share)

    def _draw(self, buffer: int, data_BCHW: Tensor, share: int) -> None:
        numbers = data_BCHW[~data_BCHW.isnan()]  # without what is not live
        if not bool(numbers.isfinite().all()):
            raise DataError(f"images must keep every number finite; buffer {buffer} holds others for some")
        if len(numbers):
            most = max(1, share * len(data_BCHW))
            step = -(-len(numbers) // most) | 1  # odd, so that it does not fall in step with the rows of a map
            self._drawn[buffer].append(numbers[::step])
            self._extremes[buffer] += [float(numbers.min()), float(numbers.max())]

    def quant(self, buffer: int, alike: Collection[int]) -> Quant:
        """Scale and zero for a buffer, the same for all that are ``alike``, by the least squares of what is lost."""
        extremes = [number for other in alike for number in self._extremes[other]]
        low, high = min([0.0, *extremes]), max([0.0, *extremes])
        if low == high:
            return Quant(buffer=buffer, scale=1.0, zero=0)
        x_N = torch.cat([part for other in alike for part in self._drawn[other]])
        candidates = [_spanning(buffer, low * shrink, high * shrink) for shrink in _SHRINKS]
        return min(candidates, key=lambda quant: _lost(x_N, quant))


def _spanning(buffer: int, low: float, high: float) -> Quant:
    """The quant that reaches from ``low`` to ``high``, zero among its numbers."""
    scale = min(max((high - low) / 255, SCALES[0]), SCALES[1])
    return Quant(buffer=buffer, scale=as_float32(scale), zero=min(max(round(-low / scale), 0), 255))


def _lost(x_N: Tensor, quant: Quant) -> float:
    return float((dequantized(quantized(x_N, quant), quant) - x_N).square().sum())


def as_float32(number: float) -> float:
    """The nearest number that float32 has."""
    return float(torch.tensor(number, dtype=torch.float32))

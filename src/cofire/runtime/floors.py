"""What each op of a program would take if nothing but its arithmetic, or nothing but its memory, took time.

Shapes: P ops of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

_SIZES = {"F32": 4, "I8": 1, "I32": 4}  # bytes of an element
_WINOGRAD = {"wino4": 4, "wino2": 2}  # algorithm -> outputs of a tile, in each direction


@dataclass(frozen=True)
class Speeds:
    """What the CPU does at best with one thread, per second, measured with the inner loops of the kernel set."""

    macs: float
    """Of float32."""
    macs8: float
    """Of int8."""
    macs16: float
    """Of the 16 bits that Winograd multiplies in int8."""
    bytes: float
    """Read, of as much memory as the program has."""


@dataclass(frozen=True)
class Load:
    """What one op has to do for one image."""

    products: float
    """MACs as its algorithm does them: Winograd's are fewer."""
    bytes: float
    """Weights of filters that are on as the algorithm keeps them, and inputs and outputs that are live, each once."""
    bits: int
    """Of a product: 32 of floats, 8 of int8, 16 of Winograd's in int8."""

    def floors(self, speeds: Speeds) -> tuple[float, float]:
        """Milliseconds of the products alone, and of the bytes alone."""
        rate = {32: speeds.macs, 16: speeds.macs16, 8: speeds.macs8}[self.bits]
        return 1e3 * self.products / rate, 1e3 * self.bytes / speeds.bytes


def footprint(table: dict[str, Any], tensors: dict[str, Any]) -> int:
    """Bytes of a program's weights and buffers."""
    u8 = _u8(table)
    buffers = sum(int(prod(shape)) * (1 if n in u8 else 4) for n, shape in enumerate(table["buffers"]))
    return buffers + sum(_bytes(tensor) for tensor in tensors.values())


def loads(
    table: dict[str, Any],
    tensors: dict[str, Any],
    algorithms: Sequence[str],
    macs_P: Sequence[float],
    on: Sequence[float],
) -> list[Load]:
    """The load of each op.

    Args:
        table: a program's, and its tensors', as the file has them.
        algorithms: of each op.
        macs_P: executed, of each op, a mean over images.
        on: of each group, the share of its filters that ran.
    """
    ops = zip(table["ops"], algorithms, macs_P, strict=True)
    return [_load(op, table, tensors, algorithm, macs, on) for op, algorithm, macs in ops]


def _load(
    op: dict[str, Any], table: dict[str, Any], tensors: dict[str, Any], algorithm: str, macs: float, on: Sequence[float]
) -> Load:
    u8, buffers = _u8(table), table["buffers"]
    filters_on = 1.0 if op["gate"] is None else on[op["gate"]["group"]]
    weights = [tensors[name] for name in op["weights"]]
    inputs_on, fewer, larger = 1.0, 1.0, 1.0
    if op["kind"] in ("conv", "conv8"):
        dense = prod(weights[0]["shape"]) * prod(buffers[op["dst"]][1:])
        inputs_on = min(1.0, macs / (dense * filters_on)) if filters_on else 0.0
        fewer, larger = _winograd(op["attrs"], algorithm)
        larger = 1.0 if op["kind"] == "conv8" else larger  # whose weights are transformed anew for each image

    def moved(buffer: int, share: float) -> float:
        return float(prod(buffers[buffer]) * (1 if buffer in u8 else 4)) * share

    read = sum(moved(source, inputs_on if n == 0 else filters_on) for n, source in enumerate(op["src"]))
    kept = sum(_bytes(tensor) for tensor in weights) * filters_on * larger
    bits = 32 if op["kind"] != "conv8" else 16 if algorithm in _WINOGRAD else 8
    return Load(macs * fewer, read + kept + moved(op["dst"], filters_on), bits)


def _winograd(attrs: dict[str, Any], algorithm: str) -> tuple[float, float]:
    """How many products there are for one, and how many weights; stride 2 is a sum over phases of fewer taps."""
    if algorithm not in _WINOGRAD:
        return 1.0, 1.0
    tile, taps, stride = _WINOGRAD[algorithm], attrs["kernel"][0], attrs["stride"][0]
    side = stride * (tile + ceil(taps / stride) - 1)
    return (side / (tile * taps)) ** 2, (side / taps) ** 2


def _u8(table: dict[str, Any]) -> set[int]:
    return {quant["buffer"] for quant in table.get("quants", ())}  # which versions 1 and 2 do not have


def _bytes(tensor: dict[str, Any]) -> int:
    return int(prod(tensor["shape"])) * _SIZES[tensor["dtype"]]

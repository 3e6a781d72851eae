"""Ops: what one call of a traced model is, in the words the rest of the library speaks; only data."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from torch import Tensor

# "activation" and "pass" leave zero at zero; a "lift" does not (sigmoid, adding a number), so all is live after it.
Kind = Literal[
    "input", "conv", "linear", "norm", "activation", "pass", "lift", "add", "mul", "move", "opaque", "output"
]

DEAD, LIVE = 0, 1  # the ids of "always zero" (channel padding) and "may always be non-zero"


@dataclass(frozen=True)
class Conv:
    """The arithmetic of one conv or linear call; ``macs_per_pair`` = kernel taps x output positions."""

    module: str
    in_channels: int
    out_channels: int
    groups: int
    kernel_size: tuple[int, ...]
    macs_per_pair: int

    @property
    def macs(self) -> int:
        """Dense multiply-accumulates for one sample, padding taps included."""
        return self.macs_per_pair * self.in_channels * self.out_channels // self.groups

    @property
    def positions(self) -> int:
        """Positions at which each filter is applied."""
        return self.macs_per_pair // prod(self.kernel_size)


@dataclass(frozen=True)
class Op:
    """One call of the traced model.

    ``reads`` holds for each tensor operand the ids of its channels: a slice, or (C,) int64. The op's own have the
    ids ``first .. first + channels - 1`` (none for a move: its readers see through it).
    """

    name: str
    kind: Kind
    what: str
    sources: tuple[str, ...]
    reads: tuple[Tensor | slice, ...]
    first: int
    channels: int
    shape: tuple[int, ...]
    conv: Conv | None = None
    activates: bool = False
    nonnegative: bool = False
    mixes: bool = False
    """Of a norm: what it makes of one channel depends on others."""
    inside: tuple[Conv, ...] = ()
    """Of a module that is one opaque call: the convs and linear layers it runs."""
    reason: str = ""
    """Why it is one opaque call, with file and line."""
    last: bool = False
    """Whether its channels are the last dimension of its result, as a linear layer on a map (H, W, C) has them."""

    @property
    def is_conv(self) -> bool:
        """Whether it is a conv; a linear layer on a map is one of one tap."""
        return self.kind == "conv" or (self.kind == "linear" and len(self.shape) == 3)

    @property
    def size(self) -> tuple[int, ...]:
        """(H, W) of its result."""
        return self.shape[:-1] if self.last else self.shape[1:]

    @property
    def own(self) -> slice:
        """The op's columns in a live table."""
        return slice(self.first, self.first + self.channels)

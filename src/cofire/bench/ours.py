"""Our own engine, as the bench sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from cofire.runtime.engine import compile as compile_engine
from cofire.runtime.engine import load_program

NAME = "cofire"


class Engine(Protocol):
    """What the bench asks of an engine; ``cofire.Engine`` is one."""

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""

    @property
    def last_masks(self) -> Mapping[str, NDArray[np.bool_]]:
        """Group -> (B, O) of the last call."""

    @property
    def last_macs(self) -> Mapping[str, NDArray[np.int64]]:
        """Layer -> MACs executed in the last call, (B,)."""

    def __call__(self, x_BCHW: Any, threads: int = 1) -> Any:
        """Logits of a batch."""

    def force(self, masks: Mapping[str, Any], *, heads: bool = False) -> AbstractContextManager[None]:
        """Inside the block the masks given rule; with ``heads`` the heads are evaluated all the same."""


Compile = Callable[[nn.Module, tuple[int, int, int]], Engine]

__all__ = ["NAME", "Compile", "Engine", "compile_engine", "load_program"]

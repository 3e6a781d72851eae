"""Our own engine, as the bench sees it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from torch import Tensor, nn

from cofire.errors import ConfigError

NAME = "cofire"


class Engine(Protocol):
    """What the bench asks of an engine; ``cofire.Engine`` is one."""

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""

    @property
    def last_macs(self) -> Any:
        """MACs executed in the last call, one number per image."""

    def __call__(self, x: Any, threads: int = 1) -> Any:
        """Logits of a batch."""

    def force(
        self, masks: Literal["open"] | Mapping[str, Tensor], *, heads: bool = False
    ) -> AbstractContextManager[None]:
        """Inside the block the masks given rule; with ``heads`` the heads are evaluated all the same."""


Compile = Callable[[nn.Module, tuple[int, int, int]], Engine]


def compile_engine(model: nn.Module, input_shape: tuple[int, int, int]) -> Engine:
    """``cofire.compile``."""
    return cast(Engine, _public("compile")(model, input_shape))


def load_engine(path: Path) -> Engine:
    """The engine of a program file."""
    return cast(Engine, _public("Engine").load(path))


def _public(name: str) -> Any:
    package = importlib.import_module("cofire")
    if name not in package.__all__:
        raise ConfigError(f"this cofire has no native engine yet: cofire.{name} is missing")
    return getattr(package, name)

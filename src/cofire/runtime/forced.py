"""Masks that the caller of an engine gives."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from cofire.errors import ConfigError


class Forced:
    """Masks that rule in place of the heads, laid out as the native side wants them: group by group, each (B, O)."""

    def __init__(self, masks: Mapping[str, NDArray[np.uint8]], groups: Mapping[str, int]) -> None:
        self._masks, self._groups = masks, groups
        self._is_forced = [name in masks for name in groups]
        self._flat: tuple[int, NDArray[np.uint8]] | None = None
        if all(len(mask) == 1 for mask in masks.values()):
            self.of(1)  # here, not on the time of the call

    def of(self, batch: int) -> tuple[NDArray[np.uint8] | None, list[bool]]:
        """The masks for this many images, and which groups are forced."""
        if not self._masks:
            return None, []
        if self._flat is None or self._flat[0] != batch:
            self._flat = batch, np.concatenate([self._rows(name, batch) for name in self._groups])
        return self._flat[1], self._is_forced

    def _rows(self, name: str, batch: int) -> NDArray[np.uint8]:
        mask = self._masks.get(name, np.zeros((1, self._groups[name]), np.uint8))
        if len(mask) not in (1, batch):
            raise ConfigError(f"group {name!r}: a forced mask must have one row or {batch}, got {len(mask)}")
        return np.broadcast_to(mask, (batch, self._groups[name])).ravel()

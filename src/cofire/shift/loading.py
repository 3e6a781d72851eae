"""The batches of a set under a corruption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cofire.data.images import AbstractImages, Batch
from cofire.shift.corruptions import Corruption, Pictures


@dataclass(frozen=True, kw_only=True, eq=False)
class ShiftedLoader:
    """The batches ``(x_BCHW, label_B)`` of a set, corrupted, then normalised as ever; in the set's own order.

    An image's pixels are the same whatever ``batch_size`` is. With severity 0 the batches are those of
    ``images.loader``, bit for bit.

    Args:
        seed: of what is random. A higher severity gets the same noise, scaled.
    """

    images: AbstractImages
    batch_size: int
    corruption: Corruption
    severity: float
    seed: int = 0

    def __post_init__(self) -> None:
        self.corruption.check(self.severity)

    def __len__(self) -> int:
        """Batches of the set."""
        return len(self.images.loader(self.batch_size))

    def __iter__(self) -> Iterator[Batch]:
        if self.severity == 0:
            return iter(self.images.loader(self.batch_size))
        return map(self._batch, torch.arange(len(self.images)).split(self.batch_size))

    def _batch(self, index_B: torch.Tensor) -> Batch:
        images = self.images
        pixels_BCHW = images.pixels(index_B).float() / 255
        pictures = Pictures(pixels_BCHW=pixels_BCHW, index_B=index_B, std=images.std, seed=self.seed)
        label_B = None if images.label_N is None else images.label_N[index_B]
        return images.normalise(255 * self.corruption(pictures, self.severity)), label_B

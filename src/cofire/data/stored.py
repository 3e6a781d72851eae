"""Images that lie in shards on disk and are decoded when a batch asks for them: for sets larger than memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from cofire.data.decoding import centre, channels_first, open_rgb
from cofire.data.images import AbstractImages, Batch
from cofire.data.shards import Shards
from cofire.errors import ConfigError, FileError
from cofire.extras import require

if TYPE_CHECKING:
    from PIL.Image import Image


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StoredImages(AbstractImages):
    """Some pictures of a store, decoded by several threads at once, one batch ahead.

    To be evaluated, a picture's shorter side is resized to size * 256 / 224 and the middle cut out.

    Args:
        store: the encoded pictures.
        row_N: which of them, int64, (N,), N >= 1.
        size: height and width that are given out, at least 1.
        label_N, classes, mean, std, name: as in `AbstractImages`.
    """

    store: Shards
    row_N: Tensor
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size of pictures must be at least 1, got {self.size}")
        super().__post_init__()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(3, size, size)."""
        return 3, self.size, self.size

    def __len__(self) -> int:
        return len(self.row_N)

    def pixels(self, row_B: Tensor) -> Tensor:
        """The middle of some pictures: uint8, (B, 3, size, size)."""
        shorter = round(self.size * 256 / 224)
        fit = functools.partial(centre, size=self.size, shorter=shorter)
        return self._decoded(row_B, [fit] * len(row_B))

    def sizes(self, row_B: Tensor) -> Tensor:
        """Height and width of some stored pictures: int64, (B, 2)."""
        return self.store.size_N2[self.row_N[row_B]]

    def crops(self, row_B: Tensor, box_B4: Tensor) -> Tensor:
        """One box of each picture, resized with antialiasing: uint8, (B, 3, size, size)."""
        bilinear = require("PIL.Image", package="pillow", extra="data").Resampling.BILINEAR

        def cut(box: Sequence[int]) -> Callable[[Image], Image]:
            top, left, height, width = box
            corners = (left, top, left + width, top + height)
            # First cut, then resized: resize(box=...) would let pixels beside the box shine in.
            return lambda image: image.crop(corners).resize((self.size, self.size), bilinear)

        return self._decoded(row_B, [cut(box) for box in box_B4.tolist()])

    def made(self, batches: Iterable[Callable[[], Batch]]) -> Iterator[Batch]:
        """The batches one after the other; while one is used, the next is decoded."""
        with ThreadPoolExecutor(1) as ahead:
            coming = None
            for make in batches:
                ready, coming = coming, ahead.submit(make)
                if ready is not None:
                    yield ready.result()
            if coming is not None:
                yield coming.result()

    def _decoded(self, row_B: Tensor, fits: Sequence[Callable[[Image], Image]]) -> Tensor:
        pixels_BCHW = np.empty((len(row_B), *self.shape), dtype=np.uint8)

        def decode(place: int, row: int, fit: Callable[[Image], Image]) -> None:
            content = self.store.read(row)
            try:
                pixels_BCHW[place] = channels_first(fit(open_rgb(content)))
            except Exception as error:  # each of Pillow's decoders has its own
                raise FileError(f"{self.name}: stored picture {row} cannot be read: {error}") from error

        rows = self.row_N[row_B].tolist()
        for _ in decoders().map(decode, range(len(rows)), rows, fits):
            pass
        return torch.from_numpy(pixels_BCHW)

    def _held(self, rows: slice | Tensor) -> dict[str, Any]:
        return {"row_N": self.row_N[rows]}


@functools.cache
def decoders() -> ThreadPoolExecutor:
    """Threads that decode pictures: Pillow lets go of the interpreter's lock while it decodes JPEG and resizes.

    As many as the machine has cores, shared out over the processes that torchrun started on it.
    """
    share = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // share), thread_name_prefix="decoding")

"""Sets of images, and the batches they are fed in.

Where a set fits into memory its pictures are one uint8 tensor, so that a batch is an indexing operation and needs
no worker processes. What a batch holds is a function of (seed, epoch, step) alone: a run can be stopped, resumed at
any step, or spread over several processes, and still sees the same pictures.

Shapes: N images, B rows of a batch, C channels, H height, W width.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, final, get_args

import numpy as np
import torch
from torch import Tensor

from cofire.data.augmenting import Augment, crop_flip, flipped, random_boxes, resized_crop, stream
from cofire.errors import ConfigError, DataError, unknown

Batch = tuple[Tensor, Tensor | None]  # normalised x_BCHW, and label_B where there are labels


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AbstractImages(ABC):
    """A set of pictures with or without labels, given out equally large.

    A network sees ``(pixels / 255 - mean) / std``; the normalisation belongs to the set, so that training,
    evaluation and export cannot disagree about it.

    Args:
        label_N: int64, (N,), each in [0, len(classes)); None for unlabelled pictures.
        classes: name of each class.
        mean: one value per channel, for pixels in [0, 1].
        std: one value per channel, above 0.
        name: what error texts and reports call the set.
    """

    label_N: Tensor | None
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every picture as it is given out."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def pixels(self, row_B: Tensor) -> Tensor:
        """The pictures of some rows as they are evaluated: uint8, (B, C, H, W).

        Args:
            row_B: int64, in [0, N).
        """

    @abstractmethod
    def sizes(self, row_B: Tensor) -> Tensor:
        """Height and width of the pictures behind some rows, from which boxes can be cut: int64, (B, 2)."""

    @abstractmethod
    def crops(self, row_B: Tensor, box_B4: Tensor) -> Tensor:
        """One box of each picture, resized to `shape`: uint8, (B, C, H, W).

        Args:
            row_B: int64, in [0, N).
            box_B4: top, left, height, width, int64, inside of `sizes`.
        """

    @abstractmethod
    def _held(self, rows: slice | Tensor) -> dict[str, Any]:
        """The fields, labels apart, of the set of these rows."""

    def __post_init__(self) -> None:
        if len(self) == 0:
            raise DataError(f"{self.name} has no images")
        channels = self.shape[0]
        for field, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != channels or not all(math.isfinite(value) for value in values):
                raise DataError(f"{self.name}: {field} must be {channels} finite values, one per channel, got {values}")
        if min(self.std) <= 0:
            raise DataError(f"{self.name}: std must be above 0, got {self.std}")
        label_N = self.label_N
        if label_N is None:
            return
        if label_N.dtype != torch.int64 or label_N.shape != (len(self),):
            raise DataError(
                f"{self.name}: labels must be an int64 tensor ({len(self)},), "
                f"got {label_N.dtype} {tuple(label_N.shape)}"
            )
        low, high = int(label_N.min()), int(label_N.max())
        if low < 0 or high >= len(self.classes):
            raise DataError(
                f"{self.name}: labels must be in 0..{len(self.classes) - 1}, one per class, got {low}..{high}"
            )

    def __repr__(self) -> str:
        c, h, w = self.shape
        labels = "unlabelled" if self.label_N is None else f"{len(self.classes)} classes"
        return f"{type(self).__name__}({self.name!r}: {len(self)} x {c}x{h}x{w}, {labels})"

    def take(self, rows: slice | Sequence[int] | Tensor) -> Self:
        """The given images, in the given order.

        Args:
            rows: a slice (shares memory), or indices in [0, N) (copies).
        """
        if not isinstance(rows, slice):
            rows = torch.as_tensor(rows)
            if rows.numel() == 0:
                raise DataError(f"{self.name}: rows must name at least one image, got none")
        label_N = None if self.label_N is None else self.label_N[rows]
        return dataclasses.replace(self, label_N=label_N, **self._held(rows))

    def split(self, n: int, seed: int = 0) -> tuple[Self, Self]:
        """The set without ``n`` held-out images, and those ``n``; every class gives its fair share.

        The k-th image of a class (in a shuffled order) waits at (k + 1/2) / size of the class, and the first
        ``n`` in that queue are held out: seats of a parliament by Sainte-Laguë. Both parts keep the order of
        the set. The split is the same on every machine and version.

        Args:
            n: images to hold out, in [1, N).
            seed: which of the fair splits, in [0, 2**32).
        """
        if not 1 <= n < len(self):
            raise ConfigError(f"{self.name}: n to hold out must be in 1..{len(self) - 1}, got {n}")
        if not 0 <= seed < 2**32:
            raise ConfigError(f"{self.name}: the seed of a split must be in 0..2**32-1, got {seed}")
        # RandomState, unlike the generators of torch and newer numpy, promises never to change its stream.
        shuffled = np.random.RandomState(seed).permutation(len(self))
        label_N = np.zeros(len(self), dtype=np.int64) if self.label_N is None else self.label_N.numpy()
        place = np.empty(len(self))
        for label in np.unique(label_N):
            members = shuffled[label_N[shuffled] == label]
            place[members] = (np.arange(len(members)) + 0.5) / len(members)
        queue = shuffled[np.argsort(place[shuffled], kind="stable")]
        held_out, rest = (torch.from_numpy(np.sort(part)) for part in (queue[:n], queue[n:]))
        return self.take(rest), self.take(held_out)

    def normalise(self, pixels_BCHW: Tensor) -> Tensor:
        """``(pixels / 255 - mean) / std`` as float32, same shape."""
        mean_C11, std_C11 = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return pixels_BCHW.float().div_(255).sub_(mean_C11).div_(std_C11)

    def loader(
        self, batch_size: int, *, train: bool = False, augment: Augment = "none", pad: int = 4, seed: int = 0
    ) -> Loader:
        """Batches of this set; see `Loader`."""
        return Loader(images=self, batch_size=batch_size, train=train, augment=augment, pad=pad, seed=seed)

    def made(self, batches: Iterable[Callable[[], Batch]]) -> Iterator[Batch]:
        """The batches one after the other, each made when it is asked for; a set that must decode may work ahead."""
        return (make() for make in batches)


@final
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Images(AbstractImages):
    """A set of equally large pictures in memory.

    Args:
        pixels_NCHW: uint8, (N, C, H, W), N >= 1.
        label_N, classes, mean, std, name: as in `AbstractImages`.
    """

    pixels_NCHW: Tensor

    def __post_init__(self) -> None:
        pixels_NCHW = self.pixels_NCHW
        if pixels_NCHW.dtype != torch.uint8 or pixels_NCHW.ndim != 4:
            raise DataError(
                f"{self.name}: pixels must be a uint8 tensor (N, C, H, W), "
                f"got {pixels_NCHW.dtype} {tuple(pixels_NCHW.shape)}"
            )
        if len(pixels_NCHW) and pixels_NCHW.numel() == 0:
            raise DataError(f"{self.name}: images must have pixels, got shape {tuple(pixels_NCHW.shape)}")
        super().__post_init__()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        _, channels, height, width = self.pixels_NCHW.shape
        return channels, height, width

    def __len__(self) -> int:
        return len(self.pixels_NCHW)

    def pixels(self, row_B: Tensor) -> Tensor:
        """The pictures of some rows: uint8, (B, C, H, W)."""
        return self.pixels_NCHW.index_select(0, row_B)

    def sizes(self, row_B: Tensor) -> Tensor:
        """H and W for each row: int64, (B, 2)."""
        return torch.tensor(self.shape[1:]).expand(len(row_B), 2)

    def crops(self, row_B: Tensor, box_B4: Tensor) -> Tensor:
        """One box of each picture, enlarged to H x W: uint8, (B, C, H, W)."""
        return resized_crop(self.pixels(row_B), box_B4)

    def _held(self, rows: slice | Tensor) -> dict[str, Any]:
        return {"pixels_NCHW": self.pixels_NCHW[rows]}


@dataclass(frozen=True, kw_only=True, eq=False)
class Loader:
    """The batches ``(x_BCHW, label_B)`` of a set: x float32 and normalised, label_B None if unlabelled.

    A training loader shuffles anew in every epoch, may augment, and drops the last partial batch. Otherwise
    the set comes in its own order and the last batch may be smaller. A loader has no state: iterating over it
    always gives epoch 0, and `fit` asks for ``batches(epoch)``.

    Args:
        images: where the batches come from.
        batch_size: images per batch over all ranks, at least 1; at most ``len(images)`` in training.
        train: shuffle, augment, drop the last partial batch.
        augment: "none"; "crop": pad with black, cut out the old size at a random place; "crop-flip": and
            mirror every second image, at random; "resized-crop-flip": a random box (`random_boxes`) resized, and
            mirrored likewise. Only in training.
        pad: black pixels added on each side before "crop" and "crop-flip".
        seed: of order and augmentation.
    """

    images: AbstractImages
    batch_size: int
    train: bool = False
    augment: Augment = "none"
    pad: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.train and self.batch_size > len(self.images):
            raise ConfigError(
                f"batch_size must be at most {len(self.images)}, all of {self.images.name}, "
                f"for a training loader drops partial batches; got {self.batch_size}"
            )
        if self.augment not in get_args(Augment):
            raise unknown("augment", self.augment, get_args(Augment))
        if self.augment != "none" and not self.train:
            raise ConfigError(f"augment must be 'none' unless train=True, got {self.augment!r}")
        if self.pad < 0:
            raise ConfigError(f"pad must be at least 0, got {self.pad}")

    def __len__(self) -> int:
        """Steps of one epoch."""
        return len(self.images) // self.batch_size if self.train else -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches(0)

    def batches(self, epoch: int, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """The batches of one epoch from step ``start`` on, without making the earlier ones.

        Of each batch, rank r of ``world`` gets the rows r, r + world, ...: together exactly what one process
        would get. Every rank sees ``len(self) - start`` batches; only without ``train`` can their sizes
        differ, down to no rows in the last.

        Args:
            epoch: selects order and augmentation in training.
            start: first step, in [0, len(self)].
            rank: this process, in [0, world).
            world: number of processes; must divide batch_size in training.
        """
        if not 0 <= start <= len(self):
            raise ConfigError(f"start must be in 0..{len(self)}, the steps of an epoch, got {start}")
        if not 0 <= rank < world:
            raise ConfigError(f"rank must be in 0..world-1, got rank {rank} of world {world}")
        if self.train and self.batch_size % world:
            raise ConfigError(f"batch_size must be a multiple of world, got {self.batch_size} over {world}")
        n, share = len(self.images), slice(rank, None, world)
        order_N = torch.randperm(n, generator=stream(self.seed, epoch)) if self.train else torch.arange(n)
        steps = range(start, len(self))
        return self.images.made(partial(self._batch, order_N, epoch, step, share) for step in steps)

    def _batch(self, order_N: Tensor, epoch: int, step: int, share: slice) -> Batch:
        whole_B = order_N[step * self.batch_size : (step + 1) * self.batch_size]
        row_B = whole_B[share]
        if self.augment == "none":
            pixels_BCHW = self.images.pixels(row_B)
        else:
            pixels_BCHW = self._augmented(whole_B, share, stream(self.seed, epoch, step))
        label_N = self.images.label_N
        return self.images.normalise(pixels_BCHW), None if label_N is None else label_N[row_B]

    def _augmented(self, whole_B: Tensor, share: slice, generator: torch.Generator) -> Tensor:
        # Drawn for the whole batch: ranks do not move a crop.
        row_B, n = whole_B[share], len(whole_B)
        if self.augment == "resized-crop-flip":
            box_B4 = random_boxes(self.images.sizes(whole_B), generator)
            flip_B = torch.rand(n, generator=generator) < 0.5
            return flipped(self.images.crops(row_B, box_B4[share]), flip_B[share])
        # Drawn for both kinds alike: flips do not move a crop either.
        corner_2B = torch.randint(0, 2 * self.pad + 1, (2, n), generator=generator)
        flip_B = torch.rand(n, generator=generator) < 0.5
        if self.augment == "crop":
            flip_B.fill_(False)
        top_B, left_B = corner_2B[:, share]
        return crop_flip(self.images.pixels(row_B), top_B, left_B, flip_B[share], self.pad)

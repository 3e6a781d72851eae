"""Any loader -> checked batches ``(x_BCHW, label_B or None)``, with a progress bar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch import Tensor

from cofire.data.images import Batch
from cofire.errors import DataError
from cofire.progress import progress

AnyLoader = Iterable[Any]
"""Yields (x_BCHW, label_B), (x_BCHW, None), (x_BCHW,) or x_BCHW: a `Loader`, a torch DataLoader, a list."""


def feed(loader: AnyLoader, text: str = "") -> Iterator[Batch]:
    """The batches of ``loader`` as ``(x_BCHW, label_B or None)``; with ``text``, a bar on a terminal.

    Raises:
        DataError: a batch is not float images (B, C, H, W), labels do not fit, or there is no batch at all.
    """
    with progress(text) as bar:
        task = bar.add_task(text, total=num_batches(loader))
        empty = True
        for batch in loader:
            empty = False
            yield checked(batch)
            bar.advance(task)
    if empty:
        raise DataError("the loader gave no batch: it is empty, or was used up by an earlier pass")


def first_images(loader: AnyLoader, images: int) -> list[Tensor]:
    """The first images of a loader, batch by batch; all of one size."""
    found: list[Tensor] = []
    for x_BCHW, _ in feed(loader):
        found.append(x_BCHW[: images - sum(map(len, found))])
        if sum(map(len, found)) >= images:
            break
    if len({batch.shape[1:] for batch in found}) > 1:
        raise DataError("images must be of one size here, got several")
    return found


def num_batches(loader: AnyLoader) -> int | None:
    """How many batches a loader says it has; None if it does not know, like a DataLoader on an endless set."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None


def checked(batch: Any) -> Batch:
    """One batch of any loader as ``(x_BCHW, label_B or None)``."""
    parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    x = parts[0] if parts else None
    labels = parts[1] if len(parts) > 1 else None
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point() or len(x) == 0:
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise DataError(f"a batch must begin with float images (B, C, H, W), got {got}")
    if labels is None:
        return x, None
    if not isinstance(labels, Tensor) or labels.shape != x.shape[:1] or labels.is_floating_point():
        got = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise DataError(f"labels must be an integer tensor ({len(x)},), got {got}")
    return x, labels.long()

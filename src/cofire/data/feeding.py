"""Any loader -> checked batches ``(x_BCHW, label_B or None)``, with a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from torch import Tensor

from cofire.errors import DataError
from cofire.progress import progress

AnyLoader = Iterable[Any]
"""Yields (x_BCHW, label_B), (x_BCHW, None), (x_BCHW,) or x_BCHW: a `Loader`, a torch DataLoader, a list.

Where the caller brings a loss or a metric, (x_BCHW, target) with targets of any form."""


def feed(loader: AnyLoader, text: str = "", *, labels: bool = True) -> Iterator[tuple[Tensor, Any]]:
    """The batches of ``loader`` as ``(x_BCHW, label_B or None)``; with ``text``, a bar on a terminal.

    Args:
        labels: whether targets must be labels; else they may be anything.

    Raises:
        DataError: a batch is not float images (B, C, H, W), labels do not fit, or there is no batch at all.
    """
    with progress(text) as bar:
        task = bar.add_task(text, total=num_batches(loader))
        empty = True
        for batch in loader:
            empty = False
            yield checked(batch, labels)
            bar.advance(task)
    if empty:
        raise DataError("the loader gave no batch: it is empty, or was used up by an earlier pass")


def first_images(loader: AnyLoader, images: int) -> list[Tensor]:
    """The first images of a loader, batch by batch; all of one size."""
    found: list[Tensor] = []
    for x_BCHW, _ in feed(loader, labels=False):
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


def checked(batch: Any, labelled: bool = True) -> tuple[Tensor, Any]:
    """One batch of any loader as ``(x_BCHW, label_B or None)``; if not ``labelled``, its targets as they are."""
    parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    x = parts[0] if parts else None
    labels = parts[1] if len(parts) > 1 else None
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point() or len(x) == 0:
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise DataError(f"a batch must begin with float images (B, C, H, W), got {got}")
    if labels is None or not labelled:
        return x, labels
    if not isinstance(labels, Tensor) or labels.shape != x.shape[:1] or labels.is_floating_point():
        got = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise DataError(f"labels must be an integer tensor ({len(x)},), got {got}")
    return x, labels.long()


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Targets of any form with each tensor changed: tensors, tuples, lists and dicts of them."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(part, change) for key, part in value.items()}
    return type(value)(map_tensors(part, change) for part in value) if isinstance(value, (tuple, list)) else value

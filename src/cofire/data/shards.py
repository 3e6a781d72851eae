"""Encoded pictures in a few large files: written once, mapped into memory, read one by one, each checked.

A shard is two files: ``00000.pictures``, the pictures one after the other, and then ``00000.safetensors``, where each
of them ends, its checksum, label, height and width. Whoever finds the second has the first.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cofire.errors import FileError
from cofire.files.atomic import remove, write_atomically
from cofire.files.tensors import read_tensors, write_tensors

_FORMAT = "cofire-shard/1"
_COLUMNS = ("end", "crc32", "label", "size")


class Picture(NamedTuple):
    """One encoded picture: its file's bytes, its class, and its height and width."""

    content: bytes
    label: int
    size: tuple[int, int]


def write_shard(folder: Path, number: int, pictures: Sequence[Picture], header: dict[str, Any]) -> None:
    """Both files of a shard, each whole or not there; an older shard of this number is replaced.

    Args:
        header: JSON values that say what the shard was made of; `read_header` gives them back.
    """
    index, content = _paths(folder, number)
    remove(index)
    write_atomically(content, b"".join(picture.content for picture in pictures))
    tensors = {
        "end": torch.tensor([len(picture.content) for picture in pictures], dtype=torch.int64).cumsum(0),
        "crc32": torch.tensor([zlib.crc32(picture.content) for picture in pictures], dtype=torch.int64),
        "label": torch.tensor([picture.label for picture in pictures], dtype=torch.int64),
        "size": torch.tensor([picture.size for picture in pictures], dtype=torch.int64).view(-1, 2),
    }
    write_tensors(index, tensors, {"format": _FORMAT, **header})


def read_header(folder: Path, number: int) -> dict[str, Any]:
    """What `write_shard` was told about a shard.

    Raises:
        FileError: there is no such shard, or its index is damaged.
    """
    return read_tensors(_paths(folder, number)[0])[1]


def remove_shards(folder: Path, first: int) -> None:
    """Remove the shards from number ``first`` on, and what a killed writer left of one."""
    for path in sorted(folder.glob("[0-9]*"), reverse=True):  # of each shard the index before the pictures
        if int(path.stem) >= first:
            remove(path)


@final
class Shards:
    """The pictures in some shards of a folder, one shard after the other, read lazily.

    Args:
        folder: where they lie.
        numbers: which of them, at least one.

    Attributes:
        label_N: int64, (N,).
        size_N2: height and width of each picture, int64, (N, 2).

    Raises:
        FileError: one is missing, truncated or has a damaged index. Damaged pictures are found when they are read.
    """

    def __init__(self, folder: Path, numbers: range) -> None:
        parts = [_read_index(folder, number) for number in numbers]
        self._paths = [_paths(folder, number)[1] for number in numbers]
        self._files: list[NDArray[np.uint8]] = [
            np.memmap(path, np.uint8, "r") if os.path.getsize(path) else np.empty(0, np.uint8) for path in self._paths
        ]
        self._ends = [part["end"] for part in parts]
        self._first_S = torch.tensor([0, *map(len, self._ends)]).cumsum(0)
        self._crc_N = torch.cat([part["crc32"] for part in parts])
        self.label_N = torch.cat([part["label"] for part in parts])
        self.size_N2 = torch.cat([part["size"] for part in parts])

    def __len__(self) -> int:
        return len(self.label_N)

    def read(self, row: int) -> bytes:
        """The bytes of picture ``row``, in [0, N).

        Raises:
            FileError: they are not those that were written.
        """
        shard = int(torch.searchsorted(self._first_S, row, right=True)) - 1
        place = row - int(self._first_S[shard])
        ends = self._ends[shard]
        content = self._files[shard][int(ends[place - 1]) if place else 0 : int(ends[place])].tobytes()
        if zlib.crc32(content) != int(self._crc_N[row]):
            raise FileError(f"{self._paths[shard]} is damaged: the checksum of its picture {place} is wrong")
        return content


def _read_index(folder: Path, number: int) -> dict[str, Tensor]:
    index, content = _paths(folder, number)
    tensors, header = read_tensors(index)
    if header.get("format") != _FORMAT or any(name not in tensors for name in _COLUMNS):
        raise FileError(f"{index} must have format {_FORMAT!r}, got {header.get('format')!r}")
    if not content.is_file():
        raise FileError(f"{content} does not exist")
    ends, size = tensors["end"], content.stat().st_size
    if (expected := int(ends[-1]) if len(ends) else 0) != size:
        raise FileError(f"{content} is truncated or damaged: it must have {expected} bytes, got {size}")
    return tensors


def _paths(folder: Path, number: int) -> tuple[Path, Path]:
    stem = folder / f"{number:05}"
    return stem.with_suffix(".safetensors"), stem.with_suffix(".pictures")

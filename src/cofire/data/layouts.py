"""ImageNet, or a set laid out like it -> shards of pictures, none larger than training needs."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.progress import Progress

from cofire.data.decoding import class_names, open_rgb, resized
from cofire.data.folders import check_same_classes, class_folders
from cofire.data.shards import Picture, Shards, read_header, remove_shards, write_shard
from cofire.data.stored import decoders
from cofire.errors import ConfigError, DataError, FileError
from cofire.extras import require
from cofire.files.atomic import read_json, remove, write_json
from cofire.files.lock import alone_in
from cofire.progress import progress

logger = logging.getLogger("cofire")

SUMMARY = "set.json"  # written last: whoever finds it has the set
_FORMAT = "cofire-set/1"
_PARTS = ("val", "train")
_PER_SHARD = 4096
_AT_ONCE = 256  # pictures in memory as they came
_QUALITY = 95


class _Origin(NamedTuple):
    """A picture before it is brought to its size; ``name`` is what errors call it."""

    name: str
    content: Path | bytes
    label: int


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """``n`` pictures that become one shard; ``key`` tells them from any others."""

    key: str
    n: int
    read: Callable[[], Iterator[_Origin]]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Training or validation pictures; ``classes`` is empty where labels are plain numbers, below ``labels``."""

    classes: tuple[str, ...]
    labels: int
    chunks: tuple[_Chunk, ...]


def prepare(
    origin: str | Path, home: Path, *, shorter: int = 256, unreadable: Literal["error", "skip"] = "error"
) -> None:
    """Fill ``home`` with the shards of a set and, last, ``set.json``. Interrupted and called again, it goes on.

    A picture whose shorter side is above ``shorter`` is resized and stored as JPEG; any other is kept byte for byte.

    Args:
        origin: a folder with ``train/<class>/*`` and ``val/<class>/*``, or with Parquet files (columns
            ``image{bytes, path}`` and ``label``) below paths that begin with ``train`` and ``val``.
        home: the set's folder.
        shorter: side of the stored pictures, at least 1.
        unreadable: ``skip`` leaves damaged pictures out, with a warning that counts and names them.

    Raises:
        DataError: a picture cannot be read, or the parts have different classes.
        FileError: the layout is another, a Parquet file is damaged, the disk is full, another process is in ``home``.
    """
    with alone_in(home):
        _prepare(origin, home, shorter, unreadable)


def _prepare(origin: str | Path, home: Path, shorter: int, unreadable: Literal["error", "skip"]) -> None:
    if shorter < 1:
        raise ConfigError(f"shorter side of stored pictures must be at least 1, got {shorter}")
    if unreadable not in ("error", "skip"):
        raise ConfigError(f"unreadable must be 'error' or 'skip', got {unreadable!r}")
    parts = {name: _part(Path(origin).expanduser(), name) for name in _PARTS}
    classes = _classes(parts)
    skipped: list[str] = []
    with progress("preparing") as bar:
        task = bar.add_task("preparing", total=sum(chunk.n for part in parts.values() for chunk in part.chunks))
        for name, part in parts.items():
            for number, chunk in enumerate(part.chunks):
                left_out = _left_out_before(home / name, number, chunk.key, shorter)
                if left_out is None or (left_out and unreadable == "error"):
                    remove(home / SUMMARY)
                    left_out = _write_chunk(home / name, number, chunk, shorter, unreadable)
                skipped += left_out
                bar.advance(task, chunk.n)
            remove_shards(home / name, len(part.chunks))
    if skipped:
        logger.warning("%d pictures cannot be read and are left out: %s", len(skipped), skipped)
    shards = {name: len(part.chunks) for name, part in parts.items()}
    summary = {"format": _FORMAT, "classes": list(classes), "shorter": shorter, "shards": shards, "left_out": skipped}
    write_json(home / SUMMARY, summary)


def open_prepared(home: Path) -> tuple[Shards, Shards, tuple[str, ...]]:
    """What `prepare` wrote: training and validation pictures, and the classes.

    Raises:
        FileError: a file is missing or damaged.
    """
    summary = read_json(home / SUMMARY)
    try:
        if summary["format"] != _FORMAT:
            raise FileError(f"{home / SUMMARY} must have format {_FORMAT!r}, got {summary['format']!r}")
        shards, classes = {name: int(summary["shards"][name]) for name in _PARTS}, tuple(summary["classes"])
        if min(shards.values()) < 1:
            raise ValueError(f"shards {shards}")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FileError(f"{home / SUMMARY} must be as `cofire data imagenet` writes it: {error!r}") from error
    return Shards(home / "train", range(shards["train"])), Shards(home / "val", range(shards["val"])), classes


def check_prepared(home: Path) -> None:
    """Read every stored picture and compare checksums.

    Raises:
        FileError: one is wrong.
    """
    *parts, _ = open_prepared(home)
    with progress("checking") as bar:
        task = bar.add_task("checking", total=sum(map(len, parts)))
        for part in parts:
            _check(part, bar, task)


def _check(store: Shards, bar: Progress | None = None, task: Any = None) -> None:
    for row in range(len(store)):
        store.read(row)
        if bar is not None:
            bar.advance(task)


def _left_out_before(folder: Path, number: int, key: str, shorter: int) -> list[str] | None:
    """Pictures that were left out of a shard which is there, whole, and made of the same; None where it is not."""
    try:
        header = read_header(folder, number)
        if (header.get("key"), header.get("shorter")) != (key, shorter):
            return None
        _check(Shards(folder, range(number, number + 1)))
        return [str(name) for name in header["left_out"]]
    except FileError:
        return None


def _write_chunk(folder: Path, number: int, chunk: _Chunk, shorter: int, unreadable: str) -> list[str]:
    """Write a shard; returns the names of the pictures that were left out."""
    pictures: list[Picture] = []
    left_out: list[str] = []

    def bring(origin: _Origin) -> Picture | Exception:
        try:
            return _brought(origin, shorter)
        except Exception as error:  # each of Pillow's decoders has its own
            return error

    rows = chunk.read()
    while group := list(islice(rows, _AT_ONCE)):
        for origin, found in zip(group, decoders().map(bring, group), strict=True):
            if isinstance(found, Picture):
                pictures.append(found)
            elif unreadable == "skip":
                left_out.append(origin.name)
            else:
                raise DataError(
                    f"picture {origin.name} cannot be read: {found}; what was prepared before it is kept, so mend "
                    "or remove it and call again, or leave such pictures out: unreadable='skip'"
                ) from found
    write_shard(folder, number, pictures, {"key": chunk.key, "shorter": shorter, "left_out": left_out})
    return left_out


def _brought(origin: _Origin, shorter: int) -> Picture:
    image = open_rgb(origin.content)
    if min(image.size) <= shorter:
        content = origin.content if isinstance(origin.content, bytes) else origin.content.read_bytes()
    else:
        image, buffer = resized(image, shorter), io.BytesIO()
        image.save(buffer, "JPEG", quality=_QUALITY)
        content = buffer.getvalue()
    return Picture(content, origin.label, (image.height, image.width))


def _classes(parts: dict[str, _Part]) -> tuple[str, ...]:
    named = {name: part.classes for name, part in parts.items() if part.classes}
    labels = max(part.labels for part in parts.values())
    if not named:
        return tuple(str(label) for label in range(labels))
    check_same_classes(named)
    classes = next(iter(named.values()))
    if labels > len(classes):
        raise DataError(f"labels must be in 0..{len(classes) - 1}, one per class, got {labels - 1}")
    return classes


def _part(origin: Path, name: str) -> _Part:
    files = sorted(path for path in origin.rglob("*.parquet") if _belongs(path.relative_to(origin), name))
    if files:
        part = _parquet_part(files, origin)
        if not any(chunk.n for chunk in part.chunks):
            raise DataError(f"{origin}: the Parquet files of {name} have no rows")
        return part
    if (origin / name).is_dir():
        return _folder_part(origin / name)
    raise FileError(
        f"{origin} must hold {name}/ with one folder per class, or Parquet files below paths that begin with {name}; "
        "found neither"
    )


def _belongs(path: Path, name: str) -> bool:
    return any(part.startswith(name) for part in path.parts)


def _folder_part(root: Path) -> _Part:
    groups = class_folders(root)
    files = [(file, label) for label, found in enumerate(groups.values()) for file in found]

    def chunk(rows: Sequence[tuple[Path, int]]) -> _Chunk:
        key = _key((file.relative_to(root).as_posix(), label, file.stat().st_size) for file, label in rows)
        return _Chunk(key=key, n=len(rows), read=lambda: (_Origin(str(file), file, label) for file, label in rows))

    chunks = tuple(chunk(files[start : start + _PER_SHARD]) for start in range(0, len(files), _PER_SHARD))
    return _Part(classes=tuple(groups), labels=len(groups), chunks=chunks)


def _parquet_part(files: list[Path], origin: Path) -> _Part:
    parquet = require("pyarrow.parquet", package="pyarrow", extra="data")
    named: dict[str, Sequence[str]] = {}
    chunks: list[_Chunk] = []
    largest = -1
    for path in files:
        try:
            file = parquet.ParquetFile(path)
            named[str(path)] = class_names(file.schema_arrow)
            labels = file.read(columns=["label"]).column("label").to_pylist()
            largest = max(largest, *map(int, labels)) if labels else largest
            groups = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        except Exception as error:  # damaged bytes, missing columns, nulls: pyarrow's errors, KeyError, TypeError
            raise _not_parquet(path, error) from error
        if labels and min(labels) < 0:
            raise DataError(f"{path}: labels must be at least 0, got {min(labels)}")
        chunks += _row_chunks(path, path.relative_to(origin).as_posix(), groups)
    check_same_classes(named)
    return _Part(classes=tuple(named[str(files[0])]), labels=largest + 1, chunks=tuple(chunks))


def _row_chunks(path: Path, name: str, rows: Sequence[int]) -> Iterator[_Chunk]:
    """The row groups of a Parquet file, as many together as make a shard."""
    start = 0
    while start < len(rows):
        end, n = start + 1, rows[start]
        while end < len(rows) and n + rows[end] <= _PER_SHARD:
            n, end = n + rows[end], end + 1
        key = _key([(name, path.stat().st_size, start, end)])
        groups = tuple(range(start, end))
        yield _Chunk(key=key, n=n, read=lambda groups=groups: _row_pictures(path, groups))  # type: ignore[misc]
        start = end


def _row_pictures(path: Path, groups: Sequence[int]) -> Iterator[_Origin]:
    parquet = require("pyarrow.parquet", package="pyarrow", extra="data")
    try:
        batches = parquet.ParquetFile(path).iter_batches(_AT_ONCE, row_groups=groups, columns=["image", "label"])
        for batch in batches:
            for n, row in enumerate(batch.to_pylist()):
                image = row["image"]
                yield _Origin(f"{image['path'] or n} of {path}", bytes(image["bytes"]), int(row["label"]))
    except Exception as error:
        raise _not_parquet(path, error) from error


def _not_parquet(path: Path, error: Exception) -> FileError:
    return FileError(f"{path} must be Parquet with columns image{{bytes, path}} and label: {error}")


def _key(values: Iterable[Any]) -> str:
    return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()

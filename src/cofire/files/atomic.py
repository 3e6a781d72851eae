"""Files that are whole or not there."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cofire.errors import FileError
from cofire.files.lock import is_at


def write_atomically(path: Path, content: bytes) -> None:
    """Fill a temporary file beside ``path``, flush it to disk, and rename it.

    The temporary file has a fixed name: what a killed writer left behind is taken over by the next one, and who writes
    the same file at the same time waits.

    Raises:
        FileError: the disk is full, the folder read-only, ...; ``path`` is as it was before.
    """
    temporary = path.parent / f".{path.name}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _own(temporary) as handle:
            temporary.write_bytes(content)
            os.fsync(handle)
            os.replace(temporary, path)
            _sync_folder(path.parent)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error}; it was left as it was") from error


def remove(path: Path) -> None:
    """Remove a file if it is there.

    Raises:
        FileError: the folder is read-only, ...
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"{path} cannot be removed: {error}") from error


def write_text(path: Path, text: str) -> None:
    """``text`` as UTF-8, atomically."""
    write_atomically(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """``value`` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        FileError: missing, not JSON, or nested too deep.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path} is not readable as JSON: {error}") from error


def read_table(path: Path, *keys: str) -> dict[str, Any]:
    """The table in a JSON file, which must have these keys.

    Raises:
        FileError: missing or damaged.
    """
    table = read_json(path)
    if not isinstance(table, dict) or not table.keys() >= set(keys):
        raise FileError(f"{path} must be a table with {', '.join(map(repr, keys))}; it is damaged")
    return table


@contextmanager
def _own(temporary: Path) -> Iterator[int]:
    """A handle on the temporary file, which no other process or thread writes inside the block; it is gone after."""
    while True:
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with suppress(OSError):  # a file system without locks: as good as it gets there
                fcntl.flock(handle, fcntl.LOCK_EX)
            if is_at(temporary, handle):
                try:
                    yield handle
                finally:
                    if is_at(temporary, handle):  # else it has its name by now, and the next writer may have begun
                        temporary.unlink()
                return
        finally:
            os.close(handle)


def _sync_folder(folder: Path) -> None:
    """A rename is on disk only once its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

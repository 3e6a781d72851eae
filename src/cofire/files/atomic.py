"""Files that are whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from cofire.errors import FileError


def write_atomically(path: Path, content: bytes) -> None:
    """Fill a temporary file beside ``path``, flush it to disk, and rename it.

    The temporary file has a fixed name: what a killed writer left behind is taken over by the next one.

    Raises:
        FileError: the disk is full, the folder read-only, ...; ``path`` is as it was before.
    """
    temporary = path.parent / f".{path.name}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(content)
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
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


def _sync_folder(folder: Path) -> None:
    """A rename is on disk only once its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

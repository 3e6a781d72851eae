"""Files that are whole or not there: atomic writes, and tensor files with a checksum. Nothing here can run code.

A tensor file is safetensors; its header carries our JSON and a SHA-256 of that JSON and the tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from cofire.errors import FileError

_HEADER = "cofire"
MODEL_FORMAT = "cofire-model/1"


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
        FileError: missing or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise FileError(f"{path} is not readable as JSON: {error}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """A tensor file, atomically."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    unshared = {name: tensor.clone() for name, tensor in plain.items()}  # safetensors refuses shared memory
    text = json.dumps({**header, "sha256": _digest(unshared, header)})
    # Not safetensors' save_file: it has a temporary file of its own, which a killed process would leave behind.
    write_atomically(path, save(unshared, metadata={_HEADER: text}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of a file written by :func:`write_tensors`.

    Raises:
        FileError: missing, truncated, damaged or not ours.
    """
    if not path.is_file():
        raise FileError(f"{path} does not exist")
    try:
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get(_HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except Exception as error:
        raise FileError(f"{path} is truncated or not a safetensors file: {error}") from error
    if text is None:
        raise FileError(f"{path} was not written by cofire: its header has no {_HEADER!r} entry")
    try:
        header = json.loads(text)
        digest = header.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path} has a damaged header: {error!r}") from error
    if digest != _digest(tensors, header):
        raise FileError(f"{path} is damaged: its checksum is wrong")
    return tensors, header


def write_model(folder: str | Path, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> Path:
    """A model folder: ``model.safetensors`` and ``config.json``; an older model there is replaced."""
    folder = Path(folder)
    # Weights first, then the config that vouches for them: whoever finds a config finds its weights.
    write_tensors(folder / "model.safetensors", tensors, {"format": MODEL_FORMAT})
    write_json(folder / "config.json", {"format": MODEL_FORMAT, **description})
    return folder


def _digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(header).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """A rename is on disk only once its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

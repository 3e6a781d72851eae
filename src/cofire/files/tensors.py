"""Tensor files with a checksum, and the model folders made of them. Nothing here can run code.

A tensor file is safetensors; its header carries our JSON and a SHA-256 of that JSON and the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from cofire.errors import FileError
from cofire.files.atomic import write_atomically, write_json

_HEADER = "cofire"
MODEL_FORMAT = "cofire-model/1"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """A tensor file, atomically.

    Raises:
        FileError: a value is no tensor.
    """
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise FileError(
                f"{name!r} of the model's state must be a tensor to be saved, got {type(value).__name__}; modules that "
                "torch.ao quantised keep packed weights: save the model in floats, and use cofire.quantize"
            )
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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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

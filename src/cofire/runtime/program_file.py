"""A program's file: ops as tables and weights as tensors, written whole and read strictly.

``docs/program.md`` is the definition.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from cofire.errors import ConfigError, FileError
from cofire.files.atomic import write_atomically
from cofire.files.strict import structure
from cofire.runtime.program import KINDS, Conv, Head, Op, Program, Rescale, Shape, kind_of

VERSION = 2
_OLDEST = 1
_KEY = "cofire.program"
_COMMON = {field.name for field in fields(Op)}


def write(program: Program, path: str | Path) -> Path:
    """Write a program file, whole or not at all."""
    path = Path(path)
    write_atomically(path, to_bytes(program))
    return path


def to_bytes(program: Program) -> bytes:
    """The content of the program's file."""
    tensors: dict[str, Tensor] = {}
    ops = [_op_table(op, str(number), tensors) for number, op in enumerate(program.ops)]
    data = b"".join(tensor.numpy().astype("<f4", copy=False).data for tensor in tensors.values())
    table = {
        "version": VERSION,
        "input": program.input,
        "output": program.output,
        "output_shape": program.output_shape,
        "buffers": program.buffers,
        "groups": [vars(group) for group in program.groups],
        "threshold": program.threshold,
        "ops": ops,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(table, allow_nan=False)}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def read(path: str | Path) -> Program:
    """The program in a file.

    Raises:
        FileError: missing, truncated, damaged, of a newer version, or not a program.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error}") from error
    table, data = _header(path, content)
    version = table.pop("version")
    if hashlib.sha256(data).hexdigest() != table.pop("sha256", None):
        raise FileError(f"{path} is damaged: its checksum is wrong; compile the model again")
    try:
        tensors = _tensors(content)
        ops = tuple(_op(op, tensors, version) for op in table.pop("ops"))
        program = structure(Program, {**table, "ops": ops}, "program")
        _check_gates(program)
    except (safetensors.SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise FileError(f"{path} is damaged: {error}") from error
    if tensors:
        raise FileError(f"{path} is damaged: no op uses its tensors {', '.join(sorted(tensors)[:3])}")
    return program


def _header(path: Path, content: bytes) -> tuple[dict[str, Any], bytes]:
    """The program's table, of a version that can be read, and the file's bytes after the safetensors header."""
    start = 8 + int.from_bytes(content[:8], "little")
    if len(content) < 8 or len(content) < start:
        raise FileError(f"{path} is truncated or not a program file: {len(content)} bytes do not hold its header")
    try:
        header = json.loads(content[8:start])
        table = json.loads(header.pop("__metadata__")[_KEY])
        version = table["version"]
        size = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path} is not a program file: its header has no readable {_KEY!r} entry") from error
    if version not in range(_OLDEST, VERSION + 1):
        raise FileError(
            f"{path} must have a version from {_OLDEST} to {VERSION}, got {version!r}; a newer cofire wrote it: update "
            "this one, or compile the model again"
        )
    if len(content) != start + size:
        raise FileError(f"{path} is truncated or damaged: it must have {start + size} bytes, got {len(content)}")
    return table, content[start:]


def _tensors(content: bytes) -> dict[str, Tensor]:
    tensors = safetensors.torch.load(content)
    others = sorted(name for name, tensor in tensors.items() if tensor.dtype != torch.float32)
    if others:
        raise ConfigError(f"all tensors must be float32, but {others[0]!r} is {tensors[others[0]].dtype}")
    return tensors


def _op_table(op: Op, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The op as JSON values; its weights go into ``tensors`` under names that begin with ``prefix``."""

    def stored(name: str, tensor: Tensor) -> str:
        key = f"{prefix}.{name}"
        tensors[key] = tensor.detach().to("cpu", torch.float32).contiguous()
        return key

    own = {field.name: getattr(op, field.name) for field in fields(op) if field.name not in _COMMON}
    return {
        "kind": kind_of(op),
        "name": op.name,
        "src": op.src,
        "dst": op.dst,
        "attrs": {name: value for name, value in own.items() if not isinstance(value, Tensor) and value is not None},
        "weights": [stored(name, value) for name, value in own.items() if isinstance(value, Tensor)],
        "gate": None
        if op.gate is None
        else {"group": op.gate.group, "head": None if op.gate.head is None else _head_table(op.gate.head, stored)},
    }


def _head_table(head: Head, stored: Any) -> dict[str, Any]:
    return {
        name: stored(f"head.{name}", value) if isinstance(value, Tensor) else value
        for name, value in vars(head).items()
    }


def _op(table: Mapping[str, Any], tensors: dict[str, Tensor], version: int) -> Op:
    """The op of a table; takes its weights out of ``tensors``."""
    keys = {"kind", "name", "src", "dst", "attrs", "weights", "gate"}
    if set(table) != keys or table["kind"] not in KINDS or (version < 2 and table["kind"] == "rescale"):
        raise ConfigError(f"an op must have a known kind and the keys {sorted(keys)}, got {dict(table)!r:.200}")
    cls = KINDS[table["kind"]]
    common = {name: table[name] for name in ("name", "src", "dst")}
    attrs = dict(table["attrs"])
    names = [field.name for field in fields(cls) if field.name not in _COMMON | set(attrs)]
    fewest = len(names) - (cls is Conv)  # its shift may be left out
    if not fewest <= len(table["weights"]) <= (len(names) if version > 1 else fewest):
        raise ConfigError(f"op {table['name']!r}: attrs and weights do not make up {names}")
    weights = {name: tensors.pop(key) for name, key in zip(names, table["weights"], strict=False)}
    gate = table["gate"]
    if gate is not None and gate["head"] is not None:
        gate = {**gate, "head": _head(gate["head"], tensors, version, f"op {table['name']!r}")}
    return structure(cls, {**common, **attrs, **weights, "gate": gate}, f"op {table['name']!r}")


def _head(table: Mapping[str, Any], tensors: dict[str, Tensor], version: int, where: str) -> dict[str, Any]:
    """The head's fields; those that version 1 does not have are left at their defaults."""
    names = [field.name for field in fields(Head) if version > 1 or field.default is MISSING]
    if sorted(table) != sorted(names) or (version == 1 and table["pool"] not in ("max", "avg")):
        raise ConfigError(f"{where}: a head of version {version} must have the keys {names}, got {dict(table)!r:.200}")
    weights = {name: None if table[name] is None else tensors.pop(table[name]) for name in ("weight", "bias")}
    return {**table, **weights}


def _check_gates(program: Program) -> None:
    """What the engine's loader says about them too."""
    scaled = set()
    for op in program.ops:
        if op.gate is not None and op.gate.head is not None:
            wrong = _wrong_with(op.gate.head, program.groups[op.gate.group].filters, op.src[0], program.buffers)
            if wrong:
                raise ConfigError(f"op {op.name!r}: {wrong}")
            scaled |= {op.gate.group} if op.gate.head.scale else set()
        rescaled = isinstance(op, Conv | Rescale) and op.shift is not None
        if rescaled and (op.gate is None or op.gate.group not in scaled):
            raise ConfigError(f"op {op.name!r}: its gate must be of a group whose head has scale, for it is rescaled")


def _wrong_with(head: Head, filters: int, first: int, buffers: tuple[Shape, ...]) -> str:
    source, rows = first if head.src is None else head.src, len(head.weight)
    if source not in range(len(buffers)):
        return f"src of its head must be from 0 to {len(buffers) - 1}, got {source}"
    inputs = buffers[source][0] * (2 if head.pool == "both" else 1)
    shapes = tuple(head.weight.shape), (rows,) if head.bias is None else tuple(head.bias.shape)
    if rows not in (1, filters) or shapes != ((rows, inputs), (rows,)):
        return f"weight and bias of its head must have 1 row or {filters}, of {inputs} and of one, got {shapes}"
    if head.top is not None and (head.top not in range(1, filters + 1) or rows != filters):
        return f"top of its head must be from 1 to {filters}, and null if there is one row for all, got {head.top}"
    return ""

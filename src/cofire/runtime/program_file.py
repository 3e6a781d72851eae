"""A program's file: ops as tables and weights as tensors, written whole and read strictly.

``docs/program.md`` is the definition.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cofire.errors import ConfigError
from cofire.files.atomic import write_atomically
from cofire.files.strict import structure
from cofire.runtime.outline import KEY, check, read_content, read_table
from cofire.runtime.program import KINDS, Head, Op, Program, kind_of

VERSION = 3
_TYPES = {torch.float32: ("F32", "<f4"), torch.int8: ("I8", "i1"), torch.int32: ("I32", "<i4")}
_COMMON = {field.name for field in fields(Op)}


def write(program: Program, path: str | Path) -> Path:
    """Write a program file, whole or not at all."""
    path = Path(path)
    write_atomically(path, to_bytes(program))
    return path


def to_bytes(program: Program) -> bytes:
    """The content of the program's file.

    Raises:
        ConfigError: the threshold or a slope is not a finite number.
    """
    tensors: dict[str, Tensor] = {}
    ops = [_op_table(op, str(number), tensors) for number, op in enumerate(program.ops)]
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))  # bytes last: all begin where they may
    data = b"".join(tensor.numpy().astype(_TYPES[tensor.dtype][1], copy=False).data for tensor in tensors.values())
    table = {
        "version": VERSION,
        "input": program.input,
        "output": program.output,
        "output_shape": program.output_shape,
        "buffers": program.buffers,
        "groups": [vars(group) for group in program.groups],
        "threshold": program.threshold,
        "ops": ops,
        "quants": [vars(quant) for quant in program.quants],
        "sha256": hashlib.sha256(data).hexdigest(),
        "more_outputs": [vars(output) for output in program.more_outputs],
        "structure": program.structure,
        "card": program.card,
    }
    try:
        description = json.dumps(table, allow_nan=False)
    except ValueError as error:
        raise ConfigError("threshold, slopes and numbers of the card must be finite") from error
    except TypeError as error:
        raise ConfigError(f"the card must hold JSON values: {error}") from error
    header: dict[str, Any] = {"__metadata__": {KEY: description}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _TYPES[tensor.dtype][0], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def read(path: str | Path) -> Program:
    """The program in a file.

    Raises:
        FileError: missing, truncated, damaged, of a newer version, or not a program.
    """
    return _program(read_content(Path(path)))


def from_bytes(content: bytes) -> Program:
    """The program of a file's content.

    The native loader judges it: it alone says what a program file is. What it takes is read here without a second look.

    Raises:
        ConfigError: it is not a program.
        CompileError: the native engine was not built.
    """
    check(content)
    return _program(content)


def _program(content: bytes) -> Program:
    table, entries, start = read_table(content)
    tensors = {name: _tensor(entry, content, start) for name, entry in entries.items()}
    ops = tuple(_op(op, tensors) for op in table.pop("ops"))
    del table["version"], table["sha256"]
    return structure(Program, {**table, "ops": ops}, "program")


def _tensor(entry: Mapping[str, Any], content: bytes, start: int) -> Tensor:
    begin, end = entry["data_offsets"]
    dtype, code = next((dtype, code) for dtype, (name, code) in _TYPES.items() if name == entry["dtype"])
    values = np.frombuffer(content, code, (end - begin) // dtype.itemsize, start + begin)
    return torch.from_numpy(values.astype(np.dtype(code).newbyteorder("="))).reshape(entry["shape"])


def _op_table(op: Op, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The op as JSON values; its weights go into ``tensors`` under names that begin with ``prefix``."""

    def stored(name: str, tensor: Tensor) -> str:
        key = f"{prefix}.{name}"
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        tensors[key] = tensor.detach().to("cpu", dtype).contiguous()
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


def _op(table: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Op:
    cls = KINDS[table["kind"]]
    common = {name: table[name] for name in ("name", "src", "dst")}
    attrs = table["attrs"]
    names = [field.name for field in fields(cls) if field.name not in _COMMON | set(attrs)]
    weights = {name: tensors[key] for name, key in zip(names, table["weights"], strict=False)}  # a conv's shift is last
    gate = table["gate"]
    if gate is not None and gate["head"] is not None:
        head = dict(gate["head"])  # without what version 1 does not have, which stays at its defaults
        for name in ("weight", "bias"):
            head[name] = None if head[name] is None else tensors[head[name]]
        gate = {**gate, "head": head}
    return structure(cls, {**common, **attrs, **weights, "gate": gate}, f"op {table['name']!r}")

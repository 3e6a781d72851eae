"""A program: a flat list of ops on numbered buffers, all that the native engine runs, and its file.

``docs/program.md`` is the definition; the fields here bear its names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from cofire.errors import CompileError, ConfigError, FileError
from cofire.files.atomic import write_atomically
from cofire.files.strict import structure

VERSION = 1
_KEY = "cofire.program"

Act = Literal["none", "relu", "relu6", "leaky", "silu", "hardswish", "sigmoid", "hardsigmoid"]
LIFTING: frozenset[Act] = frozenset({"sigmoid", "hardsigmoid"})
"""The activations that do not leave zero at zero."""

Shape: TypeAlias = tuple[int, int, int]
Pair: TypeAlias = tuple[int, int]
Padding: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Head:
    """Decides a group's mask from the first source of the op it stands before; weight (filters, C), bias (filters)."""

    pool: Literal["max", "avg"]
    softmax: bool
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Gate:
    """Of an op's output only the channels in the mask of ``group`` exist; with a head, the mask is decided here."""

    group: int
    head: Head | None


@dataclass(frozen=True, kw_only=True)
class Group:
    """A mask's name and width."""

    name: str
    filters: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Op:
    """What every op has; a subclass adds its attrs and, as tensors, its weights."""

    name: str
    src: tuple[int, ...]
    dst: int
    gate: Gate | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Conv(Op):
    """act(conv(src0) + bias [+ src1]); padding is (top, left, bottom, right)."""

    kernel: Pair
    stride: Pair
    padding: Padding
    dilation: Pair
    groups: int
    residual: bool
    act: Act
    slope: float
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Affine(Op):
    """act(src0 * scale + shift), per channel; with ``lift`` all channels are live afterwards."""

    lift: bool
    act: Act
    slope: float
    scale: Tensor
    shift: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Activation(Op):
    """act(src0)."""

    act: Act
    slope: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Add(Op):
    """act(src0 + src1)."""

    act: Act
    slope: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Mul(Op):
    """act(src0 * src1)."""

    act: Act
    slope: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Cat(Op):
    """The channels of all sources, one after the other."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Move(Op):
    """dst[c, y, x] = src0[channels[c], y * stride + offset, x * stride + offset]; 0 outside and for channel -1."""

    channels: tuple[int, ...]
    stride: Pair
    offset: Pair


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool(Op):
    """Maximum or mean over windows."""

    op: Literal["max", "avg"]
    kernel: Pair
    stride: Pair
    padding: Padding
    dilation: Pair
    include_pad: bool
    adaptive: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Flatten(Op):
    """(C, H, W) -> (C*H*W, 1, 1)."""


KINDS: dict[str, type[Op]] = {
    "conv": Conv,
    "affine": Affine,
    "act": Activation,
    "add": Add,
    "mul": Mul,
    "cat": Cat,
    "move": Move,
    "pool": Pool,
    "flatten": Flatten,
}
_KIND_OF = {cls: kind for kind, cls in KINDS.items()}
_COMMON = {field.name for field in fields(Op)}


def kind_of(op: Op) -> str:
    """The op's kind as files spell it."""
    return _KIND_OF[type(op)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """Ops in order of execution, and the buffers they work on."""

    input: int
    output: int
    output_shape: tuple[int, ...]
    buffers: tuple[Shape, ...]
    groups: tuple[Group, ...]
    threshold: float
    ops: tuple[Op, ...]

    def describe(self) -> dict[str, Any]:
        """Shapes, groups and ops as JSON values, without weights."""
        return {
            "input_shape": list(self.buffers[self.input]),
            "output_shape": list(self.output_shape),
            "groups": {group.name: group.filters for group in self.groups},
            "threshold": self.threshold,
            "ops": [
                {"kind": kind_of(op), "name": op.name, "shape": list(self.buffers[op.dst]), "gate": self._gate(op)}
                for op in self.ops
            ],
        }

    def __rich__(self) -> Table:
        described = self.describe()
        shapes = " -> ".join("x".join(map(str, described[key])) for key in ("input_shape", "output_shape"))
        table = Table(title=f"program: {shapes}, {len(self.ops)} ops, {len(self.groups)} gates", title_justify="left")
        for column in ("kind", "name", "shape", "gate"):
            table.add_column(column)
        for op in described["ops"]:
            table.add_row(op["kind"], op["name"], "x".join(map(str, op["shape"])), op["gate"] or "")
        return table

    def _gate(self, op: Op) -> str | None:
        return None if op.gate is None else self.groups[op.gate.group].name


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
    try:
        text = json.dumps(table, allow_nan=False)
    except ValueError as error:
        raise ConfigError("threshold and slopes must be finite numbers") from error
    header: dict[str, Any] = {"__metadata__": {_KEY: text}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + data


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
    try:
        return from_bytes(content)
    except ConfigError as error:
        raise FileError(f"{path} is not a program that this cofire can run: {error}") from error


def from_bytes(content: bytes) -> Program:
    """The program of a file's content.

    The native loader judges it: it alone says what a program file is. What it takes is read here without a second look.

    Raises:
        ConfigError: it is not a program.
        CompileError: the native engine was not built.
    """
    try:
        native().check(content)
    except RuntimeError as error:
        raise ConfigError(str(error)) from error
    start = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:start])
    table = json.loads(entries.pop("__metadata__")[_KEY])
    tensors = {name: _tensor(entry, content, start) for name, entry in entries.items()}
    ops = tuple(_op(op, tensors) for op in table.pop("ops"))
    del table["version"], table["sha256"]
    return structure(Program, {**table, "ops": ops}, "program")


def native() -> Any:
    """The compiled module.

    Raises:
        CompileError: it was not built.
    """
    try:
        from cofire.runtime import _native
    except ImportError as error:
        raise CompileError(
            "the native engine was not built: install a C++ compiler (gcc 12 or newer, clang 15 or newer) and the "
            "Python headers, then install cofire again"
        ) from error
    return _native


def _tensor(entry: Mapping[str, Any], content: bytes, start: int) -> Tensor:
    begin, end = entry["data_offsets"]
    values = np.frombuffer(content, "<f4", (end - begin) // 4, start + begin)
    return torch.from_numpy(values.astype(np.float32)).reshape(entry["shape"])


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
        "attrs": {name: value for name, value in own.items() if not isinstance(value, Tensor)},
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
    weights = {name: tensors[key] for name, key in zip(names, table["weights"], strict=True)}
    gate = table["gate"]
    if gate is not None and gate["head"] is not None:
        head = dict(gate["head"])
        for name in ("weight", "bias"):
            head[name] = None if head[name] is None else tensors[head[name]]
        gate = {**gate, "head": head}
    return structure(cls, {**common, **attrs, **weights, "gate": gate}, f"op {table['name']!r}")

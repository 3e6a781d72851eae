"""A program: a flat list of ops on numbered buffers, all that the native engine runs, and its file.

``docs/program.md`` is the definition; the fields here bear its names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

import safetensors.torch
import torch
from rich.table import Table
from torch import Tensor

from cofire.errors import ConfigError, FileError
from cofire.files.atomic import write_atomically
from cofire.files.strict import structure

VERSION = 2
_OLDEST = 1
_KEY = "cofire.program"

Act = Literal["none", "relu", "relu6", "leaky", "silu", "hardswish", "sigmoid", "hardsigmoid"]
LIFTING: frozenset[Act] = frozenset({"sigmoid", "hardsigmoid"})
"""The activations that do not leave zero at zero."""

Shape: TypeAlias = tuple[int, int, int]
Pair: TypeAlias = tuple[int, int]
Padding: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Head:
    """Decides a group's mask, for each image, right before the op it stands on.

    logits = weight . softmax(pooled) + bias, where ``pooled`` is what ``pool`` makes of a buffer over space.
    """

    pool: Literal["max", "avg", "abs", "both"]
    """Maximum, mean, or mean of magnitudes, (C); ``both`` is all maxima, then all means, (2C)."""
    softmax: bool
    """Over all that was pooled."""
    weight: Tensor
    """(filters, C), with ``both`` (filters, 2C); or one such row, whose logit is that of every filter."""
    bias: Tensor | None
    """As many as ``weight`` has rows."""
    top: int | None = None
    """This many filters are on, those with the largest logits; default: those with a logit above the threshold."""
    scale: bool = False
    """The group's filters have factors, max(logit, 0), for the ops that use them."""
    src: int | None = None
    """The buffer that is pooled; default: the op's first source."""


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
    """act(conv(src0) + bias [+ src1]); padding is (top, left, bottom, right).

    With a ``shift``: act(factor * (conv(src0) + bias) + shift [+ src1]), by the factors of its gate's group.
    """

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
    shift: Tensor | None = None


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


@dataclass(frozen=True, kw_only=True, eq=False)
class Rescale(Op):
    """act(src0 * factor + shift), per channel, by the factors of its gate's group."""

    act: Act
    slope: float
    shift: Tensor


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
    "rescale": Rescale,
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

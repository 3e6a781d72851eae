"""A program file as the engine's caller needs it: shapes, groups, names of ops; no weights, and so no PyTorch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cofire.errors import CompileError, ConfigError, FileError

KEY = "cofire.program"
"""Of the safetensors metadata: where the program's table stands."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What stands in a program file beside the weights."""

    input_shape: tuple[int, int, int]
    output_shapes: tuple[tuple[int, ...], ...]
    structure: Any
    """How the outputs are arranged (``docs/program.md``)."""
    card: dict[str, Any]
    groups: dict[str, int]
    """Group -> its filters."""
    threshold: float
    ops: tuple[str, ...]
    """Names, in order of execution."""
    counted: dict[int, str]
    """Number of an op whose MACs count -> its name: convs and linear layers."""
    precisions: tuple[tuple[str, str], ...]
    """Of each op ``int8`` or ``float32``; and, in a quantised program, why it is the latter."""


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


def read_content(path: Path) -> bytes:
    """The content of a program file, which the native loader has judged: it alone says what a program file is.

    Raises:
        FileError: missing, truncated, damaged, of a newer version, or not a program.
    """
    if path.is_dir():
        raise FileError(f"{path} is a folder, and a program is a file; of a run: cofire compile {path} -o NAME.cofire")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error}") from error
    try:
        check(content)
    except ConfigError as error:
        raise FileError(f"{path} is not a program that this cofire can run: {error}") from error
    return content


def check(content: bytes) -> None:
    """Raise ConfigError unless the bytes are those of a program file."""
    try:
        native().check(content)
    except RuntimeError as error:
        raise ConfigError(str(error)) from error


def outline(content: bytes) -> Outline:
    """What a program file that was checked says of itself."""
    table = read_table(content)[0]
    return Outline(
        input_shape=tuple(table["buffers"][table["input"]]),
        output_shapes=(
            tuple(table["output_shape"]),
            *(tuple(output["shape"]) for output in table.get("more_outputs", ())),  # not before version 3
        ),
        structure=table.get("structure"),
        card=table.get("card", {}),
        groups={group["name"]: group["filters"] for group in table["groups"]},
        threshold=table["threshold"],
        ops=tuple(op["name"] for op in table["ops"]),
        counted={
            number: op["name"] for number, op in enumerate(table["ops"]) if op["kind"] in ("conv", "deconv", "conv8")
        },
        precisions=_precisions(table),
    )


def _precisions(table: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    u8 = {quant["buffer"] for quant in table.get("quants", ())}  # which versions 1 and 2 do not have
    is_int8 = [bool(u8 & {*op["src"], op["dst"]}) for op in table["ops"]]
    return tuple(
        ("int8", "") if is_one else ("float32", _why_float32(op) if u8 else "")
        for is_one, op in zip(is_int8, table["ops"], strict=True)
    )


def _why_float32(op: dict[str, Any]) -> str:
    if op["kind"] == "conv":
        if len(op["weights"]) > 2:
            return "its filters are rescaled"
        act = op["attrs"]["act"]
        return "as asked" if act in ("none", "relu", "relu6") else f"activation {act}"
    return "between float32" if op["kind"] in ("pool", "move", "cat", "flatten") else f"{op['kind']} has no int8 form"


def arranged(structure: Any, outputs: list[Any]) -> Any:
    """The outputs as the model gives them."""
    if structure is None:
        return outputs[0]
    if not isinstance(structure, dict):
        return outputs[structure]
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: arranged(part, outputs) for key, part in parts.items()}
    return (tuple if kind == "tuple" else list)(arranged(part, outputs) for part in parts)


def read_table(content: bytes) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The program's table, the table of its tensors, and where those begin; of bytes that were checked."""
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = json.loads(content[8:start])
    return json.loads(tensors.pop("__metadata__")[KEY]), tensors, start

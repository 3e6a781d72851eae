"""An ONNX file as plain data: its nodes, its constants, what it takes and gives. Nothing in a file can do harm.

Weights that lie outside the file are read from a file beside it only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cofire.errors import FileError
from cofire.extras import require

_BYTES = (1 << 31) - 1
"""Of the file; a larger one is no valid protobuf message."""
_NODES = 100_000


@dataclass(frozen=True)
class Node:
    """One call; ``inputs`` that were left out are empty."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class OnnxGraph:
    """What a file holds; floating-point constants are float32."""

    nodes: tuple[Node, ...]
    constants: Mapping[str, Tensor]
    input: str
    input_sizes: tuple[int | None, ...]
    """The batch included; None where the file leaves a size open."""
    outputs: tuple[str, ...]
    metadata: Mapping[str, str]


def read_onnx(path: Path) -> OnnxGraph:
    """The graph of a file.

    Raises:
        FileError: missing, damaged, too large, or more than one graph of tensors.
    """
    try:
        if path.stat().st_size > _BYTES:
            raise FileError(f"{path} must have at most {_BYTES:,} bytes, got {path.stat().st_size:,}")
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error}") from error
    onnx = require("onnx", package="onnx", extra="export")
    try:
        return _graph(onnx.load_from_string(content), path)
    except FileError:
        raise
    except Exception as error:  # a damaged file can fail anywhere in its parser
        raise FileError(f"{path} is damaged, or no ONNX file: {type(error).__name__}: {error}") from error


def _graph(model: Any, path: Path) -> OnnxGraph:
    graph = model.graph
    if model.functions:
        raise FileError(
            f"{path} has functions of its own, e.g. {model.functions[0].name!r}: inline them first, "
            "onnx.inliner.inline_local_functions(model)"
        )
    if graph.sparse_initializer:
        raise FileError(f"{path} has sparse weights; write them as plain tensors")
    if len(graph.node) > _NODES:
        raise FileError(f"{path} must have at most {_NODES:,} nodes, got {len(graph.node):,}")
    constants = {tensor.name: _tensor(tensor, path) for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    if len(inputs) != 1:
        names = ", ".join(value.name for value in inputs) or "none"
        raise FileError(f"{path} must take one batch of images, got {len(inputs)} inputs: {names}")
    taken = inputs[0].type.tensor_type
    if len(taken.shape.dim) != 4:
        raise FileError(
            f"{path} must take images (B, C, H, W), got {len(taken.shape.dim)} sizes for {inputs[0].name!r}"
        )
    if taken.elem_type not in _FLOATS:
        raise FileError(f"{path} must take floating-point images, and {inputs[0].name!r} is of type {taken.elem_type}")
    return OnnxGraph(
        nodes=tuple(_node(node, at, path) for at, node in enumerate(graph.node)),
        constants=constants,
        input=inputs[0].name,
        input_sizes=tuple(dim.dim_value if dim.dim_value > 0 else None for dim in taken.shape.dim),
        outputs=tuple(value.name for value in graph.output),
        metadata={entry.key: entry.value for entry in model.metadata_props},
    )


_FLOATS = {1: np.float32, 10: np.float16, 11: np.float64}


def _node(node: Any, at: int, path: Path) -> Node:
    kind = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
    attrs = {attr.name: _attribute(attr, path) for attr in node.attribute}
    return Node(kind, node.name or f"{node.op_type}_{at}", tuple(node.input), tuple(node.output), attrs)


def _attribute(attr: Any, path: Path) -> Any:
    """A number, text, tensor or list of numbers; None for graphs and what else there is."""
    kinds = {1: "f", 2: "i", 3: "s", 4: "t", 6: "floats", 7: "ints"}
    found: Any = getattr(attr, kinds[attr.type]) if attr.type in kinds else None
    if attr.type == 3:
        return found.decode("utf-8", "replace")
    if attr.type == 4:
        return _tensor(found, path)
    return list(found) if attr.type in (6, 7) else found


def _tensor(tensor: Any, path: Path) -> Tensor:
    numpy_helper, helper = require("onnx.numpy_helper", "onnx", "export"), require("onnx.helper", "onnx", "export")
    if tensor.data_location == 1:
        kind = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
        size = math.prod(tensor.dims) * kind.itemsize
        array = np.frombuffer(_beside(tensor.external_data, path, size, tensor.name), kind).reshape(tuple(tensor.dims))
    else:
        array = numpy_helper.to_array(tensor)
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8 or array.dtype == np.uint64:
        raise FileError(f"{path}: the tensor {tensor.name!r} is of a type that is not taken, {array.dtype}")
    array = array.astype(np.float32 if array.dtype.kind == "f" else np.bool_ if array.dtype.kind == "b" else np.int64)
    return torch.from_numpy(array.copy())


def _beside(entries: Sequence[Any], path: Path, size: int, name: str) -> bytes:
    """The bytes of a tensor that lies in a file beside the model, named without any folder."""
    told = {entry.key: entry.value for entry in entries}
    location = told.get("location", "")
    place = path.parent / location
    if not location or Path(location).name != location or location.startswith(".") or place.is_symlink():
        raise FileError(
            f"{path}: the weights {name!r} must lie in the file or in one beside it, got the place {location!r}; "
            "write them into the file, e.g. onnx.save(onnx.load(path), path)"
        )
    try:
        with place.open("rb") as file:
            file.seek(int(told.get("offset", 0)))
            if size > place.stat().st_size:
                raise FileError(f"{place} is shorter than the {size:,} bytes of {name!r}")
            content: bytes = file.read(size)
    except (OSError, ValueError) as error:
        raise FileError(f"{path}: the weights {name!r} cannot be read from {location!r}: {error}") from error
    if len(content) != size:
        raise FileError(f"{place} ends within the {size:,} bytes of {name!r}")
    return content

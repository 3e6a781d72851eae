"""An ONNX graph as a module: every node becomes calls of torch, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, fx

from cofire.errors import CofireError, CompileError, ConfigError, FileError
from cofire.importing import onnx_layers, onnx_ops
from cofire.importing.calls import Calls
from cofire.importing.onnx_file import Node, OnnxGraph
from cofire.importing.onnx_table import OPS, refused

_REGISTERED = (onnx_layers, onnx_ops)  # each adds its kinds of nodes to OPS


def input_shape_of(graph: OnnxGraph, path: Path, given: tuple[int, int, int] | None) -> tuple[int, int, int]:
    """(C, H, W) as the file says, or as ``given`` where it leaves sizes open."""
    own = graph.input_sizes[1:]
    if given is None and None in own:
        raise ConfigError(f"{path} leaves sizes of {graph.input!r} open, {own}: give input_shape=(C, H, W)")
    shape = given or own
    if len(shape) != 3 or any(mine not in (None, theirs) for mine, theirs in zip(own, shape, strict=True)):
        raise ConfigError(f"input_shape must be {own}, which {path} was made for, got {given}")
    channels, height, width = (int(size or 0) for size in shape)
    return channels, height, width


def module_of(graph: OnnxGraph, input_shape: tuple[int, int, int]) -> fx.GraphModule:
    """The network in float32, for any batch.

    Raises:
        CompileError: names the node that there is nothing like.
        FileError: a node is not as ONNX says it must be.
    """
    calls = Calls(graph.input_sizes[0] or 2, input_shape)
    values: dict[str, Any] = {**graph.constants, graph.input: calls.input, "": None}
    for node in graph.nodes:
        if node.kind not in OPS:
            known = ", ".join(sorted(OPS))
            raise refused(
                node,
                f"cofire has no such op. Ways out: export the model without it, or up to it, or compile the PyTorch "
                f"model itself. Known: {known}",
            )
        for name in node.inputs:
            if name not in values:
                raise FileError(f"the node {node.name!r} ({node.kind}) reads {name!r}, which nothing before it gives")
        made = _made(calls, node, [values[name] for name in node.inputs])
        for name, value in zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=False):
            values[name] = value
    missing = [name for name in graph.outputs if name not in values]
    if missing or not graph.outputs:
        raise FileError(f"the graph must give its outputs, and nothing gives {missing}")
    return calls.module([values[name] for name in graph.outputs])


def _made(calls: Calls, node: Node, values: list[Any]) -> Any:
    while values and values[-1] is None:
        values.pop()
    try:
        return OPS[node.kind](calls, node, *values)
    except CompileError as error:
        if node.name in str(error):
            raise
        raise refused(node, str(error)) from error
    except CofireError:
        raise
    except Exception as error:  # what it is given does not fit together
        shapes = [calls.shape(value) if isinstance(value, fx.Node | Tensor) else None for value in values]
        raise refused(node, f"it does not take what it is given, shapes {shapes}: {error}") from error

"""Which kinds of ONNX nodes there are; each is one function from values to values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cofire.errors import CompileError
from cofire.importing.onnx_file import Node

Lowering = Callable[..., Any]
OPS: dict[str, Lowering] = {}
"""Kind -> function of (calls, node, *values), which gives a value, or a tuple if the node has several outputs."""


def op(*kinds: str) -> Callable[[Lowering], Lowering]:
    """Registers a function for these kinds of nodes."""

    def add(function: Lowering) -> Lowering:
        OPS.update(dict.fromkeys(kinds, function))
        return function

    return add


def refused(node: Node, why: str) -> CompileError:
    """The error for a node that there is nothing like."""
    return CompileError(f"the node {node.name!r} ({node.kind}) cannot be compiled: {why}")


def layer_name(node: Node) -> str:
    """That of the module which the weights came from, where exporters left it in the file."""
    weight = next((name for name in node.inputs[1:] if re.fullmatch(r"[A-Za-z_][\w.]*\.weight", name)), None)
    return weight.removesuffix(".weight") if weight else node.name


def number(value: Any) -> Any:
    """A Python number of a constant with one element."""
    return value.item() if isinstance(value, Tensor) else value


def numbers(node: Node, value: Any) -> list[int]:
    """Integers of a constant."""
    if not isinstance(value, Tensor) or value.is_floating_point():
        raise refused(node, "sizes, axes and indices must be constant integers")
    found: list[int] = torch.atleast_1d(value).flatten().tolist()
    return found

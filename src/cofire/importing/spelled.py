"""Functions that graphs spell out in many calls -> one call: GELU, found by trying, SiLU, and vectors of length one."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

_OF_GELU: set[Any] = {operator.add, operator.mul, operator.truediv, torch.pow, torch.erf, torch.tanh}
_GELUS = tuple({"approximate": how} for how in ("none", "tanh"))
_FAR = 6  # calls
ONLY_SPELLED: set[Any] = {
    *(torch.pow, torch.erf, torch.linalg.vector_norm, torch.where, torch.matmul, torch.tile, torch.floor, torch.ceil),
    *(torch.eq, torch.gt, torch.lt, torch.ge, torch.le, torch.remainder, torch.logical_and, torch.logical_or),
    torch.logical_not,
}
"""Functions that the engine knows as a part of others, or of constants, only."""


def spelled_out(graph: fx.Graph) -> None:
    """Replace them in ``graph``; what is not read any more is left in it."""
    for node in list(graph.nodes):
        if node.target in (torch.erf, torch.tanh):
            for out, x, options in _gelus(node):
                _replace(graph, out, F.gelu, (x,), options)
                break
        elif node.target in (operator.mul, torch.mul) and (same := _times_its_sigmoid(node)) is not None:
            _replace(graph, node, F.silu, (same,), {})
        elif node.target in (operator.truediv, torch.div) and (found := _unit_length(node)) is not None:
            _replace(graph, node, F.normalize, found, {})
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)


def _replace(graph: fx.Graph, out: fx.Node, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    with graph.inserting_before(out):
        known = graph.call_function(function, args, options)
    known.meta.update(out.meta)
    out.replace_all_uses_with(known)


def _times_its_sigmoid(node: fx.Node) -> fx.Node | None:
    """The x of x * sigmoid(x), which is SiLU: files of detectors spell it out."""
    for x, other in (node.args[:2], node.args[1::-1]):
        if isinstance(x, fx.Node) and isinstance(other, fx.Node) and other.target is torch.sigmoid:
            return x if other.args == (x,) else None
    return None


def _unit_length(node: fx.Node) -> tuple[Any, ...] | None:
    """Arguments of `F.normalize`: x / max(|x|, eps) for each vector along one dimension."""
    x, below = node.args[:2]
    while isinstance(below, fx.Node) and below.target in ("expand", "expand_as"):
        below = below.args[0]
    if not isinstance(below, fx.Node) or below.target not in (torch.clamp, torch.clamp_min):
        return None
    length, epsilon = below.args[:2]
    unbounded = below.args[2:] in ((), (None,))
    if not isinstance(length, fx.Node) or length.target is not torch.linalg.vector_norm or not unbounded:
        return None
    given = (*length.args, *(False,) * (4 - len(length.args)))
    dims: Any = given[2]
    if given[0] is not x or given[1] != 2 or not given[3] or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    return x, 2.0, dims[0], epsilon


def _gelus(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, dict[str, Any]]]:
    """(result, x, options) of each GELU that ``node`` is a part of."""
    probe = torch.linspace(-6, 6, 49).double()
    for out in _chain(node, "users"):
        for x in _chain(node, "all_input_nodes"):
            values = _tried(out, x, probe)
            for options in _GELUS:
                if values is not None and torch.allclose(values, F.gelu(probe, **options), rtol=1e-5, atol=1e-5):
                    yield out, x, options


def _chain(node: fx.Node, way: str) -> list[fx.Node]:
    """Nodes that are a few calls from ``node``, the near ones first."""
    found, last = {node: None}, [node]
    for _ in range(_FAR):
        last = [other for each in last for other in getattr(each, way) if other not in found]
        found |= dict.fromkeys(last)
    return list(found)[1:]


def _tried(out: fx.Node, x: fx.Node, probe: Tensor) -> Tensor | None:
    """What ``out`` would be if ``x`` were ``probe``; None if it depends on more than that."""
    known: dict[fx.Node, Tensor] = {x: probe}

    def value(node: fx.Node, depth: int = 0) -> Tensor:
        if node not in known:
            if node.target not in _OF_GELU or depth > 2 * _FAR:
                raise LookupError
            args = fx.node.map_arg(node.args, lambda source: value(source, depth + 1))
            known[node] = node.target(*args)  # type: ignore[operator]
        return known[node]

    try:
        return value(out)
    except (LookupError, TypeError, RuntimeError):
        return None

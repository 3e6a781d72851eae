"""Which channels arrive where, once some have left: the calls that move data are run on the ids of those that remain.

A forward may split, shuffle, slice or pad by numbers that are written into it. Nobody needs a rule for each of these
calls: run on fewer channels, it either delivers the ones that are expected, in their order, or it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from cofire.graph.graph import Graph
from cofire.graph.ops import DEAD, LIVE, Op
from cofire.graph.walk import CASTS, VIEWS, Walk


@dataclass(frozen=True, eq=False)
class Arrival:
    """What one operand of an op brings.

    Args:
        channels_C: the id of each channel, int64; LIVE where a channel mixes several.
        present: every id among its elements, int64, sorted.
    """

    channels_C: Tensor
    present: Tensor

    @property
    def mixes(self) -> bool:
        """Whether a channel holds elements of several."""
        return bool((self.channels_C == LIVE).any()) and bool((self.present > LIVE).any())


Arrivals = dict[str, list[Arrival | None]]
"""Op -> one for each of its sources; None where the calls in between cannot be run on these channels."""


def arrivals(graph: Graph, kept: Tensor) -> Arrivals:
    """What every op that is no move reads, if only the ids in ``kept``, bool (ids,), remain."""
    found: Arrivals = {}
    values: dict[fx.Node, Any] = {}
    ops = {op.name: op for op in graph.ops}
    for node in graph.calls.nodes:
        op = ops.get(node.name)
        if op is None or op.kind == "move":
            values[node] = _run(graph, node, values)
            continue
        sources = {source.name: source for source in node.all_input_nodes}
        dim = -1 if op.last else 1
        found[op.name] = [_arrival(values[sources[name]], dim) for name in op.sources]
        values[node] = _own(op, kept, dim)
    return found


class _Unknown:
    """The value of a call that cannot be run on ids."""


_UNKNOWN = _Unknown()


def _run(graph: Graph, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """A call on ids and sizes; what is made of something unknown is unknown."""
    if any(isinstance(values[source], _Unknown) for source in node.all_input_nodes):
        return _UNKNOWN
    if node.target in CASTS:  # the ids would be cast as well
        return values[node.all_input_nodes[0]]

    def value(source: fx.Node) -> Any:
        ids = values[source]  # spread over a map without memory of their own, which only a copy can be viewed in
        return ids.contiguous() if node.target in VIEWS and isinstance(ids, Tensor) else ids

    try:
        args, kwargs = fx.node.map_arg(node.args, value), fx.node.map_arg(node.kwargs, value)
        if node.op == "get_attr":
            return _attribute(graph, str(node.target))
        if node.op == "call_module":
            return graph.modules[str(node.target)](*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return _UNKNOWN


def _attribute(graph: Graph, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(graph.modules[owner], name)


def _own(op: Op, kept: Tensor, dim: int) -> Any:
    """The ids an op gives its result, spread over its shape."""
    if not op.channels:
        return torch.full((), LIVE, dtype=torch.float64).expand(2, *op.shape) if op.shape else _UNKNOWN
    own = torch.arange(op.first, op.first + op.channels)
    own = own[kept[own]].double()
    shape = [2, *op.shape]
    shape[dim] = len(own)
    view = [1] * len(shape)
    view[dim] = len(own)
    return own.view(view).expand(shape)


def _arrival(ids: Any, dim: int) -> Arrival | None:
    if not isinstance(ids, Tensor) or ids.ndim < 2:
        return None
    if ids.numel() == 0:
        return Arrival(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    for axis in range(ids.ndim):
        if ids.stride(axis) == 0 and axis != dim % ids.ndim:
            ids = ids.narrow(axis, 0, 1)  # the same all along it
    read = Walk.channels_of(ids, dim)
    channels_C = torch.arange(read.start, read.stop) if isinstance(read, slice) else read
    if bool((channels_C > LIVE).all()):
        return Arrival(channels_C, channels_C.unique())
    return Arrival(channels_C, ids[0].unique().long())


def blamed(graph: Graph, whole: Arrivals, kept: Tensor) -> dict[int, str]:
    """Id -> the op to which it would not come as it should, if only ``kept`` remained; empty if all goes well."""
    found: dict[int, str] = {}
    fewer = arrivals(graph, kept)
    for name, operands in whole.items():
        for before, after in zip(operands, fewer[name], strict=True):
            if before is None:
                continue
            expected = before.channels_C[kept[before.channels_C]]
            if after is None or not torch.equal(after.channels_C, expected):
                found.update((i, name) for i in before.present.tolist() if i not in (DEAD, LIVE))
    return found

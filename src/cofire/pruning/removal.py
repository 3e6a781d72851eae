"""Graph -> the groups whose filters can leave for good, such that what is left equals the masked network."""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
from torch import Tensor, nn

from cofire.errors import NoUnitError
from cofire.graph.graph import Graph, trace
from cofire.graph.ops import DEAD, Op
from cofire.graph.placement import place
from cofire.graph.units import Placement, Unit, Units

_CUT_BY_CHANNEL = (nn.BatchNorm2d, nn.PReLU)


def removable(model: nn.Module, input_shape: tuple[int, int, int] | None = None) -> Graph:
    """The graph of ``model``; its gated units are the removable ones, the others say why they stay.

    The last convs of residual branches stay whole, as in Li et al. 2017: an addition needs all of its channels.

    Raises:
        NoUnitError: no filter can leave.
    """
    graph = place(trace(model, input_shape), Placement(always=True))
    obstacles = {group: _obstacle(graph, units) for group, units in graph.units.groups.items()}
    units = Units(_kept_whole(unit, obstacles[unit.group]) if unit.gated else unit for unit in graph.units)
    if not units.groups:
        raise NoUnitError(f"no filter can be removed from this model:\n{units}")
    return dataclasses.replace(graph, units=units)


def inner_modules(graph: Graph, unit: Unit) -> list[str]:
    """Names of the modules with weights between a unit's conv and its end: its norm, a PReLU."""
    inside, todo = list[Op](), [graph[unit.out]]
    for op in todo:
        if op.name != unit.conv and op not in inside:
            inside.append(op)
            todo.extend(graph[source] for source in op.sources)
    return [name for op in inside if (name := _with_weights(graph, op))]


def _with_weights(graph: Graph, op: Op) -> str:
    """The name of the module an op calls if that has parameters or buffers; else empty."""
    node = next(node for node in graph.calls.nodes if node.name == op.name)
    if node.op != "call_module" or not graph.modules[str(node.target)].state_dict():
        return ""
    return str(node.target)


def _kept_whole(unit: Unit, reason: str) -> Unit:
    return dataclasses.replace(unit, gated=False, reason=reason, group=unit.name) if reason else unit


def _obstacle(graph: Graph, group: list[Unit]) -> str:
    """Why the group's filters cannot leave; empty if they can."""
    if group[0].groups > 1:
        return "a grouped conv: its inputs would have to leave too"
    for name in (name for unit in group for name in inner_modules(graph, unit)):
        if not isinstance(graph.modules[name], _CUT_BY_CHANNEL):
            return f"{name} ({type(graph.modules[name]).__name__}) mixes its channels"
    calls = Counter(op.conv.module for op in graph.ops if op.conv is not None)
    carriers = [graph[group[-1].out]]
    for carrier in carriers:  # grows while we look: every op through which the channels pass, one by one
        for reader in graph.ops:
            for read in reader.reads if reader.kind != "move" else ():
                if not _shares(read, carrier.own):
                    continue
                if reader.kind in ("pass", "activation") and not _with_weights(graph, reader):
                    carriers.append(reader)
                elif reader.conv is None or reader.conv.groups > 1 or reader.conv.module not in graph.modules:
                    return f"{_described(reader)} reads it"
                elif calls[reader.conv.module] > 1:
                    return f"{_described(reader)} reads it, and is called more than once"
                if not _in_order(read, carrier):
                    return f"{_described(reader)} reads it split, shuffled or padded"
    return ""


def _described(op: Op) -> str:
    words = {"add": "an addition", "mul": "a product", "norm": "a norm behind it", "output": "the model's output"}
    return words.get(op.kind, f"{op.what} ({op.name})")


def _shares(read: Tensor | slice, own: slice) -> bool:
    if isinstance(read, slice):
        return bool(read.start < own.stop and own.start < read.stop)
    return bool(((read >= own.start) & (read < own.stop)).any())


def _in_order(read: Tensor | slice, carrier: Op) -> bool:
    """True if all channels of ``carrier`` come in their order, each once or (flattened) equally often."""
    ids = torch.arange(read.start, read.stop) if isinstance(read, slice) else read
    found = ids[(ids >= carrier.own.start) & (ids < carrier.own.stop)]
    own = torch.arange(carrier.own.start, carrier.own.stop)
    return bool((ids != DEAD).all()) and torch.equal(found, own.repeat_interleave(len(found) // len(own)))

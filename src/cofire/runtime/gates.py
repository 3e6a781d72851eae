"""Units and gates of a gated model -> which calls carry which gate in its program."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from cofire.errors import CompileError
from cofire.gates.base import AbstractGate
from cofire.gates.ftwt import FTWTGate
from cofire.gates.gating import GatedModel
from cofire.graph.graph import Graph
from cofire.graph.ops import Op as Call
from cofire.runtime.program import Gate, Group, Head


def lower_gates(gated: GatedModel, graph: Graph) -> tuple[tuple[Group, ...], dict[str, Gate]]:
    """The groups, and call -> gate: on every call from a unit's conv to its end, with the head on a group's first conv.

    Raises:
        CompileError: a gate is of a kind the engine does not know, or sits where it cannot.
    """
    _check_thresholds(gate.threshold for gate in gated.gates.values())
    groups: list[Group] = []
    gates: dict[str, Gate] = {}
    for number, (name, units) in enumerate(graph.units.groups.items()):
        groups.append(Group(name=name, filters=units[-1].out_channels))
        follow = Gate(group=number, head=None)
        for unit in units:
            calls = _from_to(graph, unit.conv, unit.out)
            mixing = [call.name for call in calls if call.conv is not None and call.name != unit.conv]
            if mixing:
                raise CompileError(
                    f"unit {unit.name!r}: its mask must come before {mixing[0]!r}, which mixes channels, but sits "
                    f"behind it, on {unit.out!r}, so that no filter can be left out; gate the model with site='pre_add'"
                )
            gates |= {call.name: follow for call in calls}
        gates[units[0].conv] = Gate(group=number, head=_lower_head(name, gated.gates[name]))
    return tuple(groups), gates


def _check_thresholds(thresholds: Iterable[float]) -> None:
    found = sorted(set(thresholds))
    if len(found) != 1 or not math.isfinite(found[0]):
        raise CompileError(f"the gates must share one finite threshold, got {found}; set gated.threshold")


def _lower_head(group: str, gate: AbstractGate) -> Head:
    if not isinstance(gate, FTWTGate) or type(gate).decide is not FTWTGate.decide:
        raise CompileError(
            f"group {group!r}: its gate must be an FTWTGate for the engine to run it, got {type(gate).__name__}; "
            "run the gated model in PyTorch, or gate it with FTWT"
        )
    linear = gate.head.linear
    bias = None if linear.bias is None else _copied(linear.bias)
    return Head(pool=gate.head.pool, softmax=gate.head.softmax, weight=_copied(linear.weight), bias=bias)


def _copied(weight: Tensor) -> Tensor:
    return weight.detach().to("cpu", torch.float32, copy=True).contiguous()


def _from_to(graph: Graph, first: str, last: str) -> list[Call]:
    """The calls on the ways from one to another, both included."""
    after, before = {first}, {last}
    for call in graph.ops:
        if after & set(call.sources):
            after.add(call.name)
    for call in reversed(graph.ops):
        if call.name in before:
            before.update(call.sources)
    return [call for call in graph.ops if call.name in after & before]

"""Units and gates of a gated model -> which calls carry which gate in its program."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cofire.errors import CompileError
from cofire.gates.base import Compiling, LinearHead
from cofire.gates.gating import GatedModel
from cofire.graph.graph import Graph
from cofire.graph.ops import Op as Call
from cofire.runtime.program import Gate, Group, Head


def lower_gates(gated: GatedModel, graph: Graph) -> tuple[tuple[Group, ...], dict[str, Gate]]:
    """The groups, and call -> gate: on every call from a unit's conv to its end, with the head on a group's first conv.

    Raises:
        CompileError: a gate is of a kind the engine does not know, or sits where it cannot.
    """
    method = gated.gates
    if not isinstance(method, Compiling):
        raise CompileError(f"the engine has nothing like {gated.config.label}; run the gated model in PyTorch")
    if gated.threshold is not None and not math.isfinite(gated.threshold):
        raise CompileError(f"the threshold must be finite, got {gated.threshold}; set gated.threshold")
    groups: list[Group] = []
    gates: dict[str, Gate] = {}
    for number, site in enumerate(graph.sites):
        groups.append(Group(name=site.name, filters=site.filters))
        follow = Gate(group=number, head=None)
        for unit in site.units:
            calls = _from_to(graph, unit.conv, unit.out)
            mixing = [call.name for call in calls if call.conv is not None and call.name != unit.conv]
            if mixing:
                raise CompileError(
                    f"unit {unit.name!r}: its mask must come before {mixing[0]!r}, which mixes channels, but sits "
                    f"behind it, on {unit.out!r}, so that no filter can be left out; gate the model with site='pre_add'"
                )
            gates |= {call.name: follow for call in calls}
        gates[site.first] = Gate(group=number, head=_program_head(method.lower(site)))
    return tuple(groups), gates


def _program_head(head: LinearHead) -> Head:
    bias = None if head.bias is None else copied(head.bias)
    if head.top is not None or head.scale or head.pool not in ("max", "avg"):
        raise CompileError("the engine does not know this form of head yet")
    return Head(pool=head.pool, softmax=head.softmax, weight=copied(head.weight), bias=bias)


def copied(weight: Tensor) -> Tensor:
    """A tensor as programs hold them."""
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

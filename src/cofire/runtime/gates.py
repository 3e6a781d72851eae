"""Sites and heads of a gated model -> which calls carry which gate in its program."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cofire.errors import CompileError
from cofire.gates.base import Compiling, LinearHead
from cofire.gates.gating import GatedModel
from cofire.graph.graph import Graph
from cofire.graph.ops import Op as Call
from cofire.graph.units import Site, Unit
from cofire.runtime.building import Builder
from cofire.runtime.program import Cat, Conv, Gate, Group, Head, Pool, Softmax


@dataclass(frozen=True)
class LoweredGates:
    """What a program needs to know of the gates.

    Args:
        groups: filters that are decided on together.
        of_call: call -> gate: on every call from a unit's conv to its end, with the head on a group's first conv.
        shifts: call behind which filters are rescaled -> what is added then, (O,).
        looks: call whose head reads what a module makes of the image -> that module.
        answers: call that such a module's second output stands in for, where it does not run -> that module, and a gate
            that is on where the call runs.
        choices: call whose head reads what another head chooses -> the gate with that one.
        inners: call whose head has two maps -> that head.
    """

    groups: list[Group] = field(default_factory=list)
    of_call: dict[str, Gate] = field(default_factory=dict)
    shifts: dict[str, Tensor] = field(default_factory=dict)
    looks: dict[str, nn.Module] = field(default_factory=dict)
    answers: dict[str, tuple[nn.Module, Gate]] = field(default_factory=dict)
    choices: dict[str, Gate] = field(default_factory=dict)
    inners: dict[str, LinearHead] = field(default_factory=dict)

    def add(self, graph: Graph, name: str, units: tuple[Unit, ...], head: LinearHead) -> None:
        """A group of units that ``head`` decides for."""
        gate = Gate(group=len(self.groups), head=None)
        self.groups.append(Group(name=name, filters=units[-1].out_channels))
        for unit in units:
            self.of_call.update({call.name: gate for call in _unmixed(graph, unit)})
        first = units[0].conv
        self.of_call[first] = dataclasses.replace(gate, head=_program_head(head))
        if head.shift is not None:
            self.shifts[units[-1].out] = copied(head.shift)
        if head.source is not None:
            self.looks[first] = head.source
        if head.choice is not None:
            self.choices[first] = Gate(group=len(self.groups), head=_program_head(head.choice))
            self.groups.append(Group(name=f"gates.{name}", filters=len(head.choice.weight)))
        if head.inner is not None:
            self.inners[first] = head


def lower_gates(gated: GatedModel, graph: Graph) -> LoweredGates:
    """The gates of a model at the shape of ``graph``.

    Raises:
        CompileError: the method is one the engine cannot run, or a mask sits where it cannot.
    """
    method, lowered = gated.gates, LoweredGates()
    if not isinstance(method, Compiling):
        raise CompileError(f"the engine has nothing like {gated.config.label}; run the gated model in PyTorch")
    if gated.threshold is not None and not math.isfinite(gated.threshold):
        raise CompileError(f"the threshold must be finite, got {gated.threshold}; set gated.threshold")
    for site in graph.sites:
        head = method.lower(site)
        if site.kind == "filters":
            lowered.add(graph, site.name, site.units, head)
        elif site.kind == "block":
            for unit in _branch(site):  # a branch is off where each of its convs is, as a whole
                lowered.add(graph, unit.name, (unit,), head)
            if head.answers and head.source is not None:
                gate = Gate(group=len(lowered.groups), head=_program_head(head))
                lowered.groups.append(Group(name=site.name, filters=site.filters))
                lowered.answers[site.out] = (head.source, gate)
        else:
            raise CompileError(f"site {site.name!r}: the engine has no masks of {site.kind}; run the model in PyTorch")
    return lowered


def _branch(site: Site) -> tuple[Unit, ...]:
    """The convs of a branch, all of which the engine must be able to leave out."""
    left_out = {unit.conv for unit in site.units}
    if site.out != site.units[-1].out or set(site.convs) != left_out:
        raise CompileError(
            f"branch {site.name!r} must end with its last layer and that one's norm, and hold no layer but its units, "
            "for the engine to leave it out; run the gated model in PyTorch"
        )
    return site.units


def _program_head(head: LinearHead) -> Head:
    return Head(
        pool=head.pool,
        softmax=head.softmax,
        weight=copied(head.weight),
        bias=None if head.bias is None else copied(head.bias),
        top=head.top,
        scale=head.scale,
    )


_ONE_PIXEL: dict[str, Any] = {"kernel": (1, 1), "stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1)}


def after_choice(builder: Builder, gate: Gate, choice: Gate, buffer: int, name: str) -> Gate:
    """The gate with a head that reads what ``choice`` chooses on a buffer: ones and zeros, by a conv without inputs."""
    assert gate.head is not None
    assert choice.head is not None
    rows, channels = len(choice.head.weight), builder.buffers[buffer][0]
    weights: dict[str, Any] = {"weight": torch.zeros(rows, channels, 1, 1), "bias": torch.ones(rows).double()}
    pooled = _pooled(builder, "avg", buffer, name)
    chosen = _mapped(builder, pooled, name, choice, act="none", **weights)
    return dataclasses.replace(gate, head=dataclasses.replace(gate.head, src=chosen))


def after_inner(builder: Builder, gate: Gate, head: LinearHead, buffer: int, name: str) -> Gate:
    """The gate with a head that reads what the first of its two maps makes of a buffer: poolings, then a conv."""
    assert gate.head is not None
    assert head.inner is not None
    ops: dict[str, tuple[Literal["max", "avg"], ...]] = {"max": ("max",), "avg": ("avg",), "both": ("max", "avg")}
    if head.pool not in ops:
        raise CompileError(f"a head of two maps must pool by {', '.join(ops)}, got {head.pool}, at {name!r}")
    parts = tuple(_pooled(builder, op, buffer, name) for op in ops[head.pool])
    features = sum(builder.buffers[part][0] for part in parts)
    seen = parts[0] if len(parts) == 1 else builder.emit(Cat, f"{name}_pooled", parts, (features,))
    if head.softmax:
        seen = builder.emit(Softmax, f"{name}_softmax", (seen,), (features,), ways=features, log=False)
    weight, bias = copied(head.inner.weight)[:, :, None, None], copied(head.inner.bias).double()
    act = "relu" if head.inner.relu else "none"
    inner = _mapped(builder, seen, name, None, act=act, weight=weight, bias=bias)
    plain = dataclasses.replace(gate.head, src=inner, pool="max", softmax=False)  # one pixel is its own maximum
    return dataclasses.replace(gate, head=plain)


def _pooled(builder: Builder, op: Literal["max", "avg"], buffer: int, name: str) -> int:
    """A buffer's channels, each as one number."""
    attrs = {**_ONE_PIXEL, "op": op, "include_pad": False, "adaptive": True}
    name = f"{name}_{'mean' if op == 'avg' else op}"
    return builder.emit(Pool, name, (buffer,), (builder.buffers[buffer][0],), **attrs)


def _mapped(builder: Builder, buffer: int, name: str, gate: Gate | None, *, weight: Tensor, **attrs: Any) -> int:
    """A linear map of a buffer of one pixel."""
    attrs = {**_ONE_PIXEL, "groups": 1, "residual": False, "slope": 0.0, "weight": weight, **attrs}
    return builder.emit(Conv, f"gates.{name}", (buffer,), (len(weight),), gate, **attrs)


def copied(weight: Tensor) -> Tensor:
    """A tensor as programs hold them."""
    return weight.detach().to("cpu", torch.float32, copy=True).contiguous()


def _unmixed(graph: Graph, unit: Unit) -> list[Call]:
    """The calls from a unit's conv to its end, none of which may mix channels."""
    calls = _from_to(graph, unit.conv, unit.out)
    mixing = [call.name for call in calls if call.conv is not None and call.name != unit.conv]
    if mixing:
        raise CompileError(
            f"unit {unit.name!r}: its mask must come before {mixing[0]!r}, which mixes channels, but sits "
            f"behind it, on {unit.out!r}, so that no filter can be left out; gate the model with site='pre_add'"
        )
    return calls


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

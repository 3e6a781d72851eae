"""Graph + Placement -> Graph with its units: which filters can be switched off, which share a mask, why others stay.

Behind them stand the sites, where decisions are taken: `place` for filters, `place_pixels`, `place_blocks` and
`place_whole` for the other kinds of masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

from torch import nn

from cofire.errors import NoUnitError
from cofire.graph.branches import ancestors, branch_of, common_module, num_convs
from cofire.graph.graph import Graph
from cofire.graph.open_units import hidden_unit, open_unit
from cofire.graph.ops import Op
from cofire.graph.units import Placement, Role, Site, Unit, Units, group_macs, head_macs

At = Literal["end", "norm", "conv"]
WHOLE = "whole"
"""The site that all layers belong to."""

Filter = Callable[[Unit], bool]


def place(
    graph: Graph,
    placement: Placement,
    filter_fn: Filter | None = None,
    *,
    at: At = "end",
    head: Callable[[list[Unit]], int] = head_macs,
) -> Graph:
    """``graph`` with its units under ``placement`` and a site for each group of filters that share a mask.

    Args:
        filter_fn: called with each unit that could be gated; False leaves it open. A group is gated only if
            all of its units are.
        at: a unit's output is masked at its ``end``, behind its ``norm``, before the activation, or right behind its
            ``conv``.
        head: MACs of what decides for a group: a group that cannot save as many is left open.

    Raises:
        NoUnitError: no unit is left to gate.
    """
    return _placed(graph, _all_units(graph, placement), placement, filter_fn, at, head)


def _placed(
    graph: Graph,
    units: list[Unit],
    placement: Placement,
    filter_fn: Filter | None,
    at: At,
    head: Callable[[list[Unit]], int],
) -> Graph:
    units = _one_per_output(units)
    units = _share_masks(graph, units, placement)
    units = _drop_costly_heads(units, placement, head)
    units = _chosen(units, filter_fn)
    if at != "end":
        outs = [_behind_norm(graph, unit).name if at == "norm" else unit.conv for unit in units]
        units = [dataclasses.replace(unit, out=out) for unit, out in zip(units, outs, strict=True)]
    groups = Units(units).groups
    ends = {members[-1].out: name for name, members in groups.items()}
    sites = [
        Site(
            name=name,
            kind="filters",
            x=graph[members[0].conv].sources[0],
            first=members[0].conv,
            out=members[-1].out,
            convs=tuple(unit.conv for unit in members),
            units=tuple(members),
            after=ends.get(graph[members[0].conv].sources[0]),
        )
        for name, members in groups.items()
    ]
    return dataclasses.replace(graph, units=Units(units), sites=tuple(sites))


def explained(graph: Graph, why: Mapping[str, str]) -> Graph:
    """``graph`` with words on groups of units, in place of what the rules say of them."""
    units = [dataclasses.replace(unit, reason=why.get(unit.group, unit.reason)) for unit in graph.units]
    return dataclasses.replace(graph, units=Units(units))


def place_pixels(
    graph: Graph,
    placement: Placement,
    filter_fn: Filter | None,
    head: Callable[[list[Unit]], int],
    *,
    at: At = "end",
    partial: Callable[[Unit], int] = lambda unit: 0,
) -> Graph:
    """``graph`` with a site for each unit, where positions of its output can be left out; arguments as in `place`.

    Args:
        partial: `Site.partial` of a unit.
    """
    placement = dataclasses.replace(placement, depthwise="separate")
    units = _all_units(graph, placement)
    units = [u if graph[u.conv].kind == "conv" else _open(u, "positions can be left out of convs alone") for u in units]
    placed = _placed(graph, units, placement, filter_fn, at, head)
    sites = [dataclasses.replace(s, kind="pixels", partial=partial(s.units[0])) for s in placed.sites]
    return dataclasses.replace(placed, sites=tuple(sites))


def place_blocks(graph: Graph, filter_fn: Filter | None = None) -> Graph:
    """``graph`` with a site for each residual branch that can be left out as a whole.

    A branch can be left out if nothing but its addition reads what it makes. It is named by the module that holds its
    convs. ``filter_fn`` is called with each of its convs; False leaves the branch.

    Raises:
        NoUnitError: the model has no residual branch.
    """
    found = _all_units(graph, Placement(linear=True))
    units = {unit.conv if graph[unit.conv].is_conv else unit.name: unit for unit in found}
    for op, unit in units.items():
        if op == unit.conv:
            units[op] = dataclasses.replace(unit, gated=False, reason="not in a residual branch", group=unit.name)
    branches = [branch for op in graph.ops if op.kind == "add" and (branch := branch_of(graph, op)) is not None]
    owners: dict[str, str] = {}
    for branch in branches:
        convs = [name for name in branch.inside if graph[name].is_conv]
        group = common_module([units[conv].name for conv in convs])
        group = units[convs[0]].name if not group or group in owners.values() else group
        for conv in convs:
            owners[conv] = group
            units[conv] = dataclasses.replace(units[conv], gated=True, reason="", group=group)
    placed = Units(_chosen(list(units.values()), filter_fn))
    sites = []
    for branch in branches:
        saved = [graph[name] for name in branch.inside if graph[name].conv is not None]
        mine = tuple(unit for unit in placed if unit.gated and unit.conv in branch.inside)
        if mine:
            skipped = tuple(op.name for op in saved)
            sites.append(Site(mine[0].group, "block", branch.fork, branch.inside[0], branch.end, skipped, mine))
    return dataclasses.replace(graph, units=placed, sites=tuple(sites))


def place_whole(graph: Graph, filter_fn: Filter | None = None) -> Graph:
    """``graph`` with one site, named ``whole``: all of its layers run for an image, or none does.

    Raises:
        NoUnitError: the model does not end in a linear layer that gives its logits, or ``filter_fn`` refused a layer.
    """
    last = graph[graph.ops[-1].sources[0]] if len(graph.ops[-1].sources) == 1 else None
    if last is None or last.kind != "linear" or len(last.shape) != 1:
        got = "several outputs" if last is None else f"{last.what} of shape {last.shape}"
        named = f"; its last layer is {list(graph.layers)[-1]!r}" if graph.layers else ""
        raise NoUnitError(f"the model must end in a linear layer that gives logits (K,), got {got}{named}")
    convs = {unit.conv: unit for unit in _all_units(graph, Placement(linear=True)) if unit.out_size}
    layers = [op for op in graph.ops if op.conv is not None]
    units = [convs.get(op.name) or open_unit(op, op.conv) for op in layers if op.conv is not None]
    units = _chosen([dataclasses.replace(unit, gated=True, reason="", group=WHOLE) for unit in units], filter_fn)
    names = tuple(op.name for op in layers)
    site = Site(WHOLE, "block", layers[0].sources[0], names[0], last.name, names, tuple(units))
    return dataclasses.replace(graph, units=Units(units), sites=(site,))


def _chosen(units: list[Unit], filter_fn: Filter | None) -> list[Unit]:
    if filter_fn is not None:
        refused = {unit.group for unit in units if unit.gated and not filter_fn(unit)}
        units = [_open(unit, "filter_fn refused it") if unit.group in refused else unit for unit in units]
    if not any(unit.gated for unit in units):
        raise NoUnitError(_nothing(units))
    return units


def _nothing(units: list[Unit]) -> str:
    if not units:
        return "no unit was selected: the model has no conv"
    reasons = sorted({unit.reason for unit in units})
    lines = [f"  {reason}: {', '.join(u.name for u in units if u.reason == reason)[:200]}" for reason in reasons]
    return "no unit was selected; every conv is left open because\n" + "\n".join(lines)


def _open(unit: Unit, reason: str) -> Unit:
    return unit if not unit.gated else dataclasses.replace(unit, gated=False, reason=reason, group=unit.name)


def _all_units(graph: Graph, placement: Placement) -> list[Unit]:
    """A unit for every conv, also for those inside modules that are one opaque call."""
    found = []
    for op in graph.ops:
        if op.is_conv:
            found.append(_unit(graph, op, placement))
        found.extend(hidden_unit(op, conv) for conv in op.inside if conv.kernel_size)
    return found


def _unit(graph: Graph, conv: Op, placement: Placement) -> Unit:
    shape = conv.conv
    assert shape is not None
    end, activated = _unit_end(graph, conv)
    role, out, reason = _role(graph, conv, end, activated, placement)
    first_call = next(op for op in graph.ops if op.conv and op.conv.module == shape.module)
    module = nn.Conv2d if conv.kind == "conv" else nn.Linear
    if not isinstance(graph.modules.get(shape.module), module):
        reason = f"{conv.what} is not an nn.{module.__name__} module"
    elif sum(op.conv is not None and op.conv.module == shape.module for op in graph.ops) > 1:
        reason = "the module is called more than once; a gate belongs to one call"
    elif _is_classifier(graph, out):
        reason = "the classifier: its filters are the classes"
    elif max(conv.size) == 1:
        reason = "works on a 1x1 map (squeeze-and-excite or the like)"
    elif not reason and (norm := _mixing_norm(graph, conv, end)) is not None:
        reason = f"{norm.what} mixes its channels: a filter that is off would still be needed for the others"
    calls = "" if conv is first_call else f" (call {conv.name})"
    return dataclasses.replace(
        open_unit(conv, shape),
        name=shape.module + calls,
        out=out.name,
        nonnegative=out.nonnegative,
        role=role,
        gated=not reason,
        reason=reason,
    )


def _unit_end(graph: Graph, conv: Op) -> tuple[Op, bool]:
    """The last op of conv [-> norm] [-> activation], followed only while there is exactly one reader."""
    end, op = conv, conv
    while True:
        reader, side = _reader(graph, op)
        if reader is None:
            return end, False
        if reader.activates or (side and all(_is_elementwise(step, reader) for step in side)):
            return reader, True  # the latter: an activation written out, x * sigmoid(x)
        if reader.kind == "norm":
            end = reader
        elif side or reader.kind != "pass" or reader.shape != conv.shape:
            return end, False
        op = reader


def _mixing_norm(graph: Graph, conv: Op, end: Op) -> Op | None:
    """The norm between a conv and its unit's end that needs all filters for each, if there is one."""
    op: Op | None = conv
    while op is not None and op is not end:
        op, _ = _reader(graph, op)
        if op is not None and op.mixes:
            return op
    return None


def _behind_norm(graph: Graph, unit: Unit) -> Op:
    """The norm that reads a unit's conv, or the conv where there is none before the unit's end."""
    conv = graph[unit.conv]
    reader, _ = _reader(graph, conv)
    return reader if unit.out != unit.conv and reader is not None and reader.kind == "norm" else conv


def _is_elementwise(op: Op, like: Op) -> bool:
    return op.kind in ("activation", "lift", "pass") and op.shape == like.shape


def _role(graph: Graph, conv: Op, out: Op, activated: bool, placement: Placement) -> tuple[Role, Op, str]:
    """Role, the op the mask multiplies, and why it is not gated ("" if it is)."""
    shape = conv.conv
    assert shape is not None
    if shape.groups > 1 and shape.groups == shape.in_channels == shape.out_channels:
        return "depthwise", out, ""
    if activated:
        return "plain", out, ""
    operand, others, end = _sum(graph, out)
    if others:
        if not _is_residual_branch(graph, operand, others):
            return "shortcut", out, "a shortcut: the addition refills its channels"
        follower, _ = _reader(graph, end)
        if follower is not None and follower.kind == "activation":
            return "residual", follower if placement.site == "post_add" else out, ""
    if placement.linear:
        return "linear", out, ""
    after = "the addition that follows" if others else "it"
    return "linear", out, f"linear: no activation comes after {after}"


def _reader(graph: Graph, op: Op) -> tuple[Op | None, list[Op]]:
    """The only reader of ``op``, or the product where ``op`` is rescaled by something made of it (with its ops)."""
    readers = graph.users(op)
    if len(readers) == 1:
        return readers[0], []
    product = next((reader for reader in readers if reader.kind == "mul"), None)
    side = [reader for reader in readers if reader is not product]
    for reader in side:  # every way on must end in the product
        if product is None or reader.kind == "output":
            return None, []
        side.extend(user for user in graph.users(reader) if user is not product and user not in side)
    return product, side


def _sum(graph: Graph, out: Op) -> tuple[Op, list[Op], Op]:
    """Where only additions and ops that keep zero at zero read ``out``: the operand by which it enters the sum,
    the sum's other operands (none: no sum), and the last of these ops."""
    operand, others, end = out, list[Op](), out
    while (reader := _reader(graph, end)[0]) is not None and reader.kind in ("add", "pass", "mul"):
        if reader.kind == "add":
            operand = operand if others else end
            others += [op for name in reader.sources if name != end.name for op in _operands(graph, graph[name])]
        end = reader
    return operand, others, end


def _operands(graph: Graph, op: Op) -> list[Op]:
    """What ``op`` adds up, if it is a sum that goes nowhere else; else itself."""
    if op.kind != "add" or len(graph.users(op)) > 1:
        return [op]
    return [operand for name in op.sources for operand in _operands(graph, graph[name])]


def _is_residual_branch(graph: Graph, operand: Op, others: list[Op]) -> bool:
    """Of a sum's operands the residual branch is the one with more convs back to the common fork."""
    mine = ancestors(graph, operand)
    return all(
        num_convs(graph, mine - theirs) >= num_convs(graph, theirs - mine)
        for theirs in (ancestors(graph, other) for other in others)
    )


def _is_classifier(graph: Graph, out: Op) -> bool:
    """True if nothing but pooling and moving lies between ``out`` and the model's output."""
    todo = [out]
    for op in todo:
        readers = graph.users(op)
        if any(reader.kind not in ("move", "pass", "output") for reader in readers):
            return False
        todo.extend(reader for reader in readers if reader not in todo)
    return True


def _one_per_output(units: list[Unit]) -> list[Unit]:
    """Of several units that would be masked at one place (an activated sum), only the one with most MACs is."""
    chosen: dict[str, Unit] = {}
    for unit in units:
        if unit.gated and (unit.out not in chosen or unit.macs > chosen[unit.out].macs):
            chosen[unit.out] = unit
    return [
        unit if (first := chosen.get(unit.out, unit)) is unit else _open(unit, f"masked where {first.name} is")
        for unit in units
    ]


def _share_masks(graph: Graph, units: list[Unit], placement: Placement) -> list[Unit]:
    """Depthwise convs join the group of the conv that feeds them alone, or stand for themselves."""
    by_out = {unit.out: i for i, unit in enumerate(units)}
    for i, unit in enumerate(units):
        if unit.role != "depthwise" or not unit.gated:
            continue
        feeder = _feeder(graph, unit, units, by_out)
        if placement.depthwise == "grouped" and feeder is not None and feeder.gated:
            units[i] = dataclasses.replace(unit, group=feeder.group)
        elif not placement.linear and not graph[unit.out].activates:
            units[i] = _open(unit, "linear: no activation comes after it, and no gated conv feeds it alone")
    return units


def _feeder(graph: Graph, unit: Unit, units: list[Unit], by_out: dict[str, int]) -> Unit | None:
    """The unit whose output ``unit`` alone reads, channel by channel, directly or through pooling and moving."""
    reader = graph[unit.conv]
    while True:
        op = graph[reader.sources[0]]
        while op.kind == "move" and len(op.sources) == len(graph.users(op)) == 1:
            op = graph[op.sources[0]]
        read = reader.reads[0]
        if len(graph.users(op)) > 1 or not (isinstance(read, slice) and read == op.own):
            return None
        if op.name in by_out:
            return units[by_out[op.name]]
        if op.kind != "pass":
            return None
        reader = op


def _drop_costly_heads(units: list[Unit], placement: Placement, head: Callable[[list[Unit]], int]) -> list[Unit]:
    groups = Units(units).groups
    return [
        _open(unit, "its head would cost as many MACs as it can save (always=True gates it)")
        if unit.gated and not placement.always and head(groups[unit.group]) >= group_macs(groups[unit.group])
        else unit
        for unit in units
    ]

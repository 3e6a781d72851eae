"""Calls and sites -> the forward of a gated model, as generated code."""

from __future__ import annotations

import copy
import linecache
import logging
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from cofire.errors import NoUnitError, TraceError
from cofire.gates.base import AbstractMethod
from cofire.graph.graph import Graph

logger = logging.getLogger("cofire")


def forward_of(graph: Graph) -> tuple[str, Callable[..., Any]]:
    """Source of the forward with gates at the graph's sites, and the function (backbone, x, gates) it defines."""
    return _compiled(_with_gates(graph))


def _with_gates(graph: Graph) -> fx.Graph:
    """The calls with two more per site: decide before its first op, mask after its last.

    What methods are given has its channels in the first place after the batch; where the model has them last, they are
    moved there and back.
    """
    calls = copy.deepcopy(graph.calls)
    nodes = {node.name: node for node in calls.nodes}
    masked_of: dict[str, fx.Node] = {}
    with calls.inserting_after(calls.find_nodes(op="placeholder")[-1]):
        gates = calls.placeholder("gates")
    for site in graph.sites:
        out = nodes[site.out]
        with calls.inserting_before(nodes[site.first]):
            x = masked_of.get(site.x, nodes[site.x])
            if graph[site.first].last:
                x = calls.call_method("permute", (x, 0, 3, 1, 2))
            decision = calls.call_method("decided", (gates, site.name, x))
        last = graph[site.out].last
        with calls.inserting_before(out.next):
            y = calls.call_method("permute", (out, 0, 3, 1, 2)) if last else out
            masked = calls.call_method("masked", (gates, site.name, y, decision))
            back = calls.call_method("permute", (masked, 0, 2, 3, 1)) if last else masked
        masked_of[site.out] = back
        first = y if last else masked
        out.replace_all_uses_with(back, delete_user_cb=lambda user, first=first: user is not first)
    return calls


def training_forward(graph: Graph, method: AbstractMethod) -> Callable[..., Any]:
    """The forward in training mode, with gates at the same sites; where that cannot be, it raises when it is called."""
    selected = {unit.name for unit in graph.units if unit.gated}
    try:
        found = method.place(graph.in_training(), method.config, lambda unit: unit.name in selected)
        if [site.name for site in found.sites] != [site.name for site in graph.sites]:
            raise TraceError("the gated units are not the same in training and in eval mode")
    except (TraceError, NoUnitError) as error:
        refusal = TraceError(
            f"the model's forward is another in training mode, and cannot be trained with its gates: {error}\n"
            "It can be used in eval mode; or take the branch on self.training out of its forward."
        )

        def refused(*_: Any) -> Any:
            raise refusal

        return refused
    return forward_of(found)[1]


def _compiled(calls: fx.Graph) -> tuple[str, Callable[..., Any]]:
    """Source of the forward, and the function (backbone, x, gates) it defines."""
    code = calls.python_code("self")
    name = f"<cofire gated forward {id(calls):x}>"
    scope = dict(code.globals)
    exec(compile(code.src, name, "exec"), scope)  # source made by torch.fx from the model's own calls
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)  # for tracebacks
    return code.src, scope["forward"]


_FUSING = {"reparameterize", "switch_to_deploy", "fuse_reparam"}  # what packages call it


def say_what_to_fuse(model: nn.Module) -> None:
    """A warning where blocks are still in the form that they are trained in, with parallel convs."""
    branched = [
        (name, way)
        for name, module in model.named_modules()
        for way in _FUSING & set(dir(type(module)))
        if sum(isinstance(inner, nn.Conv2d) for inner in module.modules()) > 1
    ]
    if branched:
        name, way = branched[0]
        logger.warning(
            "%d blocks (%s, ...) run parallel convs that become one for deployment; gates on these save less: call "
            "%s() of each first (timm: timm.utils.reparameterize_model(model)), then gate",
            len(branched),
            name,
            way,
        )

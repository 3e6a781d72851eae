"""Residual branches: what lies between a fork and the addition that joins it again."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from cofire.graph.graph import Graph
from cofire.graph.ops import Op


@dataclass(frozen=True)
class Branch:
    """The ops of a residual branch in execution order, what they start from, and what enters the addition."""

    fork: str
    inside: tuple[str, ...]
    end: str


def branch_of(graph: Graph, add: Op) -> Branch | None:
    """The residual branch of an addition, if it can be left out: its operand with the most convs of its own."""
    if len(add.sources) != 2 or graph[add.sources[0]].shape != graph[add.sources[1]].shape:
        return None
    reach = [ancestors(graph, graph[source]) for source in add.sources]
    own = [reach[0] - reach[1], reach[1] - reach[0]]
    convs = [num_convs(graph, names) for names in own]
    which = 0 if convs[0] > convs[1] else 1
    if convs[0] == convs[1]:
        return None
    inside = tuple(op.name for op in graph.ops if op.name in own[which])
    forks = {source for name in inside for source in graph[name].sources} - own[which]
    leaks = any(user.name not in own[which] and user is not add for name in inside for user in graph.users(graph[name]))
    if len(forks) != 1 or leaks:
        return None
    return Branch(forks.pop(), inside, add.sources[which])


def common_module(names: list[str]) -> str:
    """The path that all names begin with."""
    modules = [name.split(".")[:-1] for name in names]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    return ".".join(parts[0] for parts in same)


def ancestors(graph: Graph, op: Op) -> set[str]:
    """The names of ``op`` and of all that it is made of."""
    found, todo = {op.name}, [op]
    while todo:
        for name in todo.pop().sources:
            if name not in found:
                found.add(name)
                todo.append(graph[name])
    return found


def num_convs(graph: Graph, names: Iterable[str]) -> int:
    """How many of some ops are convs."""
    return sum(graph[name].is_conv for name in names)

"""Results of many runs -> accuracy given for MACs saved, and cost foretold against cost reached.

A result is what ``cofire train`` writes as ``result.json``; shares are in [0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from cofire.cost import Column
from cofire.errors import FileError
from cofire.reproduce import Reproduction
from cofire.paper import paper_tables

Result = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One network at one budget: share of MACs saved, and how much top-1 that cost against its dense form.

    Args:
        label: what it is called.
        reduction: share of the dense MACs saved, in [0, 1].
        drop: of top-1 against the dense network, in [-1, 1]; below 0 it got better.
        kind: points of one kind look alike, e.g. ``gated``, ``pruned``, ``paper: static``.
    """

    label: str
    reduction: float
    drop: float
    kind: str


@dataclass(frozen=True, kw_only=True)
class Foretold:
    """Share of MACs that a run's estimate promised before training, masks not applied and applied, and what came."""

    label: str
    independent: float
    cascade: float
    reached: float


def kind(result: Result) -> str:
    """``gated``, ``pruned``, ``pruned and gated`` or ``dense``."""
    recipe = _recipe(result)
    parts = [word for word, part in (("pruned", "prune"), ("gated", "gate")) if recipe.get(part) is not None]
    return " and ".join(parts) or "dense"


def points(results: Mapping[str, Result], column: Column = "executed") -> tuple[list[Point], list[str]]:
    """A point for each result that can be compared with a dense one, and the labels of those that cannot.

    The dense result of a run has the same data and backbone and neither gates nor pruning; of several
    the mean counts.

    Args:
        results: label -> result; the dense ones are among them.
        column: in which MACs are counted. The paper's own points are in ``paper``.
    """
    dense: dict[str, list[float]] = {}
    for result in results.values():
        if kind(result) == "dense":
            dense.setdefault(_network(result), []).append(result["test"]["top1"])
    found, left_out = [], []
    for label, result in results.items():
        base = dense.get(_network(result))
        if base is None:
            left_out.append(label)
        elif kind(result) != "dense":
            drop, reduction = sum(base) / len(base) - result["test"]["top1"], result["test"]["reduction"][column]
            found.append(Point(label=label, reduction=reduction, drop=drop, kind=kind(result)))
    return found, left_out


def reproduced_points(found: Reproduction) -> tuple[list[Point], list[Point]]:
    """Our points and the paper's in a table of the paper, MACs counted in its column ``paper``.

    A network's points are those of rows whose baseline and reduction are known.
    """
    ours, papers = [], []
    several = len({row.paper.network for row in found.rows}) > 1
    baseline: dict[str, float] = {}
    for row in found.rows:
        paper = row.paper.values
        if row.paper.method == "baseline" and "top1" in paper:
            baseline[row.paper.network] = mean(paper["top1"])
        method, static, _ = row.paper.method.partition(", static")
        label = f"{row.paper.network}, {method}" if several else method
        sort = "static" if static else "dynamic"
        drop, saved = row.ours("drop"), row.ours("reduction")
        if drop and saved and mean(saved) > 0:
            ours.append(Point(label=label, reduction=mean(saved) / 100, drop=mean(drop) / 100, kind=f"ours: {sort}"))
        if "reduction" in paper and ("drop" in paper or row.paper.network in baseline):
            lost = mean(paper["drop"]) if "drop" in paper else baseline[row.paper.network] - mean(paper["top1"])
            saved_share = mean(paper["reduction"]) / 100
            papers.append(Point(label=label, reduction=saved_share, drop=lost / 100, kind=f"paper: {sort}"))
    return ours, papers
def paper_points(result: Result) -> list[Point]:
    """What the paper has on the network and data of ``result``, in its own count (column ``paper``)."""
    recipe = _recipe(result)
    data, backbone = recipe["data"]["name"], _letters(recipe["backbone"]["name"])
    if data not in paper_tables():
        return []
    rows = [
        row for row in paper_tables()[data].rows if backbone in (_letters(row.network), _letters(row.network + data))
    ]
    found = []
    for row in rows:
        if row.method == "baseline":
            dense = row.values.get("top1", [])
        elif "reduction" in row.values:
            (reduction,), (top1,) = row.values["reduction"], row.values["top1"]
            (drop,) = row.values.get("drop", [dense[0] - top1])
            kind = next((word for word in ("FTWT", "static") if word in row.method), "other")
            point = Point(label=row.method, reduction=reduction / 100, drop=drop / 100, kind=f"paper: {kind}")
            found.append(point)
    return found


def _letters(name: str) -> str:
    """``ResNet-56`` and ``resnet56`` are one network."""
    return "".join(filter(str.isalnum, name.lower()))


def foretold(results: Mapping[str, Result], column: Column = "executed") -> list[Foretold]:
    """Estimated and reached reduction of each result that has an estimate in this column."""
    return [
        Foretold(
            label=label,
            independent=result["estimated"]["independent"][column],
            cascade=result["estimated"]["cascade"][column],
            reached=result["test"]["reduction"][column],
        )
        for label, result in results.items()
        if result.get("estimated") and column in result["estimated"]["cascade"]
    ]


def _recipe(result: Result) -> Mapping[str, Any]:
    recipe = result.get("experiment")
    if not isinstance(recipe, Mapping) or "test" not in result:
        raise FileError("a result must have the parts 'experiment' and 'test', as `cofire train` writes them")
    return recipe


def _network(result: Result) -> str:
    recipe = _recipe(result)
    data, backbone = recipe["data"], recipe["backbone"]
    return repr((data["name"], sorted(data["args"].items()), backbone["name"], sorted(backbone["args"].items())))

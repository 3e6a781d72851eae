"""Results of many runs -> accuracy given for MACs saved, and cost foretold against cost reached.

A result is what ``cofire train`` writes as ``result.json``; shares are in [0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from cofire.errors import FileError
from cofire.experiments.paper import PaperRow, paper_tables
from cofire.experiments.reproduce import Reproduction
from cofire.graph.cost import Column

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
    """Our points and the paper's in a table of the paper, MACs counted in its column ``paper``."""
    ours = []
    for row in found.rows:
        drop, saved = row.ours("drop"), row.ours("reduction")
        if drop and mean(saved) > 0:
            ours.append(
                Point(
                    label=f"{row.paper.network}, {row.paper.method}",
                    reduction=mean(saved) / 100,
                    drop=mean(drop) / 100,
                    kind=f"ours: {row.paper.sort}",
                )
            )
    return ours, _paper_points([row.paper for row in found.rows])


def paper_points(result: Result) -> list[Point]:
    """What the paper has on the network and data of ``result``, in its own count (column ``paper``)."""
    recipe = _recipe(result)
    data, backbone = recipe["data"]["name"], _letters(recipe["backbone"]["name"])
    rows = paper_tables()[data].rows if data in paper_tables() else ()
    return _paper_points([row for row in rows if backbone in (_letters(row.network), _letters(row.network + data))])


def _paper_points(rows: Sequence[PaperRow]) -> list[Point]:
    """Rows with a reduction; a drop that is not printed follows from the network's baseline, a row before."""
    found = []
    baseline: dict[str, float] = {}
    for row in rows:
        if row.method == "baseline" and "top1" in row.values:
            baseline[row.network] = mean(row.values["top1"])
        elif "reduction" in row.values and ("drop" in row.values or row.network in baseline):
            values = {column: mean(runs) for column, runs in row.values.items()}
            drop = values["drop"] if "drop" in values else baseline[row.network] - values["top1"]
            reduction, kind = values["reduction"] / 100, f"paper: {row.sort}"
            found.append(Point(label=row.method, reduction=reduction, drop=drop / 100, kind=kind))
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

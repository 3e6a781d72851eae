"""The paper's latency table, made anew on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rich.table import Table

from cofire.bench.ours import NAME
from cofire.bench.peers import PYTORCH
from cofire.bench.results import Result
from cofire.bench.rounds import ratio_of_medians
from cofire.bench.run import SLICED
from cofire.paper import paper_tables


@dataclass(frozen=True)
class Saved:
    """Shares saved, as the paper reports them."""

    macs: float
    latency: float


PAPER_NETWORK = "resnet34"


@cache
def paper_latency() -> tuple[Saved, ...]:
    """The rows of the paper's table, read when they are asked for."""
    return tuple(
        Saved(macs=row.values["reduction"][0] / 100, latency=row.values["latency_reduction"][0] / 100)
        for row in paper_tables()["latency"].rows
    )


def paper_rows(result: Result) -> list[dict[str, Any]]:
    """Latency saved against dense PyTorch, the paper's beside ours; None where an engine is missing.

    ``result`` has one point for each of `paper_latency`, in its order.
    """

    def saved(engine: str, point: int) -> float | None:
        timed, dense = result.of(engine, point), result.of(PYTORCH, None)
        return None if timed is None or dense is None else 1 - ratio_of_medians(timed.seconds, dense.seconds)

    return [
        {
            "network": result.network,
            "paper": {"macs_reduction": row.macs, "latency_reduction": row.latency},
            "executed_macs_reduction": result.points[point].executed_macs_reduction,
            "latency_reduction": {"sliced": saved(SLICED, point), NAME: saved(NAME, point)},
        }
        for point, row in enumerate(paper_latency())
    ]


def paper_table(result: Result) -> Table:
    """The same for people, in per cent."""

    def cell(share: float | None) -> str:
        return "not there" if share is None else f"{100 * share:.1f}"

    table = Table(title=f"{result.network}: % saved against dense PyTorch, one image", title_justify="left")
    columns = ("paper: FLOPs", "paper: latency", "here: MACs", "here: latency, sliced", "here: latency, cofire")
    for column in columns:
        table.add_column(column, justify="right")
    for row in paper_rows(result):
        here = row["latency_reduction"]
        paper = (row["paper"]["macs_reduction"], row["paper"]["latency_reduction"])
        table.add_row(*map(cell, (*paper, row["executed_macs_reduction"], here["sliced"], here[NAME])))
    return table

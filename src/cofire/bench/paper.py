"""The paper's latency table, made anew on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from cofire.bench.ours import NAME
from cofire.bench.peers import PEERS, PYTORCH
from cofire.bench.plan import random_plan
from cofire.bench.results import Result
from cofire.bench.rounds import ratio_of_medians
from cofire.bench.run import SLICED, bench
from cofire.experiments.paper import paper_tables
from cofire.text import Grid


@dataclass(frozen=True)
class Saved:
    """Shares saved, as the paper reports them."""

    macs: float
    latency: float


NETWORK = "resnet34"


@cache
def paper_latency() -> tuple[Saved, ...]:
    """The rows of the paper's table, read when they are asked for."""
    return tuple(
        Saved(macs=row.values["reduction"][0] / 100, latency=row.values["latency_reduction"][0] / 100)
        for row in paper_tables()["latency"].rows
    )


def measure(*, threads: int = 1, rounds: int = 100, warm_up: int = 10, seed: int = 0) -> Result:
    """The paper's network with random masks at the paper's costs: dense and sliced in PyTorch, and our engine."""
    plan = random_plan(NETWORK, macs=[1 - row.macs for row in paper_latency()], seed=seed)
    peers = tuple(peer for peer in PEERS if peer.name == PYTORCH)
    return bench(plan, threads=threads, rounds=rounds, warm_up=warm_up, peers=peers, precisions=["float32"])


def to_json(result: Result) -> dict[str, Any]:
    """What was measured, and the rows of the paper's table."""
    return {**result.to_json(), "paper_latency": paper_rows(result)}


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


def paper_table(network: str, rows: list[dict[str, Any]]) -> Grid:
    """The same for people, in per cent."""

    def cell(share: float | None) -> str:
        return "not there" if share is None else f"{100 * share:.1f}"

    cells = []
    for row in rows:
        theirs, here = row["paper"], row["latency_reduction"]
        shares = (theirs["macs_reduction"], theirs["latency_reduction"], row["executed_macs_reduction"])
        cells.append([cell(share) for share in (*shares, here["sliced"], here[NAME])])
    return Grid(
        title=f"{network}: % saved against dense PyTorch, one image",
        names=[],
        numbers=["paper: FLOPs", "paper: latency", "here: MACs", "here: latency, sliced", "here: latency, cofire"],
        rows=cells,
    )

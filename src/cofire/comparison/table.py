"""What a comparison found: as a table, as JSON, and where methods missed their budget or were refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, pstdev
from typing import Any

from rich.console import Group, RenderableType

from cofire.comparison.jobs import POINT, Outcome
from cofire.experiments.provenance import provenance
from cofire.experiments.recipes import Experiment, as_table
from cofire.text import Grid, percent, rendered

NAMES = ("method", "sort")
NUMBERS = (
    "top-1 %",
    "drop",
    "MACs %",
    "+ heads %",
    "off budget",
    "twin, top-1 %",
    "twin, trained",
    "bits",
    "ms",
    "of dense",
    "seeds",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A method: how each seed ended.

    Args:
        outcomes: seed -> how it ended; a seed that is still to be run is not in it.
        time: milliseconds in the engine (``mean`` over images, ``median``, ``p10``, ``p90``) and ``ratio`` to dense;
            None if not timed.
        not_timed: why the engine does not run it.
        timed_on: provenance of ``time``.
    """

    method: str
    sort: str
    outcomes: Mapping[int, Outcome]
    time: Mapping[str, float | None] | None = None
    not_timed: str | None = None
    timed_on: Mapping[str, Any] | None = None

    @property
    def results(self) -> list[dict[str, Any]]:
        """Of the seeds that have one."""
        return [outcome.result for outcome in self.outcomes.values() if outcome.result is not None]

    @property
    def refused(self) -> str | None:
        """Why there is no result, if that is so."""
        return next((outcome.refused for outcome in self.outcomes.values() if outcome.refused is not None), None)

    @property
    def reached(self) -> float:
        """The share of the MACs that is executed, what decides included; mean over seeds."""
        return mean(self.values("heads" if self.sort == "dynamic" else "executed"))

    def values(self, name: str) -> list[float]:
        """One for each seed that has it.

        ``top1``; ``executed`` and ``heads``, the share of the MACs without and with heads; ``bits``; and top-1 of the
        ``twin``, of the ``trained twin``, and of the model ``calibrated`` to the budget.
        """
        if name == "trained twin":
            return [result["twin"]["top1"] for result in self.results if "twin" in result]
        if name in ("twin", "calibrated"):
            rows = [outcome.row or {} for outcome in self.outcomes.values()]
            return [row[name]["top1"] for row in rows if "top1" in (row.get(name) or {})]
        tests = [result["test"] for result in self.results]
        if name == "executed":
            return [1 - test["reduction"]["executed"] for test in tests]
        if name == "heads":
            return [1 - test["reduction"]["executed+heads"] for test in tests]
        return [test[name] for test in tests if test[name] is not None]


@dataclass(frozen=True, kw_only=True)
class Network:
    """One recipe's methods beside its baseline.

    Args:
        base: what all have in common.
        dense: result of the baseline.
        timing: what `timed` gave; None if nothing was timed.
    """

    base: Experiment
    macs: float
    dense: dict[str, Any]
    rows: Sequence[Row]
    timing: Mapping[str, Any] | None

    @property
    def title(self) -> str:
        """What was compared, in a line."""
        part, train, network = self.base.data, self.base.train, self.base.backbone.name
        taught = f", distillation {train.distill:g}" if train.distill else ""
        return (
            f"{self.base.name}: {network} on {part.name}, {percent(self.macs, 0)} of the MACs asked for, "
            f"{train.epochs} epochs{taught}, best epoch by {part.val} validation images, "
            f"n = {self.dense['test']['n']} test images"
        )

    def grid(self) -> Grid:
        """The table; rows of methods by falling accuracy."""
        top1 = self.dense["test"]["top1"]
        time = (self.timing or {"ms": {}})["ms"].get("dense")
        first = ["dense", "", f"{100 * top1:.2f}", "", "100.0", *[""] * 5, _ms(time), "1.000" if time else "", ""]
        ranked = sorted(self.rows, key=lambda row: -mean(row.values("top1") or [-1.0]))
        return Grid(title=self.title, names=NAMES, numbers=NUMBERS, rows=[first, [], *map(self._cells, ranked)])

    def _cells(self, row: Row) -> list[str]:
        if not row.results:
            return [row.method, row.sort, "refused" if row.refused else "not run yet", *[""] * (len(NUMBERS) - 1)]
        drops = [self.dense["test"]["top1"] - top1 for top1 in row.values("top1")]
        off = 100 * (row.reached - self.macs)
        ratio = None if row.time is None else row.time["ratio"]
        dynamic = row.sort == "dynamic"
        return [
            row.method,
            row.sort,
            _shown(row.values("top1"), 2),
            _shown(drops, 2),
            _shown(row.values("executed"), 1),
            _shown(row.values("heads"), 1) if dynamic else "",
            f"{off:+.1f}" if abs(off) > 100 * POINT else "met",
            _shown(row.values("twin"), 2),
            _shown(row.values("trained twin"), 2),
            "".join(f"{mean(bits):.3f}" for bits in [row.values("bits")] if bits) if dynamic else "",
            _ms(row.time),
            "" if ratio is None else f"{ratio:.3f}",
            ", ".join(str(seed) for seed, outcome in row.outcomes.items() if outcome.result),
        ]

    def notes(self) -> list[str]:
        """What the table leaves out: budgets that were missed, and why something is not there."""
        found = []
        for row in self.rows:
            if row.refused:
                found.append(f"{row.method} was not run: {row.refused}")
            if row.results and abs(row.reached - self.macs) > POINT:
                reached = f"{percent(row.reached)} of the MACs are executed"
                found.append(f"{row.method} missed the budget: {reached}, {percent(self.macs)} were asked for")
                if moved := row.values("calibrated"):
                    found[-1] += f"; with its threshold moved there, top-1 {percent(mean(moved), 2)}"
            found += [f"{row.method} has no static twin: {why}" for why in self._without_twin(row)]
            if row.not_timed:
                found.append(f"{row.method} is not timed: {row.not_timed}")
            if row.time is not None and self._elsewhere(row):
                found.append(
                    f"{row.method} was timed in other rounds than the dense network here: only its ratio compares"
                )
        return found

    def _elsewhere(self, row: Row) -> bool:
        """Whether its time is of another machine or another day than that of the dense network."""
        return row.timed_on is not None and row.timed_on != (self.timing or {}).get("provenance")

    @staticmethod
    def _without_twin(row: Row) -> list[str]:
        rows = [outcome.row or {} for outcome in row.outcomes.values()]
        return [twin["refused"] for twin in [(found.get("twin") or {}) for found in rows][:1] if "refused" in twin]

    def to_json(self) -> dict[str, Any]:
        """Everything, with every result in full."""
        rows = [
            {
                "method": row.method,
                "sort": row.sort,
                "time": row.time,
                "not_timed": row.not_timed,
                "timed_on": row.timed_on,
                "seeds": {str(seed): dataclasses.asdict(outcome) for seed, outcome in row.outcomes.items()},
            }
            for row in self.rows
        ]
        head = {"title": self.title, "macs": self.macs, "recipe": as_table(self.base)}
        return {**head, "dense": self.dense, "rows": rows, "timing": self.timing, "notes": self.notes()}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `compare` found, a table per recipe."""

    networks: Sequence[Network]

    def to_json(self) -> dict[str, Any]:
        """All tables, results and notes, as JSON values."""
        return {"provenance": provenance(), "networks": [network.to_json() for network in self.networks]}

    def to_markdown(self) -> str:
        """The tables, and what they leave out."""
        parts = []
        for network in self.networks:
            notes = "\n".join(f"- {note}" for note in network.notes())
            parts.append(network.grid().to_markdown() + (f"\n\n{notes}" if notes else ""))
        return "\n\n".join(parts)

    def __rich__(self) -> Group:
        parts: list[RenderableType] = []
        for network in self.networks:
            parts += [network.grid(), *network.notes()]
        return Group(*parts)

    def __str__(self) -> str:
        return rendered(self.__rich__(), width=160)


def _shown(shares: Sequence[float], digits: int) -> str:
    """In per cent: the mean, and the spread if there are several."""
    if not shares:
        return ""
    spread = f" ± {100 * pstdev(shares):.{digits}f}" if len(shares) > 1 else ""
    return f"{100 * mean(shares):.{digits}f}{spread}"


def _ms(time: Mapping[str, float | None] | None) -> str:
    return "" if time is None else f"{time['mean']:.3f}"

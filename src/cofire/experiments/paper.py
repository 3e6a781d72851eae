"""The paper's numbers, from paper.toml: the only place they are written down."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Budget = Literal["short", "paper"]
"""What a row may cost: our recipes for two cores, or the paper's own settings."""


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """One row: what the paper says, and the recipes that make it.

    Args:
        values: column -> what is printed, in per cent or hours; one value, or one per run.
        recipes: budget -> name of a recipe, its path below ``recipes/`` without the suffix.
    """

    network: str
    method: str
    values: dict[str, list[float]]
    recipes: dict[str, str]

    @property
    def sort(self) -> str:
        """The paper's own method, a static one, or another."""
        return next((word for word in ("FTWT", "static") if word in self.method), "other")


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """One table.

    Args:
        columns: keys of the rows' values, in the order of print.
        seeds: how many runs of each row are asked for.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    seeds: int
    rows: tuple[PaperRow, ...]


@cache
def read_paper() -> dict[str, Any]:
    """Everything in paper.toml, table by table."""
    return tomllib.loads((Path(__file__).parent / "paper.toml").read_text(encoding="utf-8"))


def paper_tables() -> dict[str, PaperTable]:
    """Name -> table, of those that have rows of networks and methods."""
    return {name: _table(name, part) for name, part in read_paper().items() if "rows" in part}


def _table(name: str, part: dict[str, Any]) -> PaperTable:
    columns = tuple(part["columns"])
    return PaperTable(
        name=name,
        title=part["title"],
        columns=columns,
        seeds=part.get("seeds", 1),
        rows=tuple(_row(row, columns) for row in part["rows"]),
    )


def _row(row: dict[str, Any], columns: tuple[str, ...]) -> PaperRow:
    found = {column: row[column] for column in columns if column in row}
    return PaperRow(
        network=row["network"],
        method=row["method"],
        values={column: value if isinstance(value, list) else [value] for column, value in found.items()},
        recipes={budget: row[budget] for budget in ("short", "paper") if budget in row},
    )

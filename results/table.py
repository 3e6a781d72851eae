"""The README's results table, from the result files in this folder; no number in it is typed by hand.

Usage: python results/table.py           prints the table
       python results/table.py --write   puts it into README.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- results: ", "<!-- end of results -->"


def runs() -> dict[str, list[dict[str, Any]]]:
    """Results of `cofire train`, those that differ only in their seed together."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(HERE.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if "experiment" in result:
            table = result["experiment"]
            key = json.dumps({**table, "train": {**table["train"], "seed": None}}, sort_keys=True)
            grouped.setdefault(key, []).append(result)
    return grouped


def cell(values: list[float]) -> str:
    spread = f" ± {100 * pstdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.2f} %{spread}"


def row(results: list[dict[str, Any]]) -> str:
    first = results[0]
    table, machine = first["experiment"], first["provenance"]["machine"]
    gate = table.get("gate")
    method = f"{gate['type']} r = {gate['ratio']:g}, {gate['mode']}" if gate else "dense"
    saved = [cell([r["test"]["reduction"][c] for r in results]) for c in ("paper", "executed", "executed+heads")]
    cells = [
        f"{table['backbone']['name']}, {table['data']['name']}",
        method,
        f"{len(first['epochs'])}",
        cell([r["test"]["top1"] for r in results]),
        *saved,
        f"{first['test']['n']}",
        ", ".join(str(r["experiment"]["train"]["seed"]) for r in results),
        f"{machine['cores']} cores, {machine['cpu']}",
    ]
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    columns = (
        *("network", "method", "epochs", "top-1", "MACs saved: `paper`", "`executed`", "`executed+heads`"),
        *("n", "seeds", "machine"),
    )
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *(row(results) for results in runs().values())])


def with_table(text: str) -> str:
    """``text`` with the part between the markers replaced."""
    before, rest = text.split(BEGIN, 1)
    note, rest = rest.split("\n", 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}{note}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())

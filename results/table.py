"""The results tables of the documents: what `cofire reproduce` finds in this folder; no number is typed by hand.

Usage: python results/table.py           prints them
       python results/table.py --write   puts them into README.md and docs/
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cofire.experiments.reproduce import reproduce
from cofire.measured import MEASURED
from cofire.text import markdown

HERE = Path(__file__).parent
ROOT = HERE.parent
DOCUMENTS = {
    ROOT / "README.md": ("cifar10", "imagenet"),
    ROOT / "docs" / "reproduce.md": ("options",),
    ROOT / "docs" / "shift.md": ("shift",),
    ROOT / "docs" / "engine.md": ("engine",),
}
BEGIN, END = "<!-- results: ", "<!-- end of results -->"


def tables(names: Sequence[str]) -> str:
    found = [engine() if name == "engine" else measured(name) if name in MEASURED else trained(name) for name in names]
    return "\n\n".join(filter(None, found))


def engine() -> str:
    """What `benchmarks/latency.py` found; bold: within its limit."""
    networks = json.loads((HERE / "bench_latency.json").read_text(encoding="utf-8"))["networks"]
    shares = sorted({row["macs"] for found in networks.values() for row in found["rows"]}, reverse=True)
    rows = []
    for name, found in networks.items():
        cell = {row["macs"]: f"{row['middle']:.3f}" for row in found["rows"]}
        cell |= {row["macs"]: f"**{cell[row['macs']]}**" for row in found["rows"] if row["middle"] <= row["limit"]}
        against = sorted({run["fastest_dense"] for run in found["runs"]})
        pixels = found["runs"][0]["input_shape"][-1]
        rows.append([f"{name}, {pixels}", *(cell.get(share, "") for share in shares), ", ".join(against)])
    return markdown(["network, pixels", "dense", *(f"{100 * s:.0f} % of MACs" for s in shares[1:]), "against"], rows)


def trained(name: str) -> str:
    """A table of runs; empty if none was run."""
    found = reproduce(name, recipes=ROOT / "recipes", results=HERE)
    if not any(row.results for row in found.rows):
        return ""
    return f"{found.table.title}, made on {found.machines()}:\n\n{found.to_markdown(only_run=True)}"


def measured(name: str) -> str:
    """A table that is one result file; empty if it is not there."""
    found = MEASURED[name].read("short", ROOT / "recipes", HERE)
    return MEASURED[name].table(found).to_markdown() if found else ""


def written(document: Path) -> str:
    """A document's text with what stands between its markers replaced."""
    before, rest = document.read_text(encoding="utf-8").split(BEGIN, 1)
    note, rest = rest.split("\n", 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}{note}\n{tables(DOCUMENTS[document])}\n{END}{after}"


if __name__ == "__main__":
    for document in DOCUMENTS:
        if "--write" in sys.argv:
            document.write_text(written(document), encoding="utf-8")
        else:
            print(tables(DOCUMENTS[document]))

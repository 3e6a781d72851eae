"""The results tables of the documents: what `cofire reproduce` finds in this folder; no number is typed by hand.

Usage: python results/table.py           prints them
       python results/table.py --write   puts them into README.md and docs/
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cofire.measured import MEASURED
from cofire.reproduce import reproduce

HERE = Path(__file__).parent
ROOT = HERE.parent
DOCUMENTS = {
    ROOT / "README.md": ("cifar10", "imagenet"),
    ROOT / "docs" / "reproduce.md": ("options",),
    ROOT / "docs" / "shift.md": ("shift",),
}
BEGIN, END = "<!-- results: ", "<!-- end of results -->"


def tables(names: Sequence[str]) -> str:
    found = [measured(name) if name in MEASURED else trained(name) for name in names]
    return "\n\n".join(filter(None, found))


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

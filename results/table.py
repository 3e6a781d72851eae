"""The README's results tables: what `cofire reproduce` finds in this folder; no number in them is typed by hand.

Usage: python results/table.py           prints them
       python results/table.py --write   puts them into README.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from cofire.reproduce import reproduce

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- results: ", "<!-- end of results -->"
TABLES = ("cifar10", "imagenet")


def tables() -> str:
    found = [reproduce(name, recipes=HERE.parent / "recipes", results=HERE) for name in TABLES]
    run = [table for table in found if any(row.results for row in table.rows)]
    return "\n\n".join(
        f"{table.table.title}, made on {table.machines()}:\n\n{table.to_markdown(only_run=True)}" for table in run
    )


def with_tables(text: str) -> str:
    """``text`` with the part between the markers replaced."""
    before, rest = text.split(BEGIN, 1)
    note, rest = rest.split("\n", 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}{note}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tables())

"""Tables as text: one way to print what the command line and ``print`` show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A titled table for terminals and for Markdown.

    Args:
        names: headings of the first columns, which are words.
        numbers: headings of the others.
        rows: as many cells as there are headings; an empty row is a line between the others.
    """

    title: str
    names: Sequence[str]
    numbers: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich__(self) -> Group:
        table = Table()
        for name in self.names:
            table.add_column(name, no_wrap=True)
        for number, name in enumerate(self.numbers, len(self.names)):
            widest = max((len(row[number]) for row in self.rows if row), default=0)  # headings may fold, numbers never
            table.add_column(name, justify="right", vertical="bottom", overflow="fold", min_width=widest)
        for row in self.rows:
            if row:
                table.add_row(*row)
            else:
                table.add_section()
        return Group(Text(self.title, style="italic"), table, "")

    def __str__(self) -> str:
        return rendered(self.__rich__())

    def to_markdown(self) -> str:
        """Title and table."""
        return f"{self.title}:\n\n{markdown([*self.names, *self.numbers], [row for row in self.rows if row])}"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def rendered(what: RenderableType, width: int = 120) -> str:
    """``what`` as plain text without colours or trailing blanks."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(what)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def percent(share: float, digits: int = 1) -> str:
    """0.1234 -> '12.3 %'."""
    return f"{100 * share:.{digits}f} %"

"""Where the time of an engine's call goes, op by op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Profile:
    """Where the time of one image went; lists run over ops."""

    names: list[str]
    algorithms: list[str]
    precisions: list[str]
    """``int8`` or ``float32``."""
    reasons: list[str]
    """Why an op of a quantised program is in float32; empty where there is nothing to say."""
    milliseconds: list[float]
    macs: list[int]

    def __str__(self) -> str:
        from cofire.text import rendered

        return rendered(self.__rich__())

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(title=f"{sum(self.milliseconds):.3f} ms, {sum(self.macs):,} MACs", title_justify="left")
        table.add_column("op")
        table.add_column("algorithm")
        table.add_column("precision")
        for column in ("ms", "MACs", "MACs / ns"):
            table.add_column(column, justify="right")
        for name, how, precision, reason, ms, macs in zip(
            self.names, self.algorithms, self.precisions, self.reasons, self.milliseconds, self.macs, strict=True
        ):
            what = f"{precision}: {reason}" if reason else precision
            table.add_row(name, how, what, f"{ms:.3f}", f"{macs:,}", f"{macs / max(ms, 1e-9) / 1e6:.1f}")
        return table

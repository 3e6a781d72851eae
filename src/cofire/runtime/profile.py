"""Where the time of an engine's call goes, op by op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cofire.runtime.floors import Speeds

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
    floors: list[tuple[float, float]]
    """Milliseconds that the op's products alone, and its bytes alone, would take at the measured speeds."""
    speeds: Speeds

    def __str__(self) -> str:
        from cofire.text import rendered

        return rendered(self.__rich__())

    def __rich__(self) -> Table:
        from rich.table import Table

        floor = sum(max(pair) for pair in self.floors)
        title = f"{sum(self.milliseconds):.3f} ms, floor {floor:.3f} ms, {sum(self.macs):,} MACs"
        at_best = (
            f"at best {self.speeds.macs / 1e9:.0f} MACs / ns in float32, {self.speeds.macs8 / 1e9:.0f} in int8, "
            f"{self.speeds.macs16 / 1e9:.0f} in its Winograd, "
            f"{self.speeds.bytes / 1e9:.1f} GB/s"
        )
        table = Table(title=title, title_justify="left", caption=at_best, caption_justify="left")
        table.add_column("op")
        table.add_column("algorithm")
        table.add_column("precision")
        for column in ("ms", "MACs", "MACs / ns", "ms of products", "ms of bytes"):
            table.add_column(column, justify="right")
        columns = (
            self.names,
            self.algorithms,
            self.precisions,
            self.reasons,
            self.milliseconds,
            self.macs,
            self.floors,
        )
        for name, how, precision, reason, ms, macs, floors in zip(*columns, strict=True):
            what = f"{precision}: {reason}" if reason else precision
            rate = f"{macs / max(ms, 1e-9) / 1e6:.1f}"
            table.add_row(name, how, what, f"{ms:.3f}", f"{macs:,}", rate, *(f"{floor:.3f}" for floor in floors))
        return table

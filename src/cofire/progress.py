"""How far a long piece of work has come, as a bar on standard error."""

from __future__ import annotations

import os

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress(text: str) -> Progress:
    """A bar on standard error that goes away when done; silent without ``text`` or without a terminal.

    Of several processes (torchrun, accelerate launch) the first shows it for all.
    """
    console = Console(stderr=True)
    shown = bool(text) and console.is_terminal and os.environ.get("RANK", "0") == "0"
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not shown)

"""How far a long piece of work has come: a bar on a terminal, a line now and then elsewhere; on standard error."""

from __future__ import annotations

import os
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

EVERY = 30.0  # seconds between two lines


def progress(text: str) -> Progress:
    """A bar that goes away when done; without a terminal, a line every half minute. Silent without ``text``.

    Of several processes (torchrun, accelerate launch) the first shows it for all.
    """
    console = Console(stderr=True)
    shown = bool(text) and os.environ.get("RANK", "0") == "0"
    if shown and not console.is_terminal:
        return _Lines(console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not shown)


class _Lines(Progress):
    """Lines in place of a bar, for logs; nothing for work that is done sooner than a line is due.

    Bars that follow one another are one piece of work, with one clock.
    """

    _due = _seen = float("-inf")

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, disable=True, auto_refresh=False)  # else `track` counts in a thread of a bar
        now = time.monotonic()
        if now - _Lines._seen > EVERY:
            _Lines._due = now + EVERY
        _Lines._seen = now

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._tell(task_id)

    def update(self, task_id: TaskID, **fields: Any) -> None:
        super().update(task_id, **fields)
        self._tell(task_id)

    def _tell(self, task_id: TaskID) -> None:
        _Lines._seen = now = time.monotonic()
        if now < _Lines._due:
            return
        _Lines._due = now + EVERY
        task = next(task for task in self.tasks if task.id == task_id)
        total = f" of {task.total:g} ({task.percentage:.0f} %)" if task.total else ""
        self.console.print(f"{task.description}: {task.completed:g}{total}", markup=False, highlight=False)

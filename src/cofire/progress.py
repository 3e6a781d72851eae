"""How far a long piece of work has come, on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


def progress(text: str) -> Progress:
    """A bar on standard error that goes away when done; without a terminal, a line each half minute.

    Silent without ``text``. Of several processes (torchrun, accelerate launch) the first shows it for all.
    """
    console = Console(stderr=True)
    shown = bool(text) and os.environ.get("RANK", "0") == "0"
    if shown and not console.is_terminal:
        return _Lines(disable=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not shown)


class _Lines(Progress):
    """Where nobody watches: what was done so far, as a line of a log, not more often than it is worth."""

    every = 30.0  # seconds

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.said = time.monotonic()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        if time.monotonic() - self.said >= self.every:
            self.said = time.monotonic()
            task = self.tasks[self.task_ids.index(task_id)]
            of = "" if task.total is None else f" of {task.total:g}"
            sys.stderr.write(f"{task.description}: {task.completed:g}{of}\n")

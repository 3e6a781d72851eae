"""The log of a run: one JSON object per line, which a resumed run continues exactly where its checkpoint was."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cofire.errors import FileError
from cofire.files.atomic import write_text

_TRACKED = ("loss", "mask_loss", "lr", "val_top1", "val_reduction")
_TRACK_STEPS = 50  # steps between those that are tracked


class RunLog:
    """Writes steps and epochs to ``path``, or nowhere if it is None.

    Args:
        track: is told the figures of each epoch by name, and its last step; also, as ``step/...``, every 50th step.
    """

    def __init__(self, path: Path | None, track: Callable[[dict[str, float], int], None]) -> None:
        self.path, self._track = path, track
        self._lines: list[str] = []
        self._lr = 0.0

    def step(self, *, step: int, lr: float, **values: Any) -> None:
        """One training step, the ``step``-th, with learning rate ``lr``."""
        self._lr = lr
        self._add({"event": "step", "step": step, "lr": lr, **values})
        if step % _TRACK_STEPS == 0:
            self._track({f"step/{name}": value for name, value in _tracked({**values, "lr": lr}).items()}, step)

    def epoch(self, step: int, record: Any) -> None:
        """One epoch that ended with ``step``; a dataclass."""
        values = dataclasses.asdict(record)
        self._add({"event": "epoch", "step": step, **values})
        self.flush()
        self._track(_tracked({**values, "lr": self._lr}), step)

    def flush(self) -> None:
        """Append what was logged since the last time."""
        if self.path is None or not self._lines:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(self._lines))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FileError(f"{self.path} cannot be written: {error}") from error
        self._lines = []

    def rewind(self, step: int) -> None:
        """Drop lines after ``step``: the run goes on from there and logs them again."""
        if self.path is None or not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if _is_until(line, step)]
        text = "".join(f"{line}\n" for line in kept)
        write_text(self.path, text)

    def _add(self, value: dict[str, Any]) -> None:
        if self.path is not None:
            self._lines.append(json.dumps(value) + "\n")


def _tracked(values: dict[str, Any]) -> dict[str, float]:
    return {name: values[name] for name in _TRACKED if values.get(name) is not None}


def _is_until(line: str, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False  # the line that was being written when the run was killed

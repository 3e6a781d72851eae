"""The log of a run: one JSON object per line, which a resumed run continues exactly where its checkpoint was."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from cofire.errors import FileError
from cofire.files import write_text


class RunLog:
    """Writes steps and epochs to ``path``, or nowhere if it is None."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lines: list[str] = []

    def step(self, **values: Any) -> None:
        """One training step; must have ``step``, its number."""
        self._add({"event": "step", **values})

    def epoch(self, step: int, record: Any) -> None:
        """One epoch that ended with ``step``; a dataclass."""
        self._add({"event": "epoch", "step": step, **dataclasses.asdict(record)})
        self.flush()

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


def _is_until(line: str, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False  # the line that was being written when the run was killed

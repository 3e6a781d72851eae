"""The paper's shift tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from cofire.experiments.paper import Budget, read_paper
from cofire.files.strict import structure

PUBLISHED = ("dense", "FTWT", "Taylor", "uniform")
"""The models that the paper compares."""


@dataclass(frozen=True, kw_only=True)
class PaperShiftRow:
    """Brier scores at one severity; ``ftwt`` has the softmax."""

    severity: float
    dense: float
    ftwt: float
    taylor: float
    uniform: float
    without_softmax: float | None = None

    @property
    def published(self) -> tuple[float, ...]:
        """In the order of ``PUBLISHED``."""
        return self.dense, self.ftwt, self.taylor, self.uniform


@dataclass(frozen=True, kw_only=True)
class PaperShift:
    """What the paper measured.

    Args:
        brier: corruption -> its rows, by rising severity.
        recipes: budget -> recipes of the models that are compared, the dense one first.
    """

    title: str
    network: str
    data: str
    flops_saved: float
    recipes: dict[Budget, tuple[str, ...]]
    brier: dict[str, tuple[PaperShiftRow, ...]]

    def rows(self, data: str, corruption: str) -> dict[float, PaperShiftRow]:
        """Severity -> row for images of a set; empty where the paper has none for that set."""
        same = data.split()[:1] == [self.data]  # sets are called "cifar10 test"
        return {row.severity: row for row in self.brier.get(corruption, ())} if same else {}


@cache
def paper_shift() -> PaperShift:
    """The paper's numbers."""
    return structure(PaperShift, read_paper()["shift"], "paper.toml [shift]")

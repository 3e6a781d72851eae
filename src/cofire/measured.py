"""The paper's tables that are measured, not trained: latency and dataset shift, read from a result file or made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from cofire.bench import paper as latency
from cofire.errors import FileError
from cofire.experiments.paper import Budget, paper_tables
from cofire.experiments.provenance import provenance
from cofire.experiments.recipes import parse_experiment, read_experiment
from cofire.experiments.reproduce import run_recipe
from cofire.files.atomic import read_json
from cofire.shift.measure import PAPER
from cofire.shift.paper import paper_shift
from cofire.shift.results import Shift
from cofire.shift.runs import shift_runs
from cofire.text import Grid


class AbstractMeasured(ABC):
    """A table whose numbers are one file below ``results/``."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What the paper shows there."""

    @abstractmethod
    def file(self, budget: Budget) -> str:
        """Name of the result file."""

    @abstractmethod
    def measure(self, budget: Budget, recipes: Path, results: Path, say: Callable[[str], None]) -> dict[str, Any]:
        """What the file is to hold; trains first what is not there. ``say`` is told what is being done."""

    @abstractmethod
    def table(self, found: dict[str, Any]) -> Grid | Shift:
        """The file's numbers with the paper's beside them."""

    def read(self, budget: Budget, recipes: Path, results: Path) -> dict[str, Any] | None:
        """What the file holds; None if it is not there or was made by other recipes.

        Raises:
            FileError: the file is damaged.
        """
        path = results / self.file(budget)
        if not path.exists():
            return None
        found: dict[str, Any] = read_json(path)
        try:
            self.table(found)
            return found if self.is_current(found, budget, recipes) else None
        except (KeyError, TypeError, AttributeError) as error:
            raise FileError(f"{path} is damaged: {error!r}") from error

    @abstractmethod
    def is_current(self, found: dict[str, Any], budget: Budget, recipes: Path) -> bool:
        """Whether the file was made by the recipes as they stand."""


@final
class Latency(AbstractMeasured):
    """Of one image, with random masks: there is nothing to train."""

    @property
    def title(self) -> str:
        return paper_tables()["latency"].title

    def file(self, budget: Budget) -> str:
        return "bench_paper_latency.json"

    def measure(self, budget: Budget, recipes: Path, results: Path, say: Callable[[str], None]) -> dict[str, Any]:
        return {"provenance": provenance(), **latency.to_json(latency.measure())}

    def table(self, found: dict[str, Any]) -> Grid:
        return latency.paper_table(found["network"], found["paper_latency"])

    def is_current(self, found: dict[str, Any], budget: Budget, recipes: Path) -> bool:
        return True


@final
class DatasetShift(AbstractMeasured):
    """Brier scores of dense, gated and pruned models under blur and noise."""

    @property
    def title(self) -> str:
        return paper_shift().title

    def file(self, budget: Budget) -> str:
        return f"shift_{budget}.json"

    def measure(self, budget: Budget, recipes: Path, results: Path, say: Callable[[str], None]) -> dict[str, Any]:
        folders = [run_recipe(recipe, 0, recipes, results, say) for recipe in paper_shift().recipes[budget]]
        return shift_runs(folders, PAPER)[1]

    def table(self, found: dict[str, Any]) -> Shift:
        return Shift.from_json(found)

    def is_current(self, found: dict[str, Any], budget: Budget, recipes: Path) -> bool:
        made_by = [parse_experiment(run["experiment"]) for run in found["runs"].values()]
        return made_by == [read_experiment(recipes / f"{recipe}.toml") for recipe in paper_shift().recipes[budget]]


MEASURED: dict[str, AbstractMeasured] = {"latency": Latency(), "shift": DatasetShift()}
"""Name -> table."""

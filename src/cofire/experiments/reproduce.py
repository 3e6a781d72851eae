"""The paper's tables with our numbers beside them: read from result files, or run."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

from rich.table import Table

from cofire import zoo
from cofire.errors import CofireError, ConfigError, FileError, unknown
from cofire.experiments.paper import Budget, PaperRow, PaperTable, paper_tables
from cofire.experiments.recipes import Experiment, parse_experiment, read_experiment, read_run
from cofire.experiments.runs import read_result, runs_root, train_experiment
from cofire.files.atomic import read_json, write_json
from cofire.text import markdown, rendered

logger = logging.getLogger("cofire")

Result = dict[str, Any]
"""What `cofire train` writes to result.json."""

NOT_RUN = "not run"
_HEADINGS = {
    "top1": "top-1 %",
    "drop": "drop",
    "reduction": "MACs saved %",
    "estimated": "estimated %",
    "hours": "hours",
}
_HONEST = {"twin": "static twin: top-1 %", "bits": "bits per filter"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the paper, and our results for it, one per seed; ``dense`` are those of its network's baseline."""

    paper: PaperRow
    recipe: str | None
    results: list[Result]
    dense: list[Result]

    def ours(self, column: str) -> list[float]:
        """Our values, one per seed; empty if the row was not run or has no such value."""
        if column == "drop":
            dense = _values("top1", self.dense)
            return [mean(dense) - top1 for top1 in _values("top1", self.results)] if dense else []
        return _values(column, self.results)


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A table of the paper with ours beside it."""

    table: PaperTable
    budget: Budget
    rows: list[Row]

    def headings(self) -> list[str]:
        """One for each cell of a row."""
        pairs = [f"{whose}: {_HEADINGS[column]}" for column in self.table.columns for whose in ("paper", "ours")]
        honest = [_HONEST[column] for column in self._honest()]
        return ["network", "method", *pairs, "`executed` %", "`+heads` %", *honest, "epochs", "n", "seeds"]

    def _honest(self) -> list[str]:
        """The columns that say what being dynamic is worth, where a row has a value for them."""
        return [column for column in _HONEST if any(row.ours(column) for row in self.rows)]

    def cells(self, row: Row) -> list[str]:
        """A row as text."""
        cells = [row.paper.network, row.paper.method]
        for column in self.table.columns:
            missing = NOT_RUN if row.paper.recipes and not row.results else ""
            cells += [_cell(row.paper.values.get(column, [])), _cell(row.ours(column)) or missing]
        cells += [_cell(row.ours(column)) for column in ("executed", "executed+heads")]
        cells += [_cell(row.ours(column), 3 if column == "bits" else 2) for column in self._honest()]
        return [*cells, *_circumstances(row.results)]

    def __str__(self) -> str:
        return rendered(self.__rich__(), width=180)  # a terminal may wrap long lines, which beats squeezing cells

    def __rich__(self) -> Table:
        title = f"{self.table.title}; {self.budget} recipes"
        table = Table(title=title, title_justify="left", caption=self.machines(), caption_justify="left")
        for number, heading in enumerate(self.headings()):
            named = number < 2
            table.add_column(heading.replace("`", ""), justify="left" if named else "right", no_wrap=named)
        for row in self.rows:
            table.add_row(*self.cells(row))
        return table

    def machines(self) -> str:
        """Where our numbers were made."""
        return made_on([result for row in self.rows for result in row.results])

    def to_markdown(self, *, only_run: bool = False) -> str:
        """As a Markdown table, of all rows or of those that were run."""
        return markdown(self.headings(), [self.cells(row) for row in self.rows if row.results or not only_run])

    def to_json(self) -> dict[str, Any]:
        """Numbers as lists over seeds, with what each was made by."""
        columns = (*self.table.columns, "executed", "executed+heads", *self._honest())
        rows = [
            {
                "network": row.paper.network,
                "method": row.paper.method,
                "recipe": row.recipe,
                "paper": row.paper.values,
                "ours": {column: row.ours(column) for column in columns},
                "provenance": [result["provenance"] for result in row.results],
            }
            for row in self.rows
        ]
        return {"table": self.table.name, "title": self.table.title, "budget": self.budget, "rows": rows}


def reproduce(
    name: str,
    *,
    budget: Budget = "short",
    recipes: str | Path = "recipes",
    results: str | Path = "results",
    only: str = "",
) -> Reproduction:
    """A table of the paper, our numbers read from the result files.

    A file counts for a row if it was made by the row's recipe as it stands, whatever the seed.

    Args:
        name: one of `tables`.
        budget: whose recipes: ``short`` ones for two cores, or the ``paper``'s.
        recipes: folder of the recipes.
        results: folder of the result files, at any depth.
        only: rows whose network and method contain this text.
    """
    if name not in tables():
        raise unknown("table of the paper:", name, tables())
    table, recipes = paper_tables()[name], Path(recipes)
    if not recipes.is_dir():
        raise FileError(f"{recipes} must be the folder of cofire's recipes; run this in a clone, or pass --recipes")
    found = list(_read_results(Path(results)))
    baselines: dict[str, list[Result]] = {}
    rows = []
    for paper in table.rows:
        recipe = paper.recipes.get(budget)
        mine = _results_of(read_experiment(recipes / f"{recipe}.toml"), found) if recipe else []
        if paper.method == "baseline":
            baselines[paper.network] = mine
        if only.lower() in f"{paper.network}, {paper.method}".lower():
            rows.append(Row(paper=paper, recipe=recipe, results=mine, dense=baselines.get(paper.network, [])))
    if not rows:
        raise ConfigError(f"no row of table {name!r} contains {only!r}")
    return Reproduction(table=table, budget=budget, rows=rows)


def made_on(results: Sequence[Result]) -> str:
    """The machines that results come from."""
    machines = [result["provenance"]["machine"] for result in results]
    return "; ".join(sorted({f"{machine['cores']} cores, {machine['cpu']}" for machine in machines}))


def tables() -> list[str]:
    """The tables that `reproduce` can make."""
    return [name for name, table in paper_tables().items() if set(table.columns) <= _HEADINGS.keys()]


def run_missing(
    reproduction: Reproduction,
    *,
    recipes: str | Path = "recipes",
    results: str | Path = "results",
    seeds: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Run or resume what has no result yet; runs go to `runs_root`, each result is written as soon as it is there.

    Args:
        seeds: how many of each row; default: as many as the table asks for.
        say: told what is being done.
    """
    for row in reproduction.rows:
        if row.recipe is None:
            continue
        there = {result["experiment"]["train"]["seed"] for result in row.results}
        for seed in range(reproduction.table.seeds if seeds is None else seeds):
            if seed not in there:
                run_recipe(row.recipe, seed, Path(recipes), Path(results), say)


def run_recipe(recipe: str, seed: int, recipes: Path, results: Path, say: Callable[[str], None]) -> Path:
    """Run or resume a recipe, and before it the dense run that it starts from; returns the run's folder."""
    experiment = read_experiment(recipes / f"{recipe}.toml", [f"train.seed={seed}"])
    kind, _, dense = (experiment.backbone.weights or "").partition(":")
    if kind == "run":
        _make_dense(dense, recipes, results, say)
    name = f"{recipe}-s{seed}" if seed else recipe
    say(f"{name}: run or resumed in {runs_root() / name}")
    result = train_experiment(experiment, runs_root() / name)
    write_json(results / f"{recipe}-s{seed}.json", result)
    return runs_root() / name


def _make_dense(recipe: str, recipes: Path, results: Path, say: Callable[[str], None]) -> None:
    """The dense run is there already, or the zoo ships it, or it is run."""
    folder = runs_root() / recipe
    if (folder / "result.json").exists():
        return
    experiment = read_experiment(recipes / f"{recipe}.toml")
    shipped = [name for name in zoo.names() if read_run(zoo.folder(name)) == experiment]
    if shipped and not folder.exists():
        say(f"{recipe}: copied from the zoo, where it is {shipped[0]}")
        zoo.copy(shipped[0], folder)
        write_json(results / f"{recipe}-s0.json", read_json(folder / "result.json"))
    else:
        run_recipe(recipe, 0, recipes, results, say)


def add_result(run: str | Path, recipes: Path, results: Path, name: str | None = None) -> Path:
    """Write what a finished run found to ``results``, as ``<recipe>-s<seed>.json``; returns the file.

    Args:
        run: its folder.
        recipes: where the recipe is looked for that makes the run.
        name: in place of the recipe's, e.g. ``short/cifar10/resnet20``.
    """
    result, experiment = read_result(run), read_run(run)
    named = name or next((name for name, made in _read_recipes(recipes) if _same_but_seed(made, experiment)), None)
    if named is None:
        raise ConfigError(
            f"no recipe below {recipes} makes the run in {run} as it is: add one, or name the result: --as NAME"
        )
    path = results / f"{named}-s{experiment.train.seed}.json"
    write_json(path, result)
    return path


def _read_recipes(folder: Path) -> Iterator[tuple[str, Experiment]]:
    for path in sorted(folder.rglob("*.toml")):
        yield path.relative_to(folder).with_suffix("").as_posix(), read_experiment(path)


def _read_results(folder: Path) -> Iterator[tuple[Experiment, Result]]:
    """The results of runs below a folder; a file that is damaged is named in a warning."""
    for path in sorted(folder.rglob("*.json")):
        try:
            result = read_json(path)
            found = _parsed(result) if isinstance(result, dict) and "experiment" in result else None
        except CofireError as error:
            logger.warning("%s does not count: %s", path, error)
            continue
        if found is not None:
            yield found, result


def _parsed(result: Result) -> Experiment:
    """What made a result that has everything a row shows."""
    try:
        for column in (*_HEADINGS.keys() - {"drop"}, "executed", "executed+heads"):
            _values(column, [result])
        made_on([result])
        _circumstances([result])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FileError(f"a result lacks something, or it has another form: {error!r}") from error
    return parse_experiment(result["experiment"])


def _results_of(experiment: Experiment, found: Sequence[tuple[Experiment, Result]]) -> list[Result]:
    return [result for made_by, result in found if _same_but_seed(made_by, experiment)]


def _same_but_seed(one: Experiment, other: Experiment) -> bool:
    alike = dataclasses.replace(one.train, seed=other.train.seed)
    return dataclasses.replace(one, train=alike) == other


def _values(column: str, results: Sequence[Result]) -> list[float]:
    if column == "hours":
        return [sum(epoch["seconds"] for epoch in result["epochs"]) / 3600 for result in results]
    if column == "estimated":
        known = [result["estimated"] for result in results if result.get("estimated")]
        return [100 * estimated["cascade"]["paper"] for estimated in known]
    if column == "bits":
        return [result["test"]["bits"] for result in results if result["test"].get("bits") is not None]
    if column == "twin":
        return [100 * result["twin"]["top1"] for result in results if "twin" in result]
    if column == "top1":
        return [100 * result["test"]["top1"] for result in results]
    return [100 * result["test"]["reduction"]["paper" if column == "reduction" else column] for result in results]


def _cell(values: Sequence[float], digits: int = 2) -> str:
    if not values:
        return ""
    return f"{mean(values):.{digits}f}" + (f" ± {pstdev(values):.{digits}f}" if len(values) > 1 else "")


def _circumstances(results: Sequence[Result]) -> list[str]:
    """Epochs, test images and seeds."""
    if not results:
        return [""] * 3
    seeds = sorted(result["experiment"]["train"]["seed"] for result in results)
    return [str(len(results[0]["epochs"])), str(results[0]["test"]["n"]), ", ".join(map(str, seeds))]

"""The paper's tables with ours beside them: numbers come from result files, by the recipe that made them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small import ROOT

from cofire import ConfigError, FileError, cli
from cofire.analysis.tradeoff import reproduced_points
from cofire.bench import paper as latency
from cofire.experiments import paper, reproduce
from cofire.experiments.paper import PaperRow, PaperTable, paper_tables
from cofire.experiments.recipes import read_experiment
from cofire.measured import MEASURED
from cofire.shift.paper import paper_shift

RECIPES = ROOT / "recipes"
SAVING = [row for table in paper_tables().values() for row in table.rows if "reduction" in row.values]


@pytest.fixture
def own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two tiny recipes, a dense one and one gated from it, and a table of the paper that names them."""
    dense = {"name": "synthetic", "batch_size": 8, "args": {"train": 16, "test": 8, "shape": [1, 8, 8]}}
    args = ", ".join(f"{key} = {json.dumps(value)}" for key, value in dense["args"].items())
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "dense.toml").write_text(
        f'[data]\nname = "synthetic"\nbatch_size = 8\nargs = {{ {args} }}\n'
        '[backbone]\nname = "resnet8_digits"\n[train]\nepochs = 1\n'
    )
    (tmp_path / "recipes" / "gated.toml").write_text(
        'extends = "dense.toml"\n[backbone]\nweights = "run:dense"\n[gate]\nratio = 0.8\n'
    )
    rows = [
        {"network": "Net", "method": "baseline", "top1": 90.0, "short": "dense"},
        {"network": "Net", "method": "FTWT", "top1": [88.0, 90.0], "drop": 1.0, "reduction": 50, "short": "gated"},
        {"network": "Net", "method": "of others", "top1": 80.0},
        {"network": "Net", "method": "long", "top1": 70.0, "paper": "gated"},
    ]
    table = paper._table("own", {"title": "Own", "columns": ["top1", "drop", "reduction"], "seeds": 2, "rows": rows})
    monkeypatch.setattr(reproduce, "paper_tables", lambda: {"own": table})
    monkeypatch.setenv("COFIRE_RUNS", str(tmp_path / "runs"))
    return tmp_path


def made(folder: Path, **arguments: Any) -> reproduce.Reproduction:
    return reproduce.reproduce("own", recipes=folder / "recipes", results=folder / "results", **arguments)


def run(folder: Path, **arguments: Any) -> reproduce.Reproduction:
    reproduce.run_missing(made(folder), recipes=folder / "recipes", results=folder / "results", **arguments)
    return made(folder)


@pytest.mark.parametrize("table", paper_tables().values(), ids=lambda table: table.name)
def test_every_recipe_that_a_table_names_exists(table: PaperTable) -> None:
    named = [recipe for row in table.rows for recipe in row.recipes.values()]
    assert [recipe for recipe in named if not (RECIPES / f"{recipe}.toml").exists()] == []


def test_the_papers_means_and_spreads_follow_from_its_runs() -> None:
    printed = {"VGG16-BN": (93.19, 73.19), "ResNet-56": (92.63, 66.43), "MobileNetV1": (91.06, 78.53)}
    rows = {row.network: row.values for row in reversed(paper_tables()["errorbars"].rows)}
    for network, means in printed.items():
        for column, value in zip(("top1", "reduction"), means, strict=True):
            assert sum(rows[network][column]) / 3 == pytest.approx(value, abs=0.011)


@pytest.mark.parametrize("table", ["cifar10", "imagenet"])
def test_every_row_has_a_recipe(table: str) -> None:
    assert [row.method for row in paper_tables()[table].rows if not row.recipes] == []


@pytest.mark.parametrize("row", SAVING, ids=lambda row: f"{row.network} {row.method}")
def test_a_recipe_asks_for_what_its_row_of_the_paper_saves(row: PaperRow) -> None:
    for name in row.recipes.values():
        experiment, remains = read_experiment(RECIPES / f"{name}.toml"), 1 - row.values["reduction"][0] / 100
        for part in (experiment.prune, experiment.signature, experiment.budget):
            assert part is None or part.macs == pytest.approx(remains, abs=1e-3)
        if experiment.gate is not None and experiment.gate.knob == "target":
            assert experiment.gate == experiment.gate.aimed(remains)
            assert experiment.train.select == "last"  # earlier epochs may not have come to the target yet


def test_what_was_not_run_says_so(own_table: Path) -> None:
    cells = [found.cells(row) for found in [made(own_table)] for row in found.rows]
    assert [row[3] for row in cells] == ["not run", "not run", "", "not run"]
    assert [row[2] for row in cells] == ["90.00", "89.00 ± 1.00", "80.00", "70.00"]


def test_a_dense_run_that_the_zoo_ships_is_not_trained_again(own_table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    run(own_table, seeds=1)
    shipped = (own_table / "runs" / "dense").rename(own_table / "shipped")
    shutil.rmtree(own_table / "runs")
    shutil.rmtree(own_table / "results")
    monkeypatch.setattr(reproduce.zoo, "names", lambda: ["shipped"])
    monkeypatch.setattr(reproduce.zoo, "folder", lambda name: own_table / name)
    (shipped / "mark").touch()
    reproduce.run_recipe("gated", 0, own_table / "recipes", own_table / "results", said.append)
    assert [len(row.results) for row in made(own_table).rows[:2]] == [1, 1]
    assert (own_table / "runs" / "dense" / "mark").exists()
    assert said[0] == "dense: copied from the zoo, where it is shipped"


def test_running_a_table_makes_what_it_needs_and_reads_it_back(own_table: Path) -> None:
    found = run(own_table)
    dense, gated = found.rows[:2]
    assert [len(dense.results), len(gated.results)] == [2, 2]
    assert [result["experiment"]["train"]["seed"] for result in gated.results] == [0, 1]
    files = {path.relative_to(own_table / "results").as_posix() for path in (own_table / "results").rglob("*.json")}
    assert files == {f"{name}-s{seed}.json" for name in ("dense", "gated") for seed in (0, 1)}
    top1 = [100 * result["test"]["top1"] for result in gated.results]
    assert gated.ours("top1") == top1
    mean = sum(dense.ours("top1")) / 2
    assert gated.ours("drop") == pytest.approx([mean - value for value in top1])
    assert gated.ours("reduction") == [100 * result["test"]["reduction"]["paper"] for result in gated.results]
    assert dense.ours("reduction") == [0.0, 0.0]


def test_results_are_made_only_once(own_table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(own_table, seeds=1)
    monkeypatch.setattr(reproduce, "train_experiment", lambda *_: pytest.fail("it was there"))
    assert [len(row.results) for row in run(own_table, seeds=1).rows] == [1, 1, 0, 0]


def test_a_result_of_another_recipe_does_not_count(own_table: Path) -> None:
    run(own_table, seeds=1)
    recipe = own_table / "recipes" / "gated.toml"
    recipe.write_text(recipe.read_text().replace("0.8", "0.7"))
    assert [len(row.results) for row in made(own_table).rows] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"top1"', '"top"'),
        lambda text: text.replace('"machine"', '"mach"'),
        lambda text: text.replace('"epochs": [', '"epochs": 3, "other": ['),
        lambda text: text.replace('"FTWT"', '"Gone"'),
    ],
)
def test_a_damaged_result_is_named_and_the_others_count(damage: Any, own_table: Path, caplog: Any) -> None:
    run(own_table, seeds=1)
    path = own_table / "results" / "gated-s0.json"
    path.write_text(damage(path.read_text()))
    assert [len(row.results) for row in made(own_table).rows] == [1, 0, 0, 0]
    assert [record.message for record in caplog.records if f"{path} does not count" in record.message]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"runs": 3}'])
@pytest.mark.parametrize("name", MEASURED)
def test_a_damaged_file_of_a_measured_table_is_named(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / "results" / MEASURED[name].file("short")
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(FileError, match=path.name):
        measure(name, tmp_path)


def test_only_keeps_the_rows_that_contain_the_text(own_table: Path) -> None:
    assert [row.paper.method for row in made(own_table, only="ftwt").rows] == ["FTWT"]
    with pytest.raises(ConfigError, match="no row of table 'own' contains 'nothing'"):
        made(own_table, only="nothing")


def test_the_markdown_of_what_was_run_has_a_line_for_each(own_table: Path) -> None:
    found = run(own_table, seeds=1)
    assert len(found.to_markdown().splitlines()) == 2 + 4
    short = found.to_markdown(only_run=True).splitlines()
    assert len(short) == 2 + 2
    assert {line.count("|") for line in short} == {len(found.headings()) + 1}


def test_a_table_without_a_recipe_folder_says_where_to_run(own_table: Path) -> None:
    with pytest.raises(FileError, match=r"must be the folder of cofire's recipes; run this in a clone"):
        reproduce.reproduce("own", recipes=own_table / "nowhere")


def test_figure_1_has_the_papers_points_and_ours(own_table: Path) -> None:
    ours, papers = reproduced_points(run(own_table))
    assert [(point.label, point.kind) for point in ours] == [("Net, FTWT", "ours: FTWT")]
    assert [(point.reduction, point.drop) for point in papers] == [(0.5, 0.01)]
    gated = made(own_table).rows[1]
    assert ours[0].reduction == pytest.approx(sum(gated.ours("reduction")) / 200)
    assert ours[0].drop == pytest.approx(sum(gated.ours("drop")) / 200)


def test_where_the_paper_prints_no_drop_it_follows_from_the_baseline() -> None:
    _, papers = reproduced_points(reproduce.reproduce("cifar10", recipes=RECIPES, results=RECIPES))
    drops = {point.label: point.drop for point in papers}
    assert drops["FTWT decoupled, r = 0.85"] == pytest.approx((93.82 - 93.19) / 100)
    assert {point.kind for point in papers} == {"paper: static", "paper: FTWT", "paper: other"}


def test_the_command_draws_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is needed (extra plots)")
    figure = tmp_path / "figure1.svg"
    cli.reproduce("imagenet", only="ResNet-34", recipes=RECIPES, results=RECIPES, plot=figure)
    assert "FTWT r = 0.93: 47.4 % of MACs saved, top-1 -1.13 points" in figure.read_text()


@pytest.mark.parametrize("name", reproduce.tables())
def test_every_table_of_the_paper_is_printed(name: str, capsys: Any) -> None:
    cli.reproduce(name, recipes=RECIPES, results=ROOT / "results")
    printed = capsys.readouterr().out
    assert paper_tables()[name].title[:20] in printed
    found = reproduce.reproduce(name, recipes=RECIPES, results=ROOT / "results")
    assert ("not run" in printed) == any(row.paper.recipes and not row.results for row in found.rows)
    as_json = found.to_json()
    assert len(as_json["rows"]) == len(paper_tables()[name].rows)
    json.dumps(as_json)


# Tables that are measured


def measure(name: str, folder: Path, **arguments: Any) -> None:
    cli.reproduce(name, recipes=folder / "recipes", results=folder / "results", **arguments)


@pytest.mark.parametrize("budget", ["short", "paper"])
def test_every_recipe_of_the_shift_tables_exists_once(budget: paper.Budget) -> None:
    named = paper_shift().recipes[budget]
    assert len(set(named)) == 5
    assert [recipe for recipe in named if not (RECIPES / f"{recipe}.toml").exists()] == []


@pytest.mark.parametrize("name", MEASURED)
def test_what_was_not_measured_says_so(name: str, tmp_path: Path, capsys: Any) -> None:
    measure(name, tmp_path)
    assert MEASURED[name].title in (printed := capsys.readouterr().out)
    assert "not run; add --run" in printed
    with pytest.raises(ConfigError, match=f"{name} is measured as a whole"):
        measure(name, tmp_path, only="ResNet")


def test_the_shift_tables_train_what_they_need_and_are_measured_once(
    own_table: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(paper_shift().recipes, "short", ("dense", "gated"))
    measure("shift", own_table, run=True)
    assert "blur: Brier score" in (printed := capsys.readouterr().out)
    monkeypatch.setattr(reproduce, "train_experiment", lambda *_: pytest.fail("it was there"))
    measure("shift", own_table, run=True)
    assert capsys.readouterr().out == printed
    found = json.loads((own_table / "results" / "shift_short.json").read_text())
    assert list(found["clean"]) == ["dense", "gated"]
    recipe = own_table / "recipes" / "gated.toml"
    recipe.write_text(recipe.read_text().replace("0.8", "0.7"))
    measure("shift", own_table)
    assert "not run" in capsys.readouterr().out


def test_the_latency_table_is_measured_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(latency, "NETWORK", "resnet8_digits")
    measure("latency", tmp_path, run=True)
    assert "27.2" in (printed := capsys.readouterr().out)
    monkeypatch.setattr(latency, "measure", lambda: pytest.fail("it was there"))
    measure("latency", tmp_path)
    assert capsys.readouterr().out == printed


def test_an_unknown_table_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"cifar1"):
        reproduce.reproduce("cifar1", recipes=RECIPES)
    with pytest.raises(ConfigError, match=r"did you mean 'latency'.*known: .*shift"):
        cli.reproduce("latencies")

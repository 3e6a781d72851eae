"""cofire compare: folders that several processes share, what is refused at once, the table by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compared import write_recipe
from typer.testing import CliRunner

from cofire import (
    BusyError,
    ConfigError,
    FileError,
    Recipe,
    compare,
    create_backbone,
)
from cofire.cli import app
from cofire.comparison import contenders
from cofire.comparison.compare import _one_by_one
from cofire.comparison.jobs import Job, Outcome, carry_out
from cofire.comparison.table import Comparison, Network, Row
from cofire.experiments.recipes import Experiment, read_experiment
from cofire.experiments.runs import train_experiment
from cofire.files.lock import alone_in


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose baseline knows nothing."""
    torch.manual_seed(0)
    return write_recipe(tmp_path_factory.mktemp("compare"), create_backbone("resnet8_digits"))


# Folders that are shared


def jobs(recipe: Path, out: Path) -> list[Job]:
    base = dataclasses.replace(read_experiment(recipe), train=Recipe(epochs=0))
    return [Job(contender=name, base=base, macs=0.5, folder=out / name) for name in ("L1", "Random")]


def test_what_another_process_has_is_waited_for_in_the_end(recipe: Path, tmp_path: Path) -> None:
    first, second = jobs(recipe, tmp_path)
    said: list[str] = []
    going = _one_by_one([first, second], said.append)
    with alone_in(first.folder):
        with pytest.raises(BusyError, match="is in use by another process"):
            carry_out(first)
        assert next(going)[0] is second
    job, outcome = next(going)
    assert job is first
    assert outcome.result is not None
    assert said == ["L1: another process has it; waiting"]


def test_a_folder_of_another_comparison_is_refused(recipe: Path, tmp_path: Path) -> None:
    job = jobs(recipe, tmp_path)[0]
    carry_out(job)
    with pytest.raises(FileError, match=r"holds another comparison \(it differs in macs\)"):
        carry_out(dataclasses.replace(job, macs=0.4))
    other = dataclasses.replace(job.base, train=Recipe(epochs=0, lr=0.5))
    with pytest.raises(FileError, match=r"holds another comparison \(it differs in train.lr\)"):
        carry_out(dataclasses.replace(job, base=other))


def test_a_plan_is_made_once(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = dataclasses.replace(jobs(recipe, tmp_path)[0], contender="FBS")
    first = carry_out(job)
    monkeypatch.setattr("cofire.comparison.jobs.at_budget", None)  # asked again, it would fail
    assert carry_out(job) == first


def test_errors_of_the_disk_are_not_a_methods_fault(recipe: Path, tmp_path: Path) -> None:
    job = jobs(recipe, tmp_path)[0]
    job.folder.mkdir()
    (job.folder / "plan.json").write_text("{}")
    with pytest.raises(FileError, match=r"plan.json must be the plan of a comparison"):
        carry_out(job)


# What is asked for


@pytest.mark.parametrize(
    ("added", "options", "problem"),
    [
        ('\n[gate]\ntype = "FTWT"\n', {}, r"compare chooses the method: the recipe must not have \[gate\]"),
        ("", {"overrides": ["data.val=0"]}, r"\[data\] val must be above 0"),
        ("", {"overrides": ["train.select=last"]}, r'\[train\] select "best", got 200 and \'last\''),
        ("", {"macs": 1.0}, r"must be in \(0, 1\), got 1"),
        ("", {"seeds": 0}, "seeds must be at least 1"),
    ],
)
def test_what_cannot_be_compared_is_said_at_once(
    recipe: Path, tmp_path: Path, added: str, options: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "r.toml"
    path.write_text(recipe.read_text() + added)
    with pytest.raises(ConfigError, match=problem):
        compare([path], out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_soft_pruning_and_gates_do_not_go_together(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[prune\] soft = true prunes while the run trains"):
        read_experiment(recipe, ["prune.type=SFP", "prune.macs=0.5", "gate.ratio=0.5"])


def test_a_soft_method_that_needs_images_says_so(recipe: Path, tmp_path: Path) -> None:
    experiment = read_experiment(recipe, ["prune.type=Taylor", "prune.macs=0.5", "prune.soft=true"])
    with pytest.raises(Exception, match="Taylor needs labelled images"):
        train_experiment(experiment, tmp_path)


def test_the_command_line_lists_methods_and_prints_json(recipe: Path, tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["compare", "--json"])
    assert json.loads(listed.stdout) == {name: one.sort for name, one in contenders().items()}
    options = ["--methods", "L1", "--epochs", "0", "--rounds", "0", "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, ["compare", str(recipe), *options])
    assert done.exit_code == 0, done.output
    (network,) = json.loads(done.stdout)["networks"]
    assert [row["method"] for row in network["rows"]] == ["L1"]
    assert "[1/1] L1-s0: top-1" in done.stderr


# The table


def result(top1: float, executed: float, bits: float | None) -> dict[str, Any]:
    saved = {"executed": 1 - executed, "executed+heads": 1 - executed - 0.01}
    return {"test": {"top1": top1, "reduction": saved, "bits": bits, "n": 10}}


def test_the_table_by_hand(recipe: Path) -> None:
    base: Experiment = read_experiment(recipe)
    gated = {
        0: Outcome(
            result={**result(0.90, 0.55, 0.25), "twin": {"top1": 0.83}},
            row={"twin": {"top1": 0.8}, "calibrated": {"top1": 0.89}},
        ),
        1: Outcome(result=result(0.92, 0.57, 0.35), row={"twin": {"top1": 0.82}, "calibrated": {"top1": 0.87}}),
    }
    pruned = {0: Outcome(result=result(0.915, 0.495, None), row={"twin": None, "calibrated": None})}
    times = {"mean": 0.5, "median": 0.4, "p10": 0.4, "p90": 0.6, "ratio": 0.75}
    network = Network(
        base=base,
        macs=0.5,
        dense=result(0.95, 1.0, None),
        timing={"ms": {"dense": {"mean": 0.7}}},
        rows=[
            Row(method="G", sort="dynamic", outcomes=gated, not_timed="no kernel"),
            Row(method="P", sort="static", outcomes=pruned, time=times),
            Row(method="N", sort="static", outcomes={0: Outcome(refused="too small")}),
            Row(method="W", sort="static", outcomes={}),
        ],
    )
    two_seeds = ["91.00 ± 1.00", "4.00 ± 1.00", "56.0 ± 1.0", "57.0 ± 1.0", "+7.0", "81.00 ± 1.00", "83.00", "0.300"]
    assert network.grid().rows == [
        ["dense", "", "95.00", "", "100.0", "", "", "", "", "", "0.700", "1.000", ""],
        [],
        ["P", "static", "91.50", "3.50", "49.5", "", "met", "", "", "", "0.500", "0.750", "0"],
        ["G", "dynamic", *two_seeds, "", "", "0, 1"],
        ["N", "static", "refused", *[""] * 10],
        ["W", "static", "not run yet", *[""] * 10],
    ]
    assert network.notes() == [
        "G missed the budget: 57.0 % of the MACs are executed, 50.0 % were asked for; with its threshold moved there, "
        "top-1 88.00 %",
        "G is not timed: no kernel",
        "N was not run: too small",
    ]
    text = Comparison(networks=[network]).to_markdown()
    assert "| P | static | 91.50 | 3.50 |" in text
    assert "- N was not run: too small" in text

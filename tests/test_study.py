"""`cofire analyze` and `cofire report` on small runs, gated, pruned and dense, and on folders that are none."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

pytest.importorskip("matplotlib", reason="matplotlib is needed (extra report)")
pytest.importorskip("jinja2", reason="jinja2 is needed (extra report)")

from cofire import CofireError, ConfigError, FileError, analysis, evaluate
from cofire.analysis.page import page
from cofire.analysis.study import FinishedRun, Study, find_dense, open_run, read_results, study
from cofire.cli import app
from cofire.experiments.recipes import parse_experiment
from cofire.experiments.runs import short_names, train_experiment

RECIPE: dict[str, Any] = {
    "name": "small",
    "data": {"name": "synthetic", "batch_size": 16, "args": {"train": 48, "test": 40, "shape": [1, 8, 8]}},
    "backbone": {"name": "resnet8_digits"},
    "train": {"epochs": 1, "lr": 0.05},
}


def train(folder: Path, **parts: Any) -> Path:
    train_experiment(parse_experiment({**RECIPE, **parts}), folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense run, a gated one that began with it, and one of another seed."""
    root = tmp_path_factory.mktemp("runs")
    dense = train(root / "dense")
    weights = {"name": "resnet8_digits", "weights": str(dense)}
    gated = train(root / "gated", backbone=weights, gate={"ratio": 0.8})
    other = train(root / "other", gate={"ratio": 0.9}, train={"epochs": 1, "lr": 0.05, "seed": 1})
    return {"dense": dense, "gated": gated, "other": other}


@pytest.fixture(scope="module")
def gated_study(runs: dict[str, Path]) -> Study:
    return study(open_run(runs["gated"]))


@pytest.fixture(scope="module")
def brief_study(gated_study: Study) -> Study:
    """With its first figure only, which is drawn quickly."""
    return dataclasses.replace(gated_study, panels=gated_study.panels[:1])


def call(*words: Any) -> Any:
    """Run the command line; errors a user can fix are raised."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


# analyze


def test_analyze_writes_every_figure_twice_with_values_and_arrays(runs: dict[str, Path], tmp_path: Path) -> None:
    call("analyze", runs["gated"], "--out", tmp_path, "--images", 20)
    names = {path.stem for path in tmp_path.glob("*.svg")}
    assert names == {path.stem for path in tmp_path.glob("*.png")}
    assert {"clusters", "pruning_ratios", "core_filters", "agreement", "redundancy", "cost"} <= names
    assert {"class_cost", "class_accuracy", "extremes", "foretold", "compressibility"} <= names
    assert any(name.startswith("heatmaps_") for name in names)
    values = json.loads((tmp_path / "values.json").read_text(), parse_constant=pytest.fail)
    assert set(values["panels"]) == names
    assert values["n"] == 20
    arrays = load_file(tmp_path / "arrays.safetensors")
    run = open_run(runs["gated"], 20)
    found = analysis.collect(run.model, run.images.loader(20))
    assert np.array_equal(arrays["macs"], found.macs_N)
    for row in values["panels"]["clusters"]["values"]:
        assert np.array_equal(arrays[f"mask_bits/{row['group']}"], found.bits[row["group"]])
        assert row["unique masks"] == analysis.routes(found)[row["group"]].clusters


def test_a_run_without_gates_shows_responses_and_accuracy(runs: dict[str, Path], tmp_path: Path) -> None:
    call("analyze", runs["dense"], "--out", tmp_path, "--unit", "layer2.0.conv1")
    assert {path.stem for path in tmp_path.glob("*.svg")} == {"class_accuracy", "responses_layer2.0.conv1"}
    values = json.loads((tmp_path / "values.json").read_text())["panels"]["class_accuracy"]["values"]
    run = open_run(runs["dense"])
    report = evaluate(run.model, run.images.loader(20))
    assert {row["class"]: row["top-1"] for row in values} == {
        run.images.classes[label]: part.top1 for label, part in report.per_class.items()
    }


def test_chosen_units_have_responses_and_heatmaps(runs: dict[str, Path]) -> None:
    found = study(open_run(runs["gated"], 8), units=["layer1.0.conv2", "conv1"])
    names = [panel.name for panel in found.panels if "_" in panel.name and "conv" in panel.name]
    assert names == [f"{what}_{unit}" for what in ("responses", "heatmaps") for unit in ("layer1.0.conv2", "conv1")]


def test_every_class_gives_its_share_of_images(runs: dict[str, Path]) -> None:
    few = open_run(runs["gated"], 20).images
    assert few.label_N is not None
    assert few.label_N.bincount().tolist() == [2] * 10


def test_one_class_is_enough(runs: dict[str, Path]) -> None:
    run = open_run(runs["gated"])
    assert run.images.label_N is not None
    one = run.images.take((run.images.label_N == run.images.label_N[0]).nonzero().flatten())
    found = study(FinishedRun(**{**vars(run), "images": one}))
    (row,) = next(panel.rows for panel in found.panels if panel.name == "class_cost")
    assert row[1] == len(one)


def test_unlabelled_images_leave_honest_gaps(runs: dict[str, Path]) -> None:
    for kind in ("gated", "dense"):
        run = open_run(runs[kind])
        bare = type(run.images)(**{**vars(run.images), "label_N": None})
        found = study(FinishedRun(**{**vars(run), "images": bare}))
        gaps = {panel.name for panel in found.panels if panel.text == "These images have no labels."}
        assert gaps == ({"class_cost", "compressibility"} if kind == "gated" else {"class_accuracy"})


def test_compressibility_prunes_the_dense_run_where_it_is_still_there(
    gated_study: Study, runs: dict[str, Path], tmp_path: Path
) -> None:
    def text(found: Any) -> str:
        return next(panel.text for panel in found.panels if panel.name == "compressibility")

    assert find_dense(gated_study.run) == runs["dense"]
    assert "the dense run it started from" in text(gated_study)
    assert "all gates open" in text(study(open_run(runs["other"], 12)))


# report


class Reader(html.parser.HTMLParser):
    """What a page holds: tags with their attributes, and headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_report_is_one_file_that_loads_nothing(runs: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    call("report", runs["gated"], "--compare", runs["other"], "--out", path, "--images", 20)
    text = path.read_text()
    reader = Reader(text)
    addresses = [
        value for _, attributes in reader.tags for key, value in attributes.items() if "href" in key or key == "src"
    ]
    assert addresses
    assert all(value is not None and value.startswith(("data:", "#")) for value in addresses)
    assert reader.of("script") == []
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(reader.of("svg")) == len([svg for svg in reader.of("svg") if svg.get("aria-label")]) > 10
    assert len(reader.of("img")) == 16
    assert len(reader.of("table")) == len(reader.of("caption"))
    result = json.loads((runs["gated"] / "result.json").read_text())
    assert f"{100 * result['test']['top1']:.2f} %" in text
    assert "prefers-color-scheme: dark" in text


def test_the_recipe_in_the_report_is_the_run_s_own(brief_study: Study, runs: dict[str, Path]) -> None:
    text = page(brief_study, read_results([runs["gated"]]), ["cofire", "report"])
    shown = re.search(r'aria-label="Recipe">(.*?)</pre>', text, re.S)
    assert shown is not None
    recipe = tomllib.loads(html.unescape(shown[1]))
    wanted = json.loads((runs["gated"] / "experiment.json").read_text())
    assert parse_experiment(recipe) == parse_experiment(wanted)


def test_runs_are_compared_with_the_dense_one(brief_study: Study, runs: dict[str, Path]) -> None:
    results = read_results([runs["gated"], runs["other"], runs["dense"]])
    text = page(brief_study, results, ["cofire", "report"])
    assert "Accuracy against MACs saved" in text
    assert all(text.count(name) > 1 for name in results)
    assert "Accuracy against MACs saved" not in page(brief_study, read_results([runs["gated"]]), ["cofire"])


def test_what_a_run_says_cannot_become_markup(brief_study: Study) -> None:
    result = json.loads(json.dumps(brief_study.run.result))
    result["provenance"]["machine"]["cpu"] = "<script>alert(1)</script>"
    text = page(brief_study, {"<b>run</b>": result}, ["cofire", "report", "<i>"])
    assert Reader(text).of("script") == []
    assert Reader(text).of("b") == Reader(text).of("i") == []
    assert "&lt;script&gt;" in text


def test_a_report_of_a_run_without_gates_has_no_pictures(runs: dict[str, Path], tmp_path: Path) -> None:
    call("report", runs["dense"], "--out", tmp_path / "page.html")
    reader = Reader((tmp_path / "page.html").read_text())
    assert reader.of("img") == []
    assert len(reader.of("svg")) == 3


def test_names_are_as_long_as_it_takes_to_tell_folders_apart() -> None:
    assert list(short_names(["/x/a/run", "/x/b/run"])) == ["a/run", "b/run"]
    assert list(short_names(["/x/a/run", "/y/a/run", "/x/a/run"])) == ["x/a/run", "y/a/run"]


# What is no run


def test_an_empty_folder_is_told_what_a_run_is(tmp_path: Path) -> None:
    for command in ("analyze", "report"):
        with pytest.raises(FileError, match=r"holds no run: it has no experiment\.json; `cofire train RECIPE"):
            call(command, tmp_path, "--out", tmp_path / "x")


def test_a_run_that_is_not_finished_says_so(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["dense"], tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(FileError, match=r"has no result\.json"):
        call("analyze", tmp_path / "run", "--out", tmp_path / "x")
    with pytest.raises(FileError, match=r"has no result\.json"):
        call("report", runs["dense"], "--compare", tmp_path / "run", "--out", tmp_path / "x")


def test_an_unknown_unit_is_found_before_anything_is_computed(runs: dict[str, Path], tmp_path: Path) -> None:
    for kind in ("gated", "dense"):
        with pytest.raises(ConfigError, match=r"unknown unit 'layer1\.0\.conv3'; did you mean 'layer1\.0\.conv"):
            call("analyze", runs[kind], "--out", tmp_path, "--unit", "layer1.0.conv3")
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_error_names_it(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CofireError, match=r"matplotlib is needed here: pip install 'cofire\[report\]'"):
        study(open_run(runs["dense"], 4))

"""Models under shift: drift by hand, measures against direct computation, tables, runs and the command."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from small import SHARED, tiny_gated, tiny_images, tiny_plain
from torch import nn
from typer.testing import CliRunner

from cofire import ConfigError, DataError, FileError, Shift, evaluate, shift
from cofire.analysis import collect
from cofire.analysis.decisions import packed
from cofire.data import Images
from cofire.evaluation import ClassReport
from cofire.experiments.recipes import parse_experiment
from cofire.experiments.runs import eval_run, train_experiment
from cofire.shift import AtSeverity, ShiftedLoader, brier, calibration_error, corruption, drift, list_corruptions, plot
from cofire.shift.command import shift as shift_command
from cofire.shift.paper import paper_shift
from cofire.shift.runs import read_runs
from cofire.text import rendered

FEW = {"blur": (0.5, 0.9), "noise": (0.0, 0.2)}


def bits(*masks: str) -> Any:
    """Masks written as rows of 0 and 1, packed."""
    return packed(torch.tensor([[bit == "1" for bit in mask] for mask in masks]))


def small_shift(**options: Any) -> Shift:
    models = {"dense": tiny_plain(), "gated": tiny_gated(), "plain heads": tiny_gated(softmax=False)}
    return shift(models, tiny_images(20), **{"corruptions": FEW, "batch_size": 8, "text": "", **options})


@pytest.fixture(scope="module")
def small() -> Shift:
    return small_shift()


def named(name: str) -> Images:
    return dataclasses.replace(tiny_images(20), name=name)


# Drift


def test_drift_by_hand() -> None:
    clean = {"a": bits("1100", "1100", "0011"), "b": bits(*["1" * 12] * 3)}
    shifted = {"a": bits("1100", "1000", "1100"), "b": bits(*["1" * 12] * 3)}
    found = drift(clean, shifted, {"a": 4, "b": 12})
    assert dataclasses.astuple(found.groups["a"]) == pytest.approx((1 / 12, 5 / 12, 2 / 3))
    assert dataclasses.astuple(found.groups["b"]) == (0.0, 0.0, 0.0)
    assert dataclasses.astuple(found.total) == pytest.approx((1 / 48, 5 / 48, 1 / 6))  # a has 4 of 16 filters


def test_masks_that_change_places_keep_their_routes_and_rates() -> None:
    found = drift({"a": bits("10", "01")}, {"a": bits("01", "10")}, {"a": 2})
    assert dataclasses.astuple(found.total) == (0.0, 1.0, 0.0)


def test_drift_is_for_the_same_images_and_groups() -> None:
    with pytest.raises(DataError, match="masks of the same images and groups"):
        drift({"a": bits("10", "01")}, {"a": bits("10")}, {"a": 2})
    with pytest.raises(DataError, match="masks of the same images and groups"):
        drift({"a": bits("10")}, {"b": bits("10")}, {"a": 2, "b": 2})


def test_the_drift_of_a_model_is_that_of_its_collected_decisions(small: Shift) -> None:
    gated, images = tiny_gated(), tiny_images(20)
    loader = ShiftedLoader(images=images, batch_size=20, corruption=corruption("blur"), severity=0.9)
    clean, shifted = (collect(gated, batches, text="") for batches in (images.loader(20), loader))
    found = small.points["blur"]["gated"][1].drift
    assert found == drift(clean.bits, shifted.bits, clean.filters)
    assert found is not None
    assert found.total.flipped > 0
    for group in clean.groups:
        rates = [decisions.mask(group).mean() for decisions in (clean, shifted)]
        assert found.groups[group].keep_rate == pytest.approx(abs(rates[0] - rates[1]))
        flips = (clean.mask(group) != shifted.mask(group)).mean()
        assert found.groups[group].flipped == pytest.approx(flips)


# Measures


def test_measures_are_those_of_the_corrupted_images(small: Shift) -> None:
    model, images = tiny_plain(), tiny_images(20)
    loader = ShiftedLoader(images=images, batch_size=20, corruption=corruption("noise"), severity=0.2)
    ((x_NCHW, label_N),) = loader
    assert label_N is not None
    with torch.no_grad():
        probability_NK = model.eval()(x_NCHW).double().softmax(1)
    one_hot_NK = np.eye(10)[label_N.numpy()]
    point = small.points["noise"]["dense"][1]
    assert point.severity == 0.2
    assert point.brier == pytest.approx(float(((probability_NK.numpy() - one_hot_NK) ** 2).sum(1).mean()), rel=1e-5)
    assert point.brier == pytest.approx(float(brier(probability_NK, label_N).mean()), rel=1e-5)
    confidence_N, predicted_N = probability_NK.max(1)
    assert point.ece == pytest.approx(calibration_error(confidence_N, predicted_N == label_N, 15), rel=1e-4)
    assert point.report.top1 == float((predicted_N == label_N).double().mean())


@pytest.mark.parametrize(("name", "model"), [("dense", tiny_plain()), ("gated", tiny_gated())])
def test_accuracy_and_cost_are_those_of_evaluate(small: Shift, name: str, model: nn.Module) -> None:
    loader = ShiftedLoader(images=tiny_images(20), batch_size=8, corruption=corruption("blur"), severity=0.9)
    assert small.points["blur"][name][1].report == evaluate(model, loader, text="")
    assert small.clean[name].report == evaluate(model, tiny_images(20).loader(8), text="")


def test_severity_0_is_clean_and_only_gates_drift(small: Shift) -> None:
    for model in small.models:
        assert small.points["noise"][model][0] == small.clean[model]
    assert small.points["blur"]["dense"][0].drift is None
    still = small.clean["gated"].drift
    assert still is not None
    assert dataclasses.astuple(still.total) == (0.0, 0.0, 0.0)


def test_the_batch_size_does_not_matter() -> None:
    model = {"gated": tiny_gated()}
    one, other = (shift(model, tiny_images(20), FEW, batch_size=size, text="") for size in (20, 3))
    for name in FEW:
        for a, b in zip(one.points[name]["gated"], other.points[name]["gated"], strict=True):
            assert (a.drift, a.report.top1) == (b.drift, b.report.top1)
            assert (a.brier, a.ece) == pytest.approx((b.brier, b.ece), rel=1e-5)


def test_every_corruption_runs_on_tiny_images_at_its_own_severities() -> None:
    result = shift({"dense": tiny_plain()}, tiny_images(10), list_corruptions(), text="")
    for name in list_corruptions():
        assert [point.severity for point in result.points[name]["dense"]] == list(corruption(name).severities)


def test_the_macs_of_a_pruned_model_are_shares_of_those_given() -> None:
    own = evaluate(tiny_plain(), tiny_images(4).loader(4), text="").dense_macs
    result = shift({"half": tiny_plain()}, tiny_images(10), {"blur": [0.5]}, dense_macs={"half": 2 * own}, text="")
    assert result.clean["half"].report.reduction["executed"] == 0.5
    assert result.points["blur"]["half"][0].report.reduction["executed"] == 0.5


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"corruptions": ["blurr"]}, ConfigError, "unknown corruption 'blurr'; did you mean 'blur'"),
        ({"corruptions": "blur"}, ConfigError, "corruptions must be names, at least one, got 'blur'"),
        ({"corruptions": []}, ConfigError, "corruptions must be names, at least one"),
        ({"corruptions": {"blur": []}}, ConfigError, "'blur' must have at least one severity"),
        ({"corruptions": {"noise": [-0.1]}}, ConfigError, "at least 0, got -0.1"),
        ({"corruptions": {"noise": [math.nan]}}, ConfigError, "got nan"),
        ({"corruptions": {"jpeg": [0.5]}}, ConfigError, "must be a whole number, got 0.5"),
        ({"corruptions": {"blur-full": [9.0]}}, DataError, "reaches 36 pixels needs larger pictures than 8x8"),
        ({"images": tiny_images(labelled=False)}, DataError, "shift needs labelled images"),
        (
            {"images": dataclasses.replace(tiny_images(3), label_N=torch.zeros(3).long(), classes=("all",))},
            DataError,
            "at least two classes, .* synthetic has one",
        ),
        ({"models": {}}, ConfigError, "at least one model"),
        ({"bins": 0}, ConfigError, "bins of the calibration error must be at least 1"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        shift(**{"models": {"dense": tiny_plain()}, "images": tiny_images(10), "text": "", **options})


def test_logits_that_are_not_finite_are_refused() -> None:
    broken = tiny_plain()
    nn.init.constant_(next(broken.parameters()), math.nan)
    with pytest.raises(DataError, match="broken, clean: logits must be finite, got 100"):
        shift({"broken": broken}, tiny_images(10), text="")


# Tables, JSON, plot


def test_the_tables_have_every_model_and_severity(small: Shift) -> None:
    text = str(small)
    for part in ("clean: 20 images of synthetic", "blur: Brier score", "sigma in pixels, 3x3 kernel", "0.9", "flipped"):
        assert part in text
    assert "Brier score with softmax in the heads (gated) and without (plain heads)" in text
    assert f"{small.points['noise']['gated'][1].brier:.3f}" in text
    assert "paper:" not in text


def test_the_papers_three_tables_are_markdown_too(small: Shift) -> None:
    clean, blur, noise, softmax = small.to_markdown().split("\n\n")[1::2]
    score = small.points["noise"]["gated"][1].brier
    assert noise.splitlines()[0] == "| severity | dense | gated | plain heads |"
    assert noise.splitlines()[3].split(" | ")[2] == f"{score:.3f}"
    assert f"{score:.3f}" in softmax.splitlines()[3]
    assert [len(table.splitlines()) for table in (clean, blur, softmax)] == [5, 4, 4]


def test_without_a_pair_there_is_no_table_of_softmax() -> None:
    assert "softmax" not in str(shift({"gated": tiny_gated()}, tiny_images(10), FEW, text=""))


def test_each_class_stands_beside_its_compute(small: Shift) -> None:
    def with_class_3(point: AtSeverity, top1: float, reduction: float) -> AtSeverity:
        part = ClassReport(n=2, top1=top1, reduction=reduction)
        return dataclasses.replace(point, report=dataclasses.replace(point.report, per_class={3: part}))

    clean, (mild, severe) = small.clean["gated"], small.points["blur"]["gated"]
    points = (with_class_3(mild, 0.9, 0.1), with_class_3(severe, 0.25, 0.35))
    rigged = dataclasses.replace(
        small, clean={"gated": with_class_3(clean, 1.0, 0.4)}, points={"blur": {"gated": points}}
    )
    text = rendered(rigged.per_class("blur"))
    assert text.startswith("blur 0.9: ")
    row = next(line for line in text.splitlines() if line.startswith("│ gated "))
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == ["gated", "3", "2", "25.0", "75.0", "35.0", "-5.0"]


def test_everything_is_json(small: Shift) -> None:
    found = json.loads(json.dumps(small.to_json(), allow_nan=False))
    assert (found["n"], found["bins"], found["seed"]) == (20, 15, 0)
    assert found["softmax"] == {"gated": True, "plain heads": False}
    blur = found["corruptions"]["blur"]
    assert blur["unit"] == "sigma in pixels, 3x3 kernel"
    assert blur["paper"] == []
    point = blur["models"]["gated"][1]
    assert point["brier"] == small.points["blur"]["gated"][1].brier
    assert set(point["reduction"]) == {"paper", "executed", "executed+heads"}
    assert set(point["drift"]["total"]) == {"keep_rate", "flipped", "routes"}
    assert set(point["drift"]["groups"]) == set(point["keep_rate"])
    assert len(point["per_class"]) == 10
    assert Shift.from_json(found) == small


def test_a_plot_has_a_line_for_each_model_in_each_panel(small: Shift) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is needed (extra plots)")
    panels = plot(small).axes
    assert len(panels) == 2 * len(small.points)
    for number, (name, by_model) in enumerate(small.points.items()):
        lines = panels[number].get_lines()
        assert [line.get_label() for line in lines] == list(by_model)
        for line, (model, points) in zip(lines, by_model.items(), strict=True):
            shown = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
            assert shown == {0.0: small.clean[model].brier} | {point.severity: point.brier for point in points}, name


# The paper


def test_the_paper_s_numbers_stand_beside_those_of_its_own_set_only() -> None:
    models = {"gated": tiny_gated(), "plain heads": tiny_gated(softmax=False)}
    result = shift(models, named("cifar10 test"), {"blur": [0.7, 0.8]}, text="")
    text = str(result)
    assert "the paper's are of vgg16_bn" in text
    row = next(line for line in text.splitlines() if line.startswith("│ 0.7 "))
    assert [cell.strip() for cell in row.split("│")[4:-1]] == ["0.16", "0.18", "0.39", "0.19"]
    row = next(line for line in text[text.index("without (plain heads)") :].splitlines() if "0.48" in line)
    assert [cell.strip() for cell in row.split("│")[4:-1]] == ["0.18", "0.48"]
    assert result.to_json()["corruptions"]["blur"]["paper"][0]["dense"] == 0.11
    assert "paper:" not in str(shift(models, named("cifar100 test"), {"blur": [0.7]}, text=""))


def test_the_paper_s_severities_are_ours() -> None:
    for name in ("blur", "noise"):
        assert tuple(row.severity for row in paper_shift().brier[name]) == corruption(name).severities


def test_the_paper_s_numbers_are_those_it_printed() -> None:
    source = SHARED / "paper.tex"
    if not source.is_file():
        pytest.skip("the paper's source is not there")
    text = source.read_text()
    tables = text[: text.index("Dataset shift experiments")].split(r"\begin{table*}")[-1].split(r"\begin{subtable}")[1:]
    rows = [
        [
            [float(cell) for cell in re.findall(r"\d\.\d+", line)]
            for line in table.splitlines()
            if re.search(r"&.*\d\.\d", line)
        ]
        for table in tables
    ]
    for name, printed in zip(("blur", "noise"), rows, strict=False):
        ours = [[row.severity, row.dense, row.ftwt, row.taylor, row.uniform] for row in paper_shift().brier[name]]
        assert ours == printed
    for columns, name in ((slice(0, 2), "blur"), (slice(2, 4), "noise")):
        ours = [[row.ftwt, row.without_softmax] for row in paper_shift().brier[name] if row.without_softmax is not None]
        assert ours == [row[columns] for row in rows[2]]


# Runs and the command

TABLE: dict[str, Any] = {
    "data": {"name": "synthetic", "batch_size": 8, "args": {"train": 24, "test": 20, "shape": [1, 8, 8]}},
    "backbone": {"name": "resnet8_digits"},
    "train": {"epochs": 1},
}


def call(*args: object) -> Any:
    app = typer.Typer()
    app.command()(shift_command)
    return CliRunner().invoke(app, list(map(str, args)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    parts: dict[str, dict[str, Any]] = {
        "dense": {},
        "gated": {"gate": {"ratio": 0.8}},
        "bare": {"gate": {"ratio": 0.8, "softmax": False}},
        "pruned": {"prune": {"type": "L1", "macs": 0.5}},
        "other": {"data": {**TABLE["data"], "args": {**TABLE["data"]["args"], "seed": 1}}},
    }
    for name, part in parts.items():
        train_experiment(parse_experiment({**TABLE, **part}), folder / name)
    return folder


def test_the_command_compares_runs_and_writes_where_they_come_from(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    others = [word for name in ("gated", "bare", "pruned") for word in ("--compare", runs / name)]
    done = call(
        runs / "dense", *others, "--corruption", "blur", "--corruption", "noise=0,0.3", "--out", out, "--classes"
    )
    assert done.exit_code == 0, done.output
    for part in ("blur: Brier score", "noise: Brier score", "noise 0.3: top-1", "heads (gated) and without (bare)"):
        assert part in done.output
    found = json.loads(out.read_text())
    assert found["provenance"]["machine"]["cpu"]
    assert list(found["clean"]) == list(found["runs"]) == ["dense", "gated", "bare", "pruned"]
    assert found["runs"]["pruned"]["experiment"]["prune"]["macs"] == 0.5
    assert found["runs"]["gated"]["provenance"]["torch"] == torch.__version__
    assert str(runs) not in out.read_text()
    for name in found["runs"]:
        report = eval_run(runs / name)
        assert found["clean"][name]["top1"] == report.top1
        assert found["clean"][name]["reduction"] == pytest.approx(report.reduction)
    assert found["clean"]["pruned"]["reduction"]["executed"] == pytest.approx(0.5, abs=0.03)
    assert [point["severity"] for point in found["corruptions"]["noise"]["models"]["bare"]] == [0, 0.3]


def test_fewer_images_give_each_class_its_share(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = call(runs / "gated", "--images", 10, "--corruption", "blur=0.5", "--out", out)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert found["n"] == 10
    assert {part["n"] for part in found["clean"]["gated"]["per_class"].values()} == {1}
    assert call(runs / "gated", "--images", 1000, "--corruption", "blur=0.5").exit_code == 0


def test_runs_of_one_name_are_told_apart_by_the_folder_above(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "dense", tmp_path / "again" / "dense")
    names = list(read_runs([runs / "dense", tmp_path / "again" / "dense"]).models)
    assert names == [f"{runs.name}/dense", "again/dense"]
    with pytest.raises(ConfigError, match="every run must be named once"):
        read_runs([runs / "dense", runs / ".." / runs.name / "dense"])


def test_what_cannot_be_run_says_why(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "experiment.json").write_text((runs / "dense" / "experiment.json").read_text())
    for args, error, text in (
        ((tmp_path,), FileError, r"holds no run: it has no experiment\.json"),
        ((tmp_path / "unfinished",), FileError, r"is not finished: it has no result\.json; call its `cofire train`"),
        ((runs / "dense", "--compare", runs / "other"), ConfigError, "on one data set: dense is on synthetic"),
        ((runs / "dense", "--corruption", "nois"), ConfigError, "did you mean 'noise'"),
        ((runs / "dense", "--corruption", "noise=x"), ConfigError, "takes numbers separated by commas, got 'x'"),
        ((runs / "dense", "--corruption", "noise=-1"), ConfigError, r"at least 0, got -1\.0"),
        ((runs / "dense", "--corruption", "noise=inf"), ConfigError, "got inf"),
        ((runs / "dense", "--plot", "x.gif"), ConfigError, r"must be a file in \.svg"),
    ):
        done = call(*args)
        assert isinstance(done.exception, error), args
        assert re.search(text, str(done.exception)), (args, str(done.exception))

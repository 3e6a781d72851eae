"""train --twin: the same number of filters, the same training, an ordinary run beside the dynamic one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import cofire
from cofire import ConfigError, Fixed, GatedModel, evaluate
from cofire.analysis.page import _summary
from cofire.cli import app
from cofire.experiments.recipes import parse_experiment, read_run
from cofire.experiments.reproduce import _HONEST, Reproduction, Row
from cofire.experiments.runs import eval_run, read_result, read_sets, train_experiment
from cofire.experiments.twin import train_twin, untrained_twin
from cofire.pruning.recovery import recalibrate

TINY: dict[str, Any] = {
    "data": {"name": "synthetic", "batch_size": 8, "args": {"train": 48, "test": 16, "shape": [1, 8, 8]}},
    "backbone": {"name": "resnet8_digits"},
    "gate": {"ratio": 0.8, "softmax": False},
    "train": {"epochs": 1, "head_lr": 1.0, "select": "last"},
}
RECIPE = """
[data]
name = "synthetic"
batch_size = 8
args = {train = 48, test = 16, shape = [1, 8, 8]}
[backbone]
name = "resnet8_digits"
[gate]
softmax = false
[train]
epochs = 1
select = "last"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "a"
    train_experiment(parse_experiment(TINY), folder)
    train_twin(folder)
    return folder


def test_the_twin_is_an_ordinary_run_with_as_many_filters(run: Path) -> None:
    own, twin = read_run(run), read_run(run / "twin")
    assert (twin.train, twin.data, twin.backbone) == (own.train, own.data, own.backbone)
    assert isinstance(twin.gate, Fixed)
    model, still = cofire.load(run), cofire.load(run / "twin")
    assert isinstance(model, GatedModel)
    assert isinstance(still, GatedModel)
    images = read_sets(own).train.loader(48)
    with torch.no_grad():
        x = next(iter(images))[0]
        model(x), still(x)
    assert still.masks.keys() == model.masks.keys()
    for name, mask_BO in model.masks.items():
        kept = still.masks[name][0]
        assert int(kept.sum()) == max(1, round(float(mask_BO.double().sum(1).mean())))
        rate = mask_BO.double().mean(0)
        assert float(rate[kept].min()) >= (float(rate[~kept].max()) if (~kept).any() else 0.0)
    assert evaluate(still, images, text="").bits == 0.0


def test_results_rows_pages_and_reports_carry_it(run: Path) -> None:
    result = read_result(run)
    assert result["twin"] == json.loads((run / "twin" / "result.json").read_text())["test"]
    report = eval_run(run)
    assert report.twin_top1 == result["twin"]["top1"]
    assert "static twin, top-1" in str(report)
    told = dict(_summary([result]))
    assert told["bits per filter"] == [f"{result['test']['bits']:.3f}"]
    assert told["static twin, top-1"] == [f"{100 * result['twin']['top1']:.2f} %"]
    row: Any = type("Paper", (), {"network": "N", "method": "M", "values": {}, "recipes": {}})()
    table: Any = type("Table", (), {"columns": ("top1",), "name": "t", "title": "T"})()
    made = Reproduction(table=table, budget="short", rows=[Row(paper=row, recipe=None, results=[result], dense=[])])
    cells = dict(zip(made.headings(), made.cells(made.rows[0]), strict=True))
    assert cells[_HONEST["twin"]] == f"{100 * result['twin']['top1']:.2f}"
    assert cells[_HONEST["bits"]] == f"{result['test']['bits']:.3f}"


def test_the_engine_runs_a_twin(run: Path) -> None:
    twin = cofire.load(run / "twin")
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = twin(x)
    engine = cofire.compile(twin)
    torch.testing.assert_close(engine(x), wanted, rtol=1e-3, atol=1e-4)
    assert sum(engine.last_macs.values()).tolist() == twin.cost().total("executed").tolist()


def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(RECIPE)
    arguments = ["train", str(tmp_path / "r.toml"), "--out", str(tmp_path / "run"), "--twin"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert "static twin: top-1" in done.stdout
    assert read_run(tmp_path / "run" / "twin").name == "r-twin"


def test_what_is_static_needs_no_twin(run: Path, tmp_path: Path) -> None:
    train_experiment(parse_experiment({**TINY, "gate": None}), tmp_path)
    with pytest.raises(ConfigError, match="has no gates: it is static already and needs no twin"):
        train_twin(tmp_path)


@torch.no_grad()
def test_gates_that_never_change_are_their_own_untrained_twin(run: Path) -> None:
    """Whatever training made of the norms: a twin that fits them to the network without masks is far worse."""
    model, experiment = cofire.load(run), read_run(run)
    assert isinstance(model, GatedModel)
    for one in model.gates.values():
        one.head.linear.weight.zero_()
        one.head.linear.bias.copy_(torch.arange(len(one.head.linear.bias)) % 2 - 0.5)
    sets = read_sets(experiment)
    twin = untrained_twin(model, experiment, sets)
    recalibrate(model, sets.train.loader(experiment.data.eval_batch_size))
    x = next(iter(sets.test.loader(16)))[0]
    torch.testing.assert_close(twin(x), model(x), rtol=1e-5, atol=1e-5)

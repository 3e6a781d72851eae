"""A model's card: with it a model is compiled, timed and described where its data set is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small import tiny_gated, tiny_plain
from test_cli import Cofire
from torch import nn

from cofire import Card, ConfigError, FileError, GatedModel, data, load, save, zoo
from cofire.experiments import runs
from cofire.experiments.recipes import parse_experiment
from cofire.gates.persistence import read_card

CARD = Card(input_shape=(1, 8, 8), mean=(0.3,), std=(0.4,), classes=("a", "b"), data="letters", n=5, top1=0.8, macs=7)
SHAPE = (3, 32, 32)
TABLE: dict[str, Any] = {  # a network made for 224 x 224 on smaller images
    "data": {"name": "synthetic", "batch_size": 8, "args": {"train": 16, "test": 8, "shape": list(SHAPE)}},
    "backbone": {"name": "mobilenet_v1_imagenet", "args": {"width": 0.25}},
    "train": {"epochs": 1},
}
WAYS = {"dense": {}, "gated": {"gate": {"ratio": 0.8}}, "pruned": {"prune": {"type": "L1", "macs": 0.6}}}


@pytest.fixture
def cofire(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cofire:
    return Cofire(capsys, monkeypatch)


@pytest.fixture(scope="module", params=WAYS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of each kind."""
    out = tmp_path_factory.mktemp("runs") / request.param
    runs.train_experiment(parse_experiment({**TABLE, **WAYS[request.param]}), out)
    return out


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str, **_: Any) -> None:
        raise FileError(f"{name} is not on this machine")

    monkeypatch.setattr(data, "source", gone)


# Files


@pytest.mark.parametrize("make", [tiny_plain, tiny_gated])
def test_a_card_comes_back_and_leaves_with_the_next_model(make: Any, tmp_path: Path) -> None:
    save(make(), tmp_path, CARD)
    assert read_card(tmp_path) == CARD
    load(tmp_path)
    save(make(), tmp_path)
    assert read_card(tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"std": (0.0,)}, r"Card.mean and Card.std must have a value for each of 1 channels, std above 0"),
        ({"mean": (0.1, 0.2)}, r"a value for each of 1 channels"),
        ({"input_shape": (1, 0, 8)}, r"Card.input_shape must be \(C, H, W\), each at least 1, got \(1, 0, 8\)"),
        ({"top1": "high"}, "Card.top1 must be of type float"),
    ],
)
def test_what_is_wrong_in_a_card_is_named(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        Card(**{"input_shape": (1, 8, 8), "mean": (0.3,), "std": (0.4,), **changes})
    config = save(tiny_plain(), tmp_path, CARD) / "config.json"
    table = json.loads(config.read_text())
    config.write_text(json.dumps({**table, "card": {**table["card"], **changes}}))
    with pytest.raises(FileError, match=r"config\.json is damaged"):
        read_card(tmp_path)


def test_the_input_shape_of_a_plain_model_comes_back(tmp_path: Path) -> None:
    model = tiny_plain()
    model.input_shape = (1, 16, 16)
    save(model, tmp_path)
    assert load(tmp_path).input_shape == (1, 16, 16)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["input_shape"]  # as cofire 0.1 wrote it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load(tmp_path).input_shape == (1, 8, 8)


# Runs


def test_the_card_of_a_run_says_what_its_result_says(run: Path) -> None:
    card, test = read_card(run), json.loads((run / "result.json").read_text())["test"]
    images = data.source("synthetic", **TABLE["data"]["args"])[1]
    assert (card.n, card.top1) == (test["n"], test["top1"])
    assert card.macs == pytest.approx(test["dense_macs"] * (1 - test["reduction"]["executed+heads"]), abs=0.5)
    assert (card.input_shape, card.mean, card.std, card.classes) == (SHAPE, images.mean, images.std, images.classes)
    assert card.data == "synthetic"


@pytest.mark.usefixtures("no_data")
def test_a_run_compiles_at_its_own_input_shape_without_its_data(run: Path) -> None:
    engine, card, model = runs.compile_run(run), read_card(run), load(run)
    assert engine.input_shape == SHAPE
    pixels = torch.rand(2, *SHAPE)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (card.mean, card.std))
    with torch.no_grad():
        wanted = model((pixels - mean) / std)
    torch.testing.assert_close(engine(pixels), wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("no_data")
def test_info_counts_macs_at_the_run_s_input_shape_and_shows_the_card(run: Path, cofire: Cofire) -> None:
    found = cofire.json("info", run)
    assert tuple(found["card"]["input_shape"]) == SHAPE
    assert "trained on synthetic" in cofire("info", run).stdout
    model = load(run)
    if not isinstance(model, GatedModel):
        name, first = next((name, part) for name, part in model.named_modules() if isinstance(part, nn.Conv2d))
        assert found["macs"][name] == 16 * 16 * 9 * 3 * first.out_channels


def test_an_older_run_without_a_card_reads_its_data_set(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("config.json", "experiment.json", "model.safetensors"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("card")
    if config["gate"] is None:
        config.pop("input_shape")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert runs.compile_run(tmp_path).input_shape == SHAPE
    monkeypatch.setattr(data, "source", lambda name, **_: pytest.fail("there is a card"))
    runs.compile_run(run)


@pytest.mark.usefixtures("no_data")
def test_bench_times_a_run_without_its_data_on_random_pixels(cofire: Cofire, tmp_path: Path, caplog: Any) -> None:
    save(tiny_gated().eval(), tmp_path / "model", CARD)
    done = cofire("bench", tmp_path / "model", "--rounds", 2, "--warm-up", 0, "--out", tmp_path / "bench.json")
    assert done.code == 0, done.stderr
    assert json.loads((tmp_path / "bench.json").read_text())["inputs"] == "random"
    assert "timed on random pixels" in caplog.text + done.stderr


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("name", zoo.names())
def test_every_model_of_the_zoo_has_a_card_that_agrees_with_its_result(name: str, tmp_path: Path) -> None:
    card, test = read_card(zoo.folder(name)), json.loads((zoo.folder(name) / "result.json").read_text())["test"]
    assert card is not None
    assert (card.n, card.top1, len(card.classes)) == (test["n"], test["top1"], len(test["per_class"]))
    assert runs.compile_run(zoo.folder(name)).input_shape == card.input_shape
    assert card.input_shape == ((1, 8, 8) if "digits" in name else (3, 32, 32))

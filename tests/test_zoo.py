"""The zoo: what ships loads, does what its result says, and is a run folder for every command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small import digest

from cofire import CofireError, FileError, GatedModel, load, zoo
from cofire.experiments.recipes import parse_experiment, read_run
from cofire.experiments.runs import build_model, eval_run, read_sets, train_experiment
from cofire.text import percent

TINY: dict[str, Any] = {
    "data": {"name": "synthetic", "batch_size": 8, "args": {"train": 16, "test": 8, "shape": [1, 8, 8]}},
    "backbone": {"name": "resnet8_digits"},
    "train": {"epochs": 1},
}


@pytest.fixture
def own_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zoo with a dense and a gated model."""
    train_experiment(parse_experiment(TINY), tmp_path / "dense")
    train_experiment(parse_experiment({**TINY, "gate": {"ratio": 0.8}}), tmp_path / "gated")
    monkeypatch.setattr(zoo, "_HERE", tmp_path)
    return tmp_path


def test_the_zoo_lists_and_loads_its_models(own_zoo: Path) -> None:
    assert zoo.names() == ["dense", "gated"]
    assert isinstance(zoo.load("gated"), GatedModel)
    assert digest(zoo.load("dense")) == digest(load(own_zoo / "dense"))
    entry = zoo.entry("gated")
    assert (entry.network, entry.data, entry.method, entry.n) == ("resnet8_digits", "synthetic", "FTWT r = 0.8", 8)
    assert entry.top1 == eval_run(own_zoo / "gated").top1
    assert "of the MACs saved" in str(entry)
    assert "MACs" not in str(zoo.entry("dense"))


@pytest.mark.parametrize(
    ("sections", "method"),
    [
        ({"gate": {"type": "Fixed"}}, "Fixed"),  # a method without a ratio
        ({"prune": {"type": "L1", "macs": 0.6}}, "L1, 60 % of the MACs"),
        ({"prune": {"type": "L1", "macs": 0.6}, "gate": {"ratio": 0.9}}, "L1, 60 % of the MACs and FTWT r = 0.9"),
    ],
)
def test_an_entry_names_any_method(sections: Any, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "_HERE", tmp_path)
    train_experiment(parse_experiment({**TINY, **sections}), tmp_path / "own")
    assert zoo.entry("own").method == method
    assert f"synthetic, {method}: top-1" in str(zoo.entry("own"))


def test_what_is_saved_counts_what_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "_HERE", tmp_path)
    train_experiment(parse_experiment({**TINY, "gate": {"type": "SecondLook"}}), tmp_path / "own")
    saved = zoo.entry("own").reduction
    assert saved["executed"] - saved["executed+heads"] > 0.2  # the first look
    assert f", {percent(saved['executed+heads'])} of the MACs saved" in str(zoo.entry("own"))


def test_an_unknown_model_is_named_with_what_there_is(own_zoo: Path) -> None:
    with pytest.raises(CofireError, match=r"'dens'.*dense"):
        zoo.load("dens")


def test_a_copy_is_a_run(own_zoo: Path) -> None:
    copied = zoo.copy("gated", own_zoo / "copies" / "mine")
    assert eval_run(copied).to_json() == eval_run(own_zoo / "gated").to_json()
    with pytest.raises(FileError, match="must be a new folder"):
        zoo.copy("gated", copied)


def test_a_recipe_may_start_from_the_zoo(own_zoo: Path) -> None:
    experiment = parse_experiment({**TINY, "backbone": {"name": "resnet8_digits", "weights": "zoo:dense"}})
    assert digest(build_model(experiment, read_sets(experiment))) == digest(zoo.load("dense"))


@pytest.mark.parametrize("name", zoo.names())
def test_what_ships_is_small_and_explains_itself(name: str) -> None:
    files = {path.name for path in zoo.folder(name).iterdir()}
    assert files >= {"config.json", "model.safetensors", "experiment.json", "result.json"}
    assert sum(path.stat().st_size for path in zoo.folder(name).iterdir()) < 5_000_000
    assert read_run(zoo.folder(name)).backbone.name == zoo.entry(name).network
    assert zoo.load(name).training is False

"""Trackers see the figures of the log, whatever they are; one that is not there is named with the way to get it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import GeneralTracker
from small import digest, tiny_gated, tiny_images

from cofire import ConfigError, Recipe, TrainingError, fit
from cofire.experiments.recipes import parse_experiment
from cofire.experiments.runs import train_experiment
from cofire.training import log as runlog
from cofire.training import tracking

pytestmark = pytest.mark.usefixtures("one_thread")


class Remembering(GeneralTracker):
    """Keeps what it is told."""

    name = "remembering"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {}
        self.told: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, float], step: int | None = None, **options: Any) -> None:
        assert step is not None
        self.told.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def test_a_tracker_is_told_every_epoch_and_some_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runlog, "_TRACK_STEPS", 5)
    images, tracker = tiny_images(48), Remembering()
    recipe = Recipe(epochs=3, lr=0.05, schedule="cosine")
    result = fit(
        tiny_gated(), images.loader(16, train=True), recipe, val=images.loader(48), out=tmp_path, track=tracker
    )
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in log if line["event"] == "step"}
    assert len(steps) == 9
    expected: list[tuple[int, dict[str, float]]] = []
    for epoch, record in enumerate(result.epochs):
        end = 3 * (epoch + 1)
        if epoch == 1:
            expected.append((5, {f"step/{name}": steps[5][name] for name in ("loss", "mask_loss", "lr")}))
        names = ("loss", "mask_loss", "val_top1", "val_reduction")
        expected.append((end, {**{name: getattr(record, name) for name in names}, "lr": steps[end]["lr"]}))
    assert tracker.told == expected
    assert tracker.settings["lr"] == 0.05
    assert tracker.settings["schedule"] == "cosine"
    assert {type(value) for value in tracker.settings.values()} <= {bool, int, float, str}
    assert tracker.finished == 1


def test_without_validation_nothing_is_made_up() -> None:
    tracker = Remembering()
    fit(tiny_gated(), tiny_images().loader(48, train=True), Recipe(epochs=1), track=tracker)
    assert [set(values) for _, values in tracker.told] == [{"loss", "mask_loss", "lr"}]


def test_a_tracker_changes_no_weight_and_ends_with_a_run_that_fails() -> None:
    loader, recipe = tiny_images().loader(16, train=True), Recipe(epochs=2, lr=0.05)
    tracked, alone, tracker = tiny_gated(), tiny_gated(), Remembering()
    fit(tracked, loader, recipe, track=tracker)
    fit(alone, loader, recipe)
    assert digest(tracked) == digest(alone)
    with pytest.raises(TrainingError, match="must be finite"):
        fit(tiny_gated(), loader, dataclasses.replace(recipe, lr=1e30), track=tracker)
    assert tracker.finished == 2


def test_a_recipe_reports_too(tmp_path: Path) -> None:
    part = {"name": "synthetic", "batch_size": 8, "args": {"train": 16, "test": 8, "shape": [1, 8, 8]}}
    table = {"data": part, "backbone": {"name": "resnet8_digits"}, "train": {"epochs": 1}}
    tracker = Remembering()
    train_experiment(parse_experiment(table), tmp_path / "run", track=tracker)
    assert [step for step, _ in tracker.told] == [2]


def test_trackers_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, recipe = tiny_images().loader(16, train=True), Recipe(epochs=1)
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["wandb"])
    with pytest.raises(ConfigError, match="tracker 'trackio' is not installed here: pip install trackio"):
        fit(tiny_gated(), loader, recipe, out=tmp_path / "run", track="trackio")
    with pytest.raises(ConfigError, match="unknown tracker 'tensorbord'; did you mean 'tensorboard'"):
        fit(tiny_gated(), loader, recipe, out=tmp_path / "run", track="tensorbord")
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(ConfigError, match="tracker 'tensorboard' writes files: give fit the folder out="):
        fit(tiny_gated(), loader, recipe, track="tensorboard")
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_a_file_in_the_run_s_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    images = tiny_images()
    loader = images.loader(16, train=True)
    fit(tiny_gated(), loader, Recipe(epochs=2), val=images.loader(48), out=tmp_path, track="tensorboard")
    seen = EventAccumulator(str(tmp_path / "cofire"))
    seen.Reload()
    assert [event.step for event in seen.Scalars("val_top1")] == [3, 6]

"""The static twin of a finished run: as many filters, the same ones for every image; trained as the run was."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from cofire.data.feeding import first_images
from cofire.errors import ConfigError
from cofire.experiments.recipes import Experiment, read_run
from cofire.experiments.runs import TWIN, read_result, read_sets, train_experiment
from cofire.gates.fixed import Fixed
from cofire.gates.ftwt_offline import most_often_on
from cofire.gates.gating import GatedModel, require_filters
from cofire.gates.persistence import load
from cofire.graph.units import Placement
from cofire.training.tracking import Track

_IMAGES = 2000


def train_twin(run: str | Path, *, track: Track | None = None) -> dict[str, Any]:
    """Train the twin of a finished run, a run of its own in the folder ``twin`` of the run's; returns its result.

    It starts from the same weights and has the same recipe. Afterwards the run's result shows it beside its own.

    Raises:
        ConfigError: the run has no gates that decide on filters.
    """
    return train_experiment(twin_experiment(run), Path(run) / TWIN, track=track)


def twin_experiment(run: str | Path) -> Experiment:
    """What makes the twin of a finished run: the static method that its own names, or the filters most often on.

    The latter are counted on its first training images.
    """
    experiment, model = read_run(run), load(run)
    if not isinstance(model, GatedModel):
        raise ConfigError(f"the run in {run} has no gates: it is static already and needs no twin")
    macs = round(1 - read_result(run)["test"]["reduction"]["executed+heads"], 4)
    if (static := model.config.twin(macs, experiment.train)) is not None:
        named = {"name": f"{experiment.name}-twin", "gate": None, "prune": static[0], "train": static[1]}
        return dataclasses.replace(experiment, signature=None, budget=None, **named)
    require_filters(model, "a static twin")
    images = read_sets(experiment).train.take(slice(0, _IMAGES)).loader(experiment.data.eval_batch_size)
    placed = {field.name: getattr(model.config, field.name) for field in dataclasses.fields(Placement)}
    config = Fixed(**{**placed, "always": True}, kept=most_often_on(model, first_images(images, _IMAGES)))
    return dataclasses.replace(experiment, name=f"{experiment.name}-twin", gate=config, signature=None, budget=None)

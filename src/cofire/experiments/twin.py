"""The static twin of a finished run: as many filters, the same ones for every image; trained as the run was."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from cofire.data.feeding import AnyLoader, first_images
from cofire.errors import ConfigError
from cofire.experiments.recipes import Experiment, read_run
from cofire.experiments.runs import TWIN, Sets, read_result, read_sets, train_experiment
from cofire.gates.fixed import Fixed
from cofire.gates.ftwt_offline import most_often_on
from cofire.gates.gating import GatedModel, gate, require_filters
from cofire.gates.persistence import load
from cofire.graph.units import Placement
from cofire.pruning.recovery import recalibrate
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
    config = _fixed(model, _first_of_train(experiment, read_sets(experiment)))
    return dataclasses.replace(experiment, name=f"{experiment.name}-twin", gate=config, signature=None, budget=None)


def untrained_twin(gated: GatedModel, experiment: Experiment, sets: Sets) -> GatedModel:
    """The trained network of ``gated`` with one choice of filters for all images; not trained again.

    Batch norms measure mean and variance anew, on the first training images. Factor and shift stay: they were learned
    under masks, and the network without masks is nothing that they could be fitted to.
    """
    images, shape = _first_of_train(experiment, sets), gated.graph.input_shape
    config, groups = _fixed(gated, images), set(gated.gates)
    twin = gate(gated.backbone, config, filter_fn=lambda unit: unit.group in groups, input_shape=shape).eval()
    recalibrate(twin, images)
    return twin


def _first_of_train(experiment: Experiment, sets: Sets) -> AnyLoader:
    return sets.train.take(slice(0, _IMAGES)).loader(experiment.data.eval_batch_size)


def _fixed(gated: GatedModel, images: AnyLoader) -> Fixed:
    """The filters most often on, where the gates are."""
    require_filters(gated, "a static twin")
    placed = {field.name: getattr(gated.config, field.name) for field in dataclasses.fields(Placement)}
    return Fixed(**{**placed, "always": True}, kept=most_often_on(gated, first_images(images, _IMAGES)))

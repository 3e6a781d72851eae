"""A trained model brought to the budget of its experiment: thresholds, or numbers of filters."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from cofire import signatures
from cofire.calibrate import calibrate
from cofire.data.images import AbstractImages
from cofire.errors import ConfigError
from cofire.evaluation import evaluate
from cofire.experiments.recipes import Experiment
from cofire.gates.gating import GatedModel, gate

_ENOUGH = 1000  # validation images for thresholds; of fewer, each is a tenth of a point
_BUDGET_IMAGES = 5000  # on which thresholds are set; with 2,000 the share of an image in five is off by a point
_POINT = 0.01  # of the dense MACs: nearer to its budget a number of filters stays what it was in training


def check_budget(model: nn.Module, experiment: Experiment) -> None:
    """Raise before training, not after, where a budget cannot be met by a threshold."""
    if experiment.budget is not None and isinstance(model, GatedModel) and model.threshold is None:
        raise ConfigError(
            f"[budget] sets a threshold, and {model.config.label} does not decide by one; a fixed number of filters "
            'for a budget is [signature] kind = "mass", macs = ...'
        )


def meet_budget(
    model: nn.Module, experiment: Experiment, train: AbstractImages, val: AbstractImages | None
) -> nn.Module:
    """A trained model at the budget of its experiment: with thresholds set in place, or with other numbers of filters.

    On validation images if there are enough of them: gates are surer of images that they have learned from.
    """
    if not isinstance(model, GatedModel):
        return model
    images = val if val is not None and len(val) >= _ENOUGH else train
    loader = images.take(slice(0, _BUDGET_IMAGES)).loader(experiment.data.eval_batch_size)
    if experiment.budget is not None:
        calibrate(model, loader, macs=experiment.budget.macs, per=experiment.budget.per, images=_BUDGET_IMAGES)
    counted = experiment.signature
    if counted is not None and counted.macs is not None and model.threshold is None:
        few = images.take(slice(0, signatures.IMAGES)).loader(experiment.data.eval_batch_size)
        left = 1 - evaluate(model, few, text="").reduction["executed+heads"]
        if abs(left - counted.macs) > _POINT:
            return _with_signature(model, signatures.recounted(model, few, macs=counted.macs))
    return model


def _with_signature(model: GatedModel, signature: signatures.Signature) -> GatedModel:
    """The same weights, and other numbers of filters."""
    chosen: dict[str, Any] = {"signature": signature}
    gated = {unit.name for unit in model.units if unit.gated}
    other = gate(
        model.backbone,
        dataclasses.replace(model.config, **chosen),
        filter_fn=lambda unit: unit.name in gated,
        input_shape=model.graph.input_shape,
    )
    other.load_state_dict(model.state_dict())
    return other

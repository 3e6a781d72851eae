"""Recipe: how a model is trained; only data, and the rates it implies at each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cofire.errors import ConfigError
from cofire.files.strict import check

_RISE, _START = 0.3, 1 / 25  # of one-cycle: share of the steps in which the rate rises, and from where (Smith 2018)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train; the defaults are the paper's CIFAR settings for dynamic training.

    Args:
        epochs: passes over the training set; 0 trains nothing, so that a run only tests.
        stop_after: end after so many epochs of the schedule; the rest of it is not run.
        lr, momentum, weight_decay: SGD on the backbone.
        head_lr, head_weight_decay: SGD on the gates, same momentum.
        schedule: ``steps`` divides by 10 at each of ``milestones`` (epochs); ``cosine`` falls to 0 step by step;
            ``one-cycle`` rises from lr / 25 to lr in the first 30 % of the steps, then falls to 0 like a cosine.
        head_schedule: ``same`` as the backbone's, or ``constant``.
        freeze_heads: epoch from which the gates no longer learn.
        warm_heads: epochs at the beginning in which only the gates learn, as with ``train="heads"``.
        train: ``all``, or ``heads``: the backbone stays bit-equal, batch-norm statistics included.
        accumulate: batches whose gradients make one step, at least 1; the last few of an epoch may be left over.
        average: decay in [0, 1) of a moving average of the weights, faster in the first steps: the average is what is
            validated and kept. 0 keeps the weights themselves.
        distill: share in [0, 1] of the task loss that is the distance to a teacher's logits; 1 needs no labels.
        temperature: of teacher and student in that distance, above 0.
        select: which epoch's weights are kept in the end: ``best`` on the validation set, or the ``last``.
        precision: ``fp32`` or ``bf16`` autocast.
        seed: of everything random.
        checkpoint_steps: steps between checkpoints, besides one after each epoch.
    """

    epochs: int = 200
    stop_after: int | None = None
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    head_lr: float = 0.1
    head_weight_decay: float = 0.0
    schedule: Literal["steps", "cosine", "one-cycle"] = "steps"
    milestones: tuple[int, ...] = (80, 120, 150)
    head_schedule: Literal["same", "constant"] = "same"
    freeze_heads: int | None = None
    warm_heads: int = 0
    train: Literal["all", "heads"] = "all"
    accumulate: int = 1
    average: float = 0.0
    distill: float = 0.0
    temperature: float = 4.0
    select: Literal["best", "last"] = "best"
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    checkpoint_steps: int | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.epochs < 0:
            raise ConfigError(f"Recipe.epochs must be at least 0, got {self.epochs}")
        for name in ("stop_after", "checkpoint_steps", "accumulate"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"Recipe.{name} must be at least 1, got {value}")
        for name in ("lr", "head_lr", "momentum", "weight_decay", "head_weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"Recipe.{name} must be a number >= 0, got {value}")
        if min(self.milestones, default=0) < 0 or (self.freeze_heads or 0) < 0:
            got = f"{self.milestones} and {self.freeze_heads}"
            raise ConfigError(f"Recipe.milestones and Recipe.freeze_heads must be epochs >= 0, got {got}")
        if self.warm_heads < 0:
            raise ConfigError(f"Recipe.warm_heads must be epochs >= 0, got {self.warm_heads}")
        if not 0.0 <= self.average < 1.0:
            raise ConfigError(f"Recipe.average must be in [0, 1), got {self.average}")
        if not (0.0 <= self.distill <= 1.0 and 0.0 < self.temperature < math.inf):
            got = f"{self.distill} and {self.temperature}"
            raise ConfigError(f"Recipe.distill must be in [0, 1] and Recipe.temperature above 0, got {got}")
        if self.train == "heads" and self.distill:
            raise ConfigError("Recipe(train='heads') has no task loss: distill must be 0")

    def factor(self, step: int, steps_per_epoch: int) -> float:
        """What the learning rate is multiplied with at a step, counted from the start of training."""
        if self.schedule == "cosine":
            return _cosine(step / (self.epochs * steps_per_epoch))
        if self.schedule == "one-cycle":
            done = step / (self.epochs * steps_per_epoch)
            return _START + (1 - _START) * done / _RISE if done < _RISE else _cosine((done - _RISE) / (1 - _RISE))
        return float(0.1 ** sum(step >= milestone * steps_per_epoch for milestone in self.milestones))

    def head_factor(self, step: int, steps_per_epoch: int) -> float:
        """The same for the gates."""
        if self.freeze_heads is not None and step >= self.freeze_heads * steps_per_epoch:
            return 0.0
        return 1.0 if self.head_schedule == "constant" else self.factor(step, steps_per_epoch)

    def only_heads(self, step: int, steps_per_epoch: int) -> bool:
        """True while the backbone rests."""
        return self.train == "heads" or step < self.warm_heads * steps_per_epoch


def _cosine(done: float) -> float:
    """From 1 to 0 as ``done`` goes from 0 to 1."""
    return 0.5 * (1 + math.cos(math.pi * done))

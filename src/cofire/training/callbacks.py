"""Callbacks: what may be done to a run of `fit` from outside, step by step and epoch by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from cofire.training.recipe import Recipe


class Run(Protocol):
    """What a callback sees of the run it belongs to."""

    @property
    def model(self) -> nn.Module:
        """The model that learns, without wrappers."""

    @property
    def recipe(self) -> Recipe:
        """How it is trained."""

    @property
    def step(self) -> int:
        """Steps done so far."""

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch."""


class AbstractCallback:
    """Base of callbacks; every method may be left as it is.

    A run that is killed goes on exactly only if all that a callback remembers from step to step is in ``state_dict``
    and in the state of its optimisers.
    """

    def on_start(self, run: Run) -> None:
        """Before the first step, and again before the first step after a resume, with the model as it is then."""

    def optimizers(self, run: Run) -> Sequence[torch.optim.Optimizer]:
        """Optimisers of its own: their gradients are cleared before each step, they step after the run's own."""
        return ()

    def loss(self, run: Run, x_BCHW: Tensor, label_B: Tensor | None, logits_BK: Tensor) -> Tensor | None:
        """A scalar to add to the loss of one batch; None for nothing."""
        return None

    def on_step(self, run: Run) -> None:
        """After each step of the optimisers."""

    def on_epoch(self, run: Run) -> None:
        """After the last step of an epoch, before it is validated and kept."""

    def state_dict(self) -> dict[str, Tensor]:
        """What must be there again after a resume."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``state_dict`` gave."""

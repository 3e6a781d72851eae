"""What a model's output has to do with a batch's targets: the task loss, and the one number an epoch is chosen by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cofire.errors import DataError
from cofire.evaluation import Report, check_labels, require_logits
from cofire.gates.losses import distillation
from cofire.training.recipe import Recipe

Loss = Callable[[Any, Any], Tensor]
"""(output, target) -> scalar: the model's output in training mode and the batch's second part, both as they are."""


def task_loss(output: Any, target: Any, taught_BK: Tensor | None, recipe: Recipe, own: Loss | None) -> Tensor:
    """The loss of one batch: the caller's ``own``, or cross-entropy and what a teacher says."""
    if own is not None:
        loss = own(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise DataError(f"loss(output, target) must give one number as a tensor, got {got}")
        return loss
    logits_BK, parts = require_logits(output, "fit", "loss=...").float(), []
    if taught_BK is not None:
        parts.append(recipe.distill * distillation(logits_BK, taught_BK, recipe.temperature))
    if recipe.distill < 1:
        if target is None:
            raise DataError(
                "training needs labels; with unlabelled images only the heads can learn, Recipe(train='heads'), "
                "or all from a teacher alone, Recipe(distill=1)"
            )
        check_labels(target, logits_BK.shape[1])
        parts.append((1 - recipe.distill) * F.cross_entropy(logits_BK, target))
    return torch.stack(parts).sum()


def score(report: Report) -> float:
    """What an epoch is chosen by, higher is better: top-1, or the first of the caller's own metrics."""
    return next(iter(report.metrics.values()), report.top1)

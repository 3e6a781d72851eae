"""From a network with a loss and a metric of its own to a faster program; segmentation.py and detection.py use it.

Shapes: B images of a batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cofire
from cofire import FTWT, Engine, Recipe
from cofire.experiments.provenance import provenance
from cofire.files.atomic import write_json
from cofire.speedup.measure import timed


@dataclass(frozen=True)
class Task:
    """``batch(images, seed)`` makes (x_BCHW, target); ``loss`` and ``metric`` see (output, target)."""

    name: str
    model: nn.Module
    batch: Callable[[int, int], tuple[Tensor, Any]]
    loss: Callable[[Any, Any], Tensor]
    metric: Callable[[Any, Any], dict[str, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """Of images that nothing was trained on: the metric, and the share of the dense MACs that was executed.

    ``executed`` is what the engine did, ``cost`` what is counted for its masks; heads are not in either.
    """

    untrained: float
    dense: float
    gated: float
    share: float
    executed: int
    cost: int


def made_faster(task: Task, *, batches: int, epochs: int, macs: float) -> tuple[Outcome, dict[str, Engine]]:
    """Train dense, then gated; meet the budget; compile both."""
    train, test = [task.batch(16, seed) for seed in range(batches)], task.batch(64, batches)

    def score(model: nn.Module) -> float:
        (value,) = cofire.evaluate(model, [test], metric=task.metric, text="").metrics.values()
        return value

    shape = tuple(test[0].shape[1:])
    untrained = score(task.model)
    cofire.fit(task.model, train, Recipe(epochs=epochs, lr=0.1, schedule="one-cycle"), loss=task.loss)
    config = cofire.solve_ratio(task.model, FTWT(softmax=False), train, macs=macs).config
    gated = cofire.gate(task.model, config, input_shape=shape)
    cofire.fit(gated, train, Recipe(epochs=epochs, lr=0.05, schedule="one-cycle"), loss=task.loss)
    share = cofire.calibrate(gated, train, macs=macs)

    engines = {"dense": cofire.compile(task.model, shape), "gated": cofire.compile(gated)}
    engines["gated"](test[0])
    executed = sum(int(macs_B.sum()) for macs_B in engines["gated"].last_macs.values())
    masks = {group: torch.from_numpy(mask_BO) for group, mask_BO in engines["gated"].last_masks.items()}
    counted = int(gated.cost(masks).total("executed").sum())
    return Outcome(untrained, score(task.model), score(gated), share, executed, counted), engines


def main(task: Task, metric: str) -> None:
    """The command line of a task."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    args = parser.parse_args()
    torch.manual_seed(0)
    outcome, engines = made_faster(task, batches=24, epochs=8, macs=0.5)
    milliseconds = timed(engines, task.model, [task.batch(8, 1000)[0]])
    print(f"{metric}: untrained {outcome.untrained:.3f}, dense {outcome.dense:.3f}, gated {outcome.gated:.3f}")
    print(f"MACs: {outcome.executed:,} executed, {outcome.cost:,} counted; {outcome.share:.3f} of dense with heads")
    print("milliseconds per image, one thread:", {name: round(ms, 3) for name, ms in milliseconds.items()})
    if args.json:
        found = {"task": task.name, "metric": metric, **asdict(outcome), "milliseconds": milliseconds}
        write_json(args.json, {"provenance": provenance(), **found})

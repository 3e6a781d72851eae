"""Tasks that are no classification: the caller's own loss and metric, in `fit` and `evaluate`, gates and all."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import patterns
import pytest
import torch
import torch.nn.functional as F
from small import ROOT
from torch import Tensor, nn

from cofire import FTWT, ConfigError, DataError, Recipe, estimate, evaluate, fit, gate, load, save

SIDE = 16


def shapes(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images of a bright box on noise, (n, 3, 16, 16); its map of classes, and its centre and size in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.randn(n, 3, SIDE, SIDE, generator=generator)
    classes = torch.zeros(n, SIDE, SIDE, dtype=torch.long)
    boxes = torch.zeros(n, 4)
    for i in range(n):
        x, y = (int(torch.randint(1, 7, (), generator=generator)) for _ in range(2))
        kind = i % 2
        images[i, kind, y : y + 8, x : x + 8] += 2
        classes[i, y : y + 8, x : x + 8] = 1 + kind
        boxes[i] = torch.tensor([x + 4, y + 4, 8, 8]) / SIDE
    return images, classes, boxes


def segmentation_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def pixels_right(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"pixels": (output.argmax(1) == target).double().mean((1, 2))}


def cells(boxes: Tensor, maps: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """At each level the cell that holds the box's centre, and the box's place in it."""
    found = []
    for level in maps:
        height, width = level.shape[2:]
        column, row = (boxes[:, 0] * width).long(), (boxes[:, 1] * height).long()
        found.append((row * width + column, boxes))
    return found


def detection_loss(output: Any, target: dict[str, Tensor]) -> Tensor:
    """``output``: maps at two levels, of 4 numbers of a box and a score for each class."""
    total = torch.zeros(())
    for level, (cell, boxes) in zip(output, cells(target["boxes"], output), strict=True):
        flat = level.flatten(2)
        wanted = torch.zeros_like(flat[:, 4:])
        wanted[torch.arange(len(cell)), target["kind"], cell] = 1
        total = total + F.binary_cross_entropy_with_logits(flat[:, 4:], wanted)
        at_cell = flat[torch.arange(len(cell)), :4, cell]
        total = total + (at_cell[:, 2:].exp() - boxes[:, 2:]).square().mean()
    return total


def kind_found(output: Any, target: dict[str, Tensor]) -> dict[str, Tensor]:
    decoded, _ = output
    return {"kind": (decoded[:, 4:].amax(2).argmax(1) == target["kind"]).double()}


def detection(n: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    images, _, boxes = shapes(n, seed)
    return images, {"boxes": boxes, "kind": torch.arange(n) % 2}


def segmentation(n: int, seed: int) -> tuple[Tensor, Tensor]:
    return shapes(n, seed)[:2]


TASKS: dict[str, Any] = {
    "unet": (segmentation, segmentation_loss, pixels_right, 0.9),
    "yolo": (detection, detection_loss, kind_found, 0.75),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_gated_network_learns_another_task_with_the_callers_loss_and_metric(name: str, tmp_path: Path) -> None:
    batches, loss, metric, wanted = TASKS[name]
    model = patterns.build(name)
    train, val = [batches(16, seed) for seed in range(8)], [batches(16, 99)]
    table = estimate(model, FTWT(ratio=0.9), val, [0.5, 0.9])
    assert 0 < table.reduction["executed"][1] < table.reduction["executed"][0] < 1
    torch.manual_seed(0)
    gated = gate(model, FTWT(ratio=0.8), input_shape=(3, SIDE, SIDE))
    before = evaluate(gated, val, metric=metric)
    recipe = Recipe(epochs=8, lr=0.05, head_lr=0.05, schedule="one-cycle", select="best")
    result = fit(gated, train, recipe, val=val, loss=loss, metric=metric, out=tmp_path / "run")
    after = evaluate(gated, val, metric=metric)
    (value,) = after.metrics.values()
    assert value > max(wanted, next(iter(before.metrics.values())))
    assert after.reduction["executed"] > 0.02
    assert math.isnan(after.top1)
    assert after.per_class == {}
    assert next(iter(after.metrics)) in str(after)
    scores = [record.val_score for record in result.epochs]
    assert scores[result.selected] == max(scores) == value
    assert all(record.val_top1 is None for record in result.epochs)
    save(gated, tmp_path / "saved")
    again = evaluate(load(tmp_path / "saved", model=patterns.build(name)), val, metric=metric)
    assert again == after


def test_a_killed_run_with_a_loss_of_ones_own_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    class Killed(Exception):
        """In the second epoch."""

    def trained(out: Path, calls: int) -> nn.Module:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            nonlocal calls
            calls -= 1
            if calls < 0:
                raise Killed
            return segmentation_loss(output, target)

        model = patterns.build("unet")
        fit(model, [segmentation(4, seed) for seed in range(2)], Recipe(epochs=2, lr=0.05), loss=loss, out=out)
        return model

    whole = trained(tmp_path / "whole", 100)
    with pytest.raises(Killed):
        trained(tmp_path / "killed", 3)
    resumed = trained(tmp_path / "killed", 100)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_what_is_no_logits_asks_for_a_loss_and_a_metric() -> None:
    model, batch = patterns.build("two_headed"), (torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
    with pytest.raises(DataError, match=r"evaluate takes a model whose output is logits .*got a tuple.*metric="):
        evaluate(model, [batch])
    with pytest.raises(DataError, match=r"fit takes a model whose output is logits \(B, K\), got a tuple.*loss="):
        fit(model, [batch], Recipe(epochs=1))
    with pytest.raises(DataError, match=r"got a tensor \(2, 3, 16, 16\)"):
        evaluate(patterns.build("unet"), [(torch.randn(2, 3, 16, 16), torch.tensor([0, 1]))])


def test_a_loss_or_metric_that_is_none_is_refused() -> None:
    model, batch = patterns.build("unet"), segmentation(2, 0)
    with pytest.raises(DataError, match=r"loss\(output, target\) must give one number as a tensor, got \(2, 16, 16\)"):
        fit(model, [batch], Recipe(epochs=1), loss=lambda out, target: F.cross_entropy(out, target, reduction="none"))
    with pytest.raises(DataError, match=r"metric 'all' must be a number for each of 2 samples, \(2,\), got float"):
        evaluate(model, [batch], metric=lambda out, target: {"all": 0.5})
    with pytest.raises(ConfigError, match="with a metric"):
        fit(model, [batch], Recipe(epochs=1), val=[batch], loss=segmentation_loss)
    with pytest.raises(DataError, match="labels must be an integer tensor"):
        evaluate(model, [batch])


@pytest.mark.parametrize(("name", "epochs", "wanted"), [("segmentation", 5, 0.4), ("detection", 12, 0.3)])
def test_an_example_learns_its_task_and_executes_what_cost_counts(
    name: str, epochs: int, wanted: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shorter than ``python examples/segmentation.py``."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    own_task = importlib.import_module("own_task")
    task = importlib.import_module(name).task(width=8, side=32)
    outcome, engines = own_task.made_faster(task, batches=8, epochs=epochs, macs=0.5)
    assert outcome.executed == outcome.cost > 0
    assert outcome.share == pytest.approx(0.5, abs=0.01)
    assert outcome.untrained < 0.1 < wanted < outcome.gated
    x_BCHW, target = task.batch(8, 77)
    with torch.no_grad():
        wanted_output = task.model.eval()(x_BCHW)
    torch.testing.assert_close(engines["dense"](x_BCHW), wanted_output, atol=1e-3, rtol=1e-3)
    assert 0 <= task.metric(engines["gated"](x_BCHW), target).popitem()[1].mean() <= 1

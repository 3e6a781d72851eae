"""Laws of the options of training: each alone, and what they promise together with resuming."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import OwnNet, digest, tiny_gated, tiny_images, tiny_plain
from torch import Tensor, nn

from cofire import FTWT, ConfigError, DataError, Recipe, data, evaluate, fit
from cofire.experiments.recipes import parse_experiment
from cofire.experiments.runs import train_experiment
from cofire.gates.losses import distillation
from cofire.training.averaging import Average

OPTIONS: dict[str, dict[str, Any]] = {
    "one-cycle": {"schedule": "one-cycle"},
    "accumulate": {"accumulate": 2},
    "average": {"average": 0.9},
    "distill": {"distill": 0.9},
    "warm_heads": {"warm_heads": 1},
    "all": {"schedule": "one-cycle", "accumulate": 2, "average": 0.9, "distill": 0.5, "warm_heads": 1},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def teacher_for(recipe: Recipe) -> nn.Module | None:
    return tiny_plain(seed=5) if recipe.distill else None


def run(recipe: Recipe, out: Path | None = None, model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = tiny_gated() if model is None else model
    loader = tiny_images(64).loader(8, train=True)
    fit(model, loader, recipe, teacher=teacher_for(recipe), out=out, **options)
    return model


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_has_an_effect_and_resumes_exactly(option: str, tmp_path: Path) -> None:
    recipe = Recipe(epochs=3, lr=0.05, checkpoint_steps=1, **OPTIONS[option])
    whole = digest(run(recipe))
    assert whole != digest(run(Recipe(epochs=3, lr=0.05)))
    assert digest(run(recipe, tmp_path / "a")) == whole
    checkpoints = sorted((tmp_path / "a" / "checkpoints").glob("step-*"))
    checkpoints[-1].unlink()  # as if the run had been killed one step earlier
    assert digest(run(recipe, tmp_path / "a", tiny_gated(seed=9))) == whole


# Schedules


def test_one_cycle_rises_to_the_rate_and_falls_to_nothing() -> None:
    recipe = Recipe(epochs=10, schedule="one-cycle")
    factors = [recipe.factor(step, 10) for step in range(101)]
    assert factors[0] == pytest.approx(1 / 25)
    assert factors[15] == pytest.approx((1 / 25 + 1) / 2)
    assert factors[30] == max(factors) == 1
    assert factors[65] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0)
    assert factors[:31] == sorted(factors[:31])
    assert factors[30:] == sorted(factors[30:], reverse=True)


# Accumulation


def test_accumulated_batches_give_the_gradient_of_the_large_batch() -> None:
    """On a network without norms the mean of two batches' gradients is the gradient of both at once."""
    images = data.synthetic(24, (3, 8, 8), classes=3)
    large = [batch for batch in images.loader(12)]
    small = [batch for batch in images.loader(6)]
    torch.manual_seed(0)
    one = OwnNet()
    other = copy.deepcopy(one)
    recipe = Recipe(epochs=1, lr=0.1)
    fit(one, large, recipe)
    fit(other, small, dataclasses.replace(recipe, accumulate=2))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_left_over_batches_of_an_epoch_are_not_used() -> None:
    batches = [batch for batch in data.synthetic(20, (3, 8, 8), classes=3).loader(4)]
    torch.manual_seed(0)
    one = OwnNet()
    other = copy.deepcopy(one)
    fit(one, batches, Recipe(epochs=1, accumulate=2))
    fit(other, batches[:4], Recipe(epochs=1, accumulate=2))
    assert digest(one) == digest(other)
    with pytest.raises(ConfigError, match="accumulate must be at most 5, the batches of an epoch, got 6"):
        fit(one, batches, Recipe(epochs=1, accumulate=6))


# Averages


def test_an_average_is_the_weighted_sum_of_the_weights_by_hand() -> None:
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 4.0)
    average = Average(net, decay=0.5)
    nn.init.constant_(net.weight, 8.0)
    average.update(net, step=100)
    assert float(average.tensors["weight"]) == 6.0
    average.update(net, step=0)  # at the beginning nine tenths of the average are forgotten
    assert float(average.tensors["weight"]) == pytest.approx(0.1 * 6 + 0.9 * 8)
    with average.applied(net):
        assert net.weight.item() == pytest.approx(7.8)
    assert net.weight.item() == 8.0


def test_the_average_is_what_is_validated_and_kept(tmp_path: Path) -> None:
    val = tiny_images(20).loader(20)
    for select in ("best", "last"):
        recipe = Recipe(epochs=2, lr=0.05, average=0.8, select=select)
        for out in (None, tmp_path / select):
            model = tiny_gated()
            result = fit(model, tiny_images(64).loader(8, train=True), recipe, val=val, out=out)
            assert evaluate(model, val).top1 == result.epochs[result.selected].val_top1


# Distillation


def test_the_distance_to_a_teacher_by_hand() -> None:
    student, taught = torch.tensor([[0.0, 0.0]]), torch.tensor([[2 * math.log(3.0), 0.0]])
    p = torch.tensor([0.75, 0.25])  # softmax of the teacher's logits at temperature 2
    by_hand = 4 * float((p * (p / 0.5).log()).sum())
    assert float(distillation(student, taught, 2.0)) == pytest.approx(by_hand)
    assert float(distillation(taught, taught, 2.0)) == pytest.approx(0, abs=1e-7)


def test_a_student_of_unlabelled_images_comes_near_its_teacher() -> None:
    teacher = tiny_plain(seed=5)
    fit(teacher, tiny_images(64).loader(16, train=True), Recipe(epochs=4, lr=0.05))
    before = digest(teacher)
    x = tiny_images(64, labelled=False)
    recipe = Recipe(epochs=8, lr=0.05, distill=1.0, schedule="cosine")
    student = tiny_plain(seed=6)

    def distance() -> float:
        with torch.no_grad():
            batch: Tensor = next(iter(x.loader(64)))[0]
            return float(distillation(student.eval()(batch), teacher(batch), 4.0))

    far = distance()
    fit(student, x.loader(16, train=True), recipe, teacher=teacher)
    assert distance() < 0.5 * far
    assert digest(teacher) == before


def test_a_teacher_and_its_share_go_together() -> None:
    loader = tiny_images(16).loader(8, train=True)
    with pytest.raises(ConfigError, match=r"a teacher goes with Recipe.distill above 0, got distill=0.5 and none"):
        fit(tiny_gated(), loader, Recipe(distill=0.5))
    with pytest.raises(ConfigError, match=r"got distill=0.0 and one"):
        fit(tiny_gated(), loader, Recipe(), teacher=tiny_plain())
    with pytest.raises(DataError, match=r"training needs labels.*Recipe\(distill=1\)"):
        fit(tiny_gated(), tiny_images(16, labelled=False).loader(8), Recipe(distill=0.5), teacher=tiny_plain())


def test_a_recipe_s_teacher_is_its_dense_model(tmp_path: Path) -> None:
    table: dict[str, Any] = {
        "data": {"name": "synthetic", "batch_size": 8, "args": {"train": 24, "test": 8, "shape": [1, 8, 8]}},
        "backbone": {"name": "resnet8_digits"},
        "train": {"epochs": 1},
    }
    dense = parse_experiment(table)
    train_experiment(dense, tmp_path / "dense")
    with pytest.raises(ConfigError, match=r"distill learns from the dense model: it needs \[backbone\] weights"):
        parse_experiment({**table, "train": {"epochs": 1, "distill": 0.9}})
    weights = {"name": "resnet8_digits", "weights": str(tmp_path / "dense")}
    for method in ({"gate": {"ratio": 0.8}}, {"prune": {"type": "L1", "macs": 0.6}}):
        taught = parse_experiment({**table, **method, "backbone": weights, "train": {"epochs": 1, "distill": 0.9}})
        assert train_experiment(taught, tmp_path / next(iter(method)))["test"]["n"] == 8


# Heads


def test_the_backbone_rests_while_the_heads_warm_up() -> None:
    gated = tiny_gated()
    backbone, heads = digest(gated.backbone), digest(gated.gates)
    fit(gated, tiny_images(64).loader(8, train=True), Recipe(epochs=3, warm_heads=2, stop_after=2))
    assert digest(gated.backbone) == backbone
    assert digest(gated.gates) != heads
    fit(gated, tiny_images(64).loader(8, train=True), Recipe(epochs=3, warm_heads=2))
    assert digest(gated.backbone) != backbone
    with pytest.raises(ConfigError, match="needs a gated model"):
        fit(tiny_plain(), tiny_images(16).loader(8), Recipe(warm_heads=1))


def test_gates_can_start_open() -> None:
    x = next(iter(tiny_images(20).loader(20)))[0]
    kept = {}
    for bias in (0.0, 2.0):
        gated = tiny_gated(open_bias=bias).eval()
        gated(x)
        kept[bias] = torch.cat([mask.flatten() for mask in gated.masks.values()]).float().mean()
    assert kept[2.0] == 1.0
    assert kept[0.0] < 0.9
    with pytest.raises(ConfigError, match="open_bias must be 0 where bias is off, got 2"):
        FTWT(bias=False, open_bias=2.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
        ({"average": 1.0}, r"average must be in \[0, 1\), got 1"),
        ({"distill": 1.5}, r"distill must be in \[0, 1\] and Recipe.temperature above 0, got 1.5 and 4"),
        ({"temperature": 0.0}, r"temperature above 0, got 0.0 and 0"),
        ({"warm_heads": -1}, "warm_heads must be epochs >= 0, got -1"),
        ({"train": "heads", "distill": 0.5}, "has no task loss: distill must be 0"),
        ({"schedule": "onecycle"}, "schedule must be one of 'steps', 'cosine', 'one-cycle'"),
    ],
)
def test_values_out_of_range_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Recipe(**options)


def test_an_uninterrupted_plain_run_is_cross_entropy_alone() -> None:
    """With every option at its default the loss is what it was."""
    torch.manual_seed(0)
    net = OwnNet()
    batches = [batch for batch in data.synthetic(6, (3, 8, 8), classes=3).loader(6)]
    with torch.no_grad():
        wanted = float(F.cross_entropy(net(batches[0][0]), batches[0][1]))
    assert fit(net, batches, Recipe(epochs=1)).epochs[0].loss == pytest.approx(wanted)

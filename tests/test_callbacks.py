"""Callbacks of fit: when they are called, what they add, and that a resume goes on exactly with their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small import digest, tiny_gated, tiny_images, tiny_plain
from torch import Tensor, nn

from cofire import FTWT, AbstractCallback, Recipe, evaluate, fit, gate, mask_loss

RECIPE = Recipe(epochs=2, lr=0.05, checkpoint_steps=1, select="last")


def loader() -> Any:
    return tiny_images(48).loader(12, train=True)


class Diary(AbstractCallback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, int]] = []

    def on_start(self, run: Any) -> None:
        self.lines.append(("start", run.epoch, run.step))

    def on_step(self, run: Any) -> None:
        self.lines.append(("step", run.epoch, run.step))

    def on_epoch(self, run: Any) -> None:
        self.lines.append(("epoch", run.epoch, run.step))


def test_callbacks_are_told_of_the_start_each_step_and_each_epoch() -> None:
    diary = Diary()
    fit(tiny_plain(), loader(), RECIPE, callbacks=[diary])
    first = [("step", 0, step) for step in range(1, 5)]
    second = [("step", 1, step) for step in range(5, 9)]
    assert diary.lines == [("start", 0, 0), *first, ("epoch", 0, 4), *second, ("epoch", 1, 8)]


class Learner(AbstractCallback):
    """A parameter of its own with an optimiser of its own, a loss that reaches the model, and a memory."""

    def __init__(self, stop: int | None = None) -> None:
        self.factor, self.stop, self.sum = nn.Parameter(torch.ones(10)), stop, torch.zeros(())

    def optimizers(self, run: Any) -> Sequence[torch.optim.Optimizer]:
        return [torch.optim.Adam([self.factor], lr=0.1)]

    def loss(self, run: Any, x_BCHW: Tensor, label_B: Tensor | None, logits_BK: Tensor) -> Tensor:
        return 0.1 * (logits_BK * self.factor).square().mean()

    def on_step(self, run: Any) -> None:
        self.sum = self.sum + self.factor.detach().sum()
        if run.step == self.stop:
            raise KeyboardInterrupt

    def state_dict(self) -> dict[str, Tensor]:
        return {"factor": self.factor.detach(), "sum": self.sum}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.sum = state["sum"]
        with torch.no_grad():
            self.factor.copy_(state["factor"])


def test_an_extra_loss_reaches_the_model() -> None:
    plain, pulled = tiny_plain(), tiny_plain()
    fit(plain, loader(), RECIPE)
    fit(pulled, loader(), RECIPE, callbacks=[Learner()])
    assert digest(plain) != digest(pulled)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resume_goes_on_exactly_with_the_callbacks_state(stop: int, gated: bool, tmp_path: Path) -> None:
    make = tiny_gated if gated else tiny_plain
    whole, stopped, again = make(), make(), make()
    learners = [Learner(), Learner(stop=stop), Learner()]
    fit(whole, loader(), RECIPE, out=tmp_path / "whole", callbacks=[learners[0]])
    with pytest.raises(KeyboardInterrupt):
        fit(stopped, loader(), RECIPE, out=tmp_path / "stopped", callbacks=[learners[1]])
    fit(again, loader(), RECIPE, out=tmp_path / "stopped", callbacks=[learners[2]])
    assert digest(again) == digest(whole)
    assert torch.equal(learners[2].factor, learners[0].factor)
    assert torch.equal(learners[2].sum, learners[0].sum)


def test_warm_heads_leave_no_momentum_in_the_backbone() -> None:
    """In joint mode the heads' loss reaches the backbone, which rests in the first epoch: so must its momentum."""
    gated = gate(tiny_plain(), FTWT(mode="joint"))
    seen: list[bool] = []

    class Look(AbstractCallback):
        def on_epoch(self, run: Any) -> None:
            state = run.optimizer.state_dict()["state"]
            heads = {id(p) for p in gated.gates.parameters()}
            order = [p for group in run.optimizer.param_groups for p in group["params"]]
            seen.append(any(n in state for n, p in enumerate(order) if id(p) not in heads))

    fit(gated, loader(), Recipe(epochs=2, lr=0.05, warm_heads=1), callbacks=[Look()])
    assert seen == [False, True]


# Models with gated parts


class TwoParts(nn.Module):
    """Two gated parts in a model that is not gated itself."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, second = (
            nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
            for channels in (1, 8)
        )
        config = FTWT(ratio=0.6)
        self.first = gate(first, config, input_shape=(1, 8, 8)) if gated else first
        self.second = gate(second, config, input_shape=(8, 8, 8)) if gated else second
        self.last = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > -1e9:  # a branch on values, which nothing can trace
            x = self.second(self.first(x))
        logits: Tensor = self.last(x.mean((2, 3)))
        return logits


def test_fit_trains_the_heads_of_gated_parts() -> None:
    model = TwoParts(gated=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    result = fit(model, loader(), RECIPE)
    assert result.epochs[0].mask_loss > 0
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_loss_of_two_parts_is_the_sum_of_theirs() -> None:
    model = TwoParts(gated=True).train()
    model(torch.rand(4, 1, 8, 8))
    both = mask_loss(model.first) + mask_loss(model.second)
    assert mask_loss(model).item() == pytest.approx(both.item())


def test_a_model_with_gated_parts_is_evaluated_by_its_parts() -> None:
    model = TwoParts(gated=True)
    report = evaluate(model, tiny_images(20).loader(10), text="")
    assert list(report.keep_rate) == ["first.0", "second.0"]
    assert report.dense_macs == 9 * 64 * (8 + 64 + 64 + 64)
    assert 0 < report.reduction["executed"] < 1

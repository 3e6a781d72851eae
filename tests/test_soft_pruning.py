"""Soft pruning: channels are zeroed after each epoch, go on learning, and leave in the end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small import digest, tiny_images, tiny_plain
from torch import nn

from cofire import ConfigError, Recipe, cost, fit, trace
from cofire.pruning import FPGM, SFP, PruneConfig, SoftPruning
from cofire.pruning.base import scores
from cofire.pruning.surgery import cut
from cofire.training.callbacks import AbstractCallback, Run

RECIPE = Recipe(epochs=2, lr=0.05)
CONFIGS = [SFP(macs=0.5), FPGM(macs=0.5)]


def zero_filters(model: nn.Module) -> dict[str, list[int]]:
    """Conv -> its filters whose weights are all zero, for convs that have some."""
    convs = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    found = {name: (conv.weight.flatten(1) == 0).all(1).nonzero().flatten().tolist() for name, conv in convs.items()}
    return {name: filters for name, filters in found.items() if filters}


class Watch(AbstractCallback):
    """Counts the zero filters after the first step of every epoch."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_step(self, run: Run) -> None:
        if run.step % run.steps_per_epoch == 1:
            self.seen.append(sum(map(len, zero_filters(run.model).values())))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_what_is_zero_in_the_end_leaves_and_nothing_else_changes(config: PruneConfig) -> None:
    model = tiny_plain()
    soft, watch = SoftPruning(model, config), Watch()
    fit(model, tiny_images(32).loader(8, train=True), Recipe(epochs=2, lr=0.05), callbacks=[soft, watch])
    off = zero_filters(model)
    assert off
    assert watch.seen[1] < sum(map(len, off.values()))  # they went on learning in the second epoch
    smaller = soft.cut(model)
    for name, filters in off.items():
        kept = [i for i in range(len(model.get_submodule(name).weight)) if i not in filters]
        assert smaller.get_submodule(name).weight.shape[0] == len(kept)
        inputs = smaller.get_submodule(name).weight.shape[1]
        if inputs == model.get_submodule(name).weight.shape[1]:
            assert torch.equal(smaller.get_submodule(name).weight, model.get_submodule(name).weight[kept])
    left = cost(trace(smaller), {}).dense_total / cost(trace(model), {}).dense_total
    assert 0.49 <= left <= 0.5


def test_sfp_zeroes_the_filters_with_the_smallest_norms() -> None:
    model = tiny_plain()
    soft = SoftPruning(model, SFP(macs=0.6))
    fit(model, tiny_images(16).loader(8, train=True), Recipe(epochs=1, lr=0.0), callbacks=[soft])
    fresh = tiny_plain()
    for name, filters in zero_filters(model).items():
        norms = fresh.get_submodule(name).weight.flatten(1).norm(dim=1)
        assert sorted(filters) == sorted(norms.argsort()[: len(filters)].tolist())


def test_what_is_zero_leaves_even_where_its_score_is_the_highest() -> None:
    model = tiny_plain()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.add_(1)  # so that zero is far from all filters that are not
    soft = SoftPruning(model, FPGM(macs=0.8))
    fit(model, tiny_images(16).loader(8, train=True), Recipe(epochs=1, lr=0.0), callbacks=[soft])
    found = scores(model, soft.channels, None, soft.config)["layer3.0.conv1"]
    off_O = ~soft.masks["layer3.0.conv1"]
    assert float(found[off_O].min()) > float(found[~off_O].max())
    expected = cut(model, soft.channels, soft.masks)
    assert digest(soft.cut(model)) == digest(expected)


def test_norms_are_measured_anew_where_the_config_says_so() -> None:
    model, loader = tiny_plain(), tiny_images(32).loader(32)
    soft = SoftPruning(model, FPGM(macs=0.5, recovery="norms"))
    fit(model, tiny_images(32).loader(8, train=True), Recipe(epochs=1, lr=0.05), callbacks=[soft])
    small, x = soft.cut(model, loader), next(iter(loader))[0]
    with torch.no_grad():
        torch.testing.assert_close(small.bn1.running_mean, small.conv1(x).mean((0, 2, 3)))


def test_a_run_that_is_resumed_ends_with_the_same_filters(tmp_path: Path) -> None:
    def run(out: Path) -> tuple[str, str]:
        model = tiny_plain()
        soft = SoftPruning(model, SFP(macs=0.5))
        fit(model, tiny_images(32).loader(8, train=True), RECIPE, out=out, callbacks=[soft])
        return digest(model), digest(soft.cut(model))

    whole = run(tmp_path / "whole")
    half = tiny_plain()
    soft = SoftPruning(half, SFP(macs=0.5))

    class Killed(Exception):
        pass

    class Kill(AbstractCallback):
        def on_step(self, run: Run) -> None:
            if run.step == 6:
                raise Killed

    with pytest.raises(Killed):
        fit(half, tiny_images(32).loader(8, train=True), RECIPE, out=tmp_path / "killed", callbacks=[soft, Kill()])
    assert run(tmp_path / "killed") == whole


def test_cutting_needs_an_epoch() -> None:
    model = tiny_plain()
    with pytest.raises(ConfigError, match="has seen no epoch yet"):
        SoftPruning(model, SFP(macs=0.5)).cut(model)

"""Heads fitted without training: budgets met, norms refitted, better per image than the fixed twin."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, bn, conv, fc, images
from small import digest
from torch import nn

import cofire
from cofire import ConfigError, Fixed, Recipe, create_backbone, data, evaluate, fit, fit_heads, gate, static_twin, trace
from cofire.gates import ftwt_offline
from cofire.gates.heads import Head
from cofire.gates.lockstep import refit
from cofire.graph.placement import place
from cofire.graph.units import Placement


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    model = create_backbone("resnet8_digits")
    fit(model, data.digits()[0].loader(64, train=True), Recipe(epochs=3, lr=0.1, schedule="cosine"))
    return model


def digits() -> Any:
    return data.digits()[0].loader(200)


@pytest.mark.parametrize("macs", [0.8, 0.5])
def test_the_budget_is_met_and_every_image_keeps_as_many(trained: nn.Module, macs: float) -> None:
    before = digest(trained)
    gated = fit_heads(trained, digits(), macs=macs)
    report = evaluate(gated, data.digits()[1].loader(200), text="")
    assert 1 - report.reduction["executed+heads"] == pytest.approx(macs, abs=0.02)
    assert report.spread["executed"] < 0.02  # what is left of it are channels that additions refill
    for name, mask in gated.masks.items():
        assert set(mask.sum(1).tolist()) == {gated.config.signature[name]}
    assert digest(trained) == before


def test_choosing_per_image_beats_the_fixed_twin_at_the_same_macs(trained: nn.Module) -> None:
    test = data.digits()[1].loader(200)
    gated = fit_heads(trained, digits(), macs=0.4)
    twin = static_twin(trained, gated, digits())
    ours, theirs = evaluate(gated, test, text=""), evaluate(twin, test, text="")
    assert theirs.reduction["executed"] == pytest.approx(ours.reduction["executed"], abs=0.01)
    assert ours.top1 > theirs.top1
    assert theirs.spread["executed"] == pytest.approx(0.0, abs=1e-6)
    kept = twin.config.kept
    assert {name: len(row) for name, row in kept.items()} == dict(gated.config.signature)


def test_it_is_saved_loaded_and_compiled_like_any_other(trained: nn.Module, tmp_path: Path) -> None:
    gated = fit_heads(trained, digits(), macs=0.5)
    x = data.digits()[1].loader(40).batches(0).__next__()[0]
    gated.save(tmp_path)
    loaded = cofire.load(tmp_path)
    with torch.no_grad():
        logits = gated(x)
        assert torch.equal(loaded(x), logits)
    engine = cofire.compile(gated)
    found = engine(x)
    same = [torch.equal(torch.from_numpy(engine.last_masks[name]), mask) for name, mask in gated.masks.items()]
    assert all(same)
    assert float((found - logits).abs().max()) <= 1e-4 * float(logits.abs().max())


def test_the_standardisation_folds_into_the_linear_map() -> None:
    torch.manual_seed(0)
    head = Head(3, 5, pool="both", softmax=False, bias=True, standardise=True)
    head(torch.randn(20, 3, 4, 4) * 3 + 1)  # statistics
    x, (weight, bias) = torch.randn(7, 3, 4, 4), head.eval().folded()
    features = torch.cat([x.amax((2, 3)), x.mean((2, 3))], 1)
    torch.testing.assert_close(head(x), features @ weight.T + bias, rtol=1e-5, atol=1e-5)


def test_a_head_is_the_ridge_regression_of_its_target() -> None:
    generator = torch.Generator().manual_seed(0)
    features, target = torch.randn(200, 6, generator=generator), torch.randn(200, 4, generator=generator)
    head = Head(3, 4, pool="both", softmax=False, bias=True, standardise=True)
    ftwt_offline._fit(head, features, target)
    x = ((features - features.mean(0)) / features.std(0, unbiased=False)).double().numpy()
    wanted = target.double().numpy()
    rows = np.concatenate([x / np.sqrt(200), np.sqrt(1e-3) * np.eye(6)])
    shifted = np.concatenate([(wanted - wanted.mean(0)) / np.sqrt(200), np.zeros((6, 4))])
    solved = np.linalg.lstsq(rows, shifted, rcond=None)[0]
    np.testing.assert_allclose(head.linear.weight.detach().numpy(), solved.T, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(head.linear.bias.detach().numpy(), wanted.mean(0), rtol=1e-5, atol=1e-6)


def test_the_gain_of_choosing_per_image_by_hand() -> None:
    saliency = torch.tensor([[4.0, 1.0, 0.0], [0.0, 3.0, 2.0]])
    own = torch.tensor([[True, False, False], [False, True, False]])  # loses 1 and 2
    assert ftwt_offline._gain(saliency, own, 1) == pytest.approx(1 - 3 / 6)  # the fixed one is filter 0: 1 and 3 + 2
    fixed = torch.tensor([[True, False, False]] * 2)
    assert ftwt_offline._gain(saliency, fixed, 1) == pytest.approx(0.0)


def test_a_group_in_which_the_image_does_not_matter_gets_a_fixed_choice() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 1, 8, 8)
    gated = fit_heads(create_backbone("resnet8_digits").eval(), [x], macs=0.6)  # an untrained network: noise
    fixed = [name for name, gate_ in gated.gates.items() if not gate_.head.linear.weight.any()]
    with torch.no_grad():
        gated(x)
    assert all(len(torch.unique(gated.masks[name], dim=0)) == 1 for name in fixed)


def small_net() -> Net:
    forward = lambda m, x: m.logits(F.relu(m.bn2(m.two(F.relu(m.bn1(m.one(x)))))))  # noqa: E731
    return Net(forward, one=conv(3, 8), bn1=bn(8), two=conv(8, 6), bn2=bn(6), fc=fc(6)).eval()


def test_norms_get_the_statistics_under_the_masks_and_the_best_factor_and_shift() -> None:
    plain, changed = small_net(), small_net()
    changed.load_state_dict(plain.state_dict())
    graph = place(trace(changed, SHAPE), Placement(always=True), lambda unit: unit.name == "one")
    batches = [images(5), images(3, seed=9)]
    row = torch.tensor([[1.0, 0, 1, 0, 1, 1, 0, 1]])
    refit(graph, plain, batches, lambda site, inputs: row)
    x = torch.cat(batches)
    with torch.no_grad():
        hidden = F.relu(changed.bn1(changed.one(x))) * row[:, :, None, None]
        z = changed.two(hidden).double()
        wanted = plain.bn2(plain.two(F.relu(plain.bn1(plain.one(x))))).double()
    torch.testing.assert_close(changed.bn2.running_mean.double(), z.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(changed.bn2.running_var.double(), z.var((0, 2, 3), unbiased=False), rtol=1e-4, atol=1e-6)
    for channel in range(6):
        line = np.polyfit(z[:, channel].flatten().numpy(), wanted[:, channel].flatten().numpy(), 1)
        with torch.no_grad():
            found = changed.bn2(changed.two(hidden))[:, channel].flatten().double().numpy()
        np.testing.assert_allclose(found, np.polyval(line, z[:, channel].flatten().numpy()), rtol=1e-3, atol=2e-3)


def test_under_open_masks_a_network_stays_as_it_is() -> None:
    plain, changed = small_net(), small_net()
    changed.load_state_dict(plain.state_dict())
    graph = place(trace(changed, SHAPE), Placement(always=True))
    refit(graph, plain, [images(8)], lambda site, inputs: torch.ones(1, site.filters))
    with torch.no_grad():
        torch.testing.assert_close(changed(images(8)), plain(images(8)), rtol=1e-3, atol=1e-4)


def test_a_budget_out_of_reach_is_refused(trained: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"macs=0\.01 cannot be met: with one filter in 8, 0\."):
        fit_heads(trained, digits(), macs=0.01)
    with pytest.raises(ConfigError, match=r"must be in \(0, 1\), got 1"):
        fit_heads(trained, digits(), macs=1.0)


def test_fixed_filters_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"Fixed.kept\['conv1'\] must be in 0..15, got \(3, 16\)"):
        gate(create_backbone("resnet8_digits"), Fixed(kept={"conv1": (3, 16)}))


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"FTWT\.softmax must be off where standardise is on"):
        cofire.FTWT(standardise=True)


def test_the_largest_logits_need_a_number_that_a_recipe_may_give_later() -> None:
    config, model = cofire.FTWT(select="top"), create_backbone("resnet8_digits")
    with pytest.raises(ConfigError, match=r'FTWT\.select = "top" needs a signature'):
        gate(model, config)
    signature = cofire.signatures.uniform(model, config, 0.5)
    gated = gate(model, dataclasses.replace(config, signature=signature))
    gated(torch.rand(3, 1, 8, 8))
    assert {name: set(mask.sum(1).tolist()) for name, mask in gated.masks.items()} == {
        name: {float(k)} for name, k in signature.items()
    }

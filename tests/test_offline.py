"""Heads fitted without training: budgets met, norms refitted, better per image than the fixed twin."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, NormAct, bn, conv, fc, images
from small import digest
from torch import nn

import cofire
from cofire import ConfigError, Fixed, Recipe, create_backbone, data, evaluate, fit, fit_heads, gate, static_twin, trace
from cofire.gates import ftwt_offline, lockstep
from cofire.gates.heads import PoolingHead
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
    assert 1 - report.reduction["executed+heads"] == pytest.approx(macs, abs=0.005)
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
    head = PoolingHead(3, 5, pool="both", softmax=False, bias=True, standardise=True)
    head(torch.randn(20, 3, 4, 4) * 3 + 1)  # statistics
    x, (weight, bias) = torch.randn(7, 3, 4, 4), head.eval().folded()
    features = torch.cat([x.amax((2, 3)), x.mean((2, 3))], 1)
    torch.testing.assert_close(head(x), features @ weight.T + bias, rtol=1e-5, atol=1e-5)


def ridge(x: np.ndarray, wanted: np.ndarray, strength: float) -> np.ndarray:
    """Weights (F, O) of a regression through the origin, as least squares with more rows."""
    n, features = x.shape
    rows = np.concatenate([x, np.sqrt(n * strength) * np.eye(features)])
    return np.linalg.lstsq(rows, np.concatenate([wanted, np.zeros((features, wanted.shape[1]))]), rcond=None)[0]


def test_a_head_is_the_ridge_regression_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    features, target = torch.randn(200, 6, generator=generator), torch.randn(200, 4, generator=generator)
    head = PoolingHead(3, 4, pool="both", softmax=False, bias=True, standardise=True)
    monkeypatch.setattr(ftwt_offline, "_RIDGES", (1e-3,))
    without_itself = ftwt_offline._fit(head, features, target).numpy()
    x = ((features - features.mean(0)) / features.std(0, unbiased=False)).double().numpy()
    wanted = target.double().numpy()
    solved = ridge(x, wanted - wanted.mean(0), 1e-3)
    np.testing.assert_allclose(head.linear.weight.detach().numpy(), solved.T, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(head.linear.bias.detach().numpy(), wanted.mean(0), rtol=1e-5, atol=1e-6)
    for one in (0, 17):  # the same with one image really left out, penalty and features as they were
        rest = np.arange(200) != one
        rows = np.column_stack([np.ones(199), x[rest]])
        penalty = 200 * 1e-3 * np.diag([0.0] + [1.0] * 6)
        weights = np.linalg.solve(rows.T @ rows + penalty, rows.T @ wanted[rest])
        np.testing.assert_allclose(without_itself[one], weights[0] + x[one] @ weights[1:], rtol=1e-3, atol=1e-3)


def test_few_images_and_many_features_ask_for_a_strong_ridge() -> None:
    generator = torch.Generator().manual_seed(0)
    features, noise = torch.randn(40, 60, generator=generator), torch.randn(40, 3, generator=generator)
    head = PoolingHead(30, 3, pool="both", softmax=False, bias=True, standardise=True)
    ftwt_offline._fit(head, features, noise)
    with torch.no_grad():
        learnt = head.eval().linear(head.norm(features))
    assert float((learnt - noise).square().mean()) > 0.3  # noise is not learnt


def saliencies(varied: bool) -> ftwt_offline._Seen:
    """64 images, 8 filters of which two strong ones; which ones the features tell, if they vary."""
    generator = torch.Generator().manual_seed(0)
    kind = torch.arange(64) % 4 if varied else torch.zeros(64, dtype=torch.long)
    saliency = 0.1 + torch.zeros(64, 8).scatter_(1, torch.stack([kind, kind + 4], 1), 1.0)
    features = F.one_hot(kind, 4).float() + 0.01 * torch.randn(64, 4, generator=generator)
    return ftwt_offline._Seen(saliency, features)


@pytest.mark.parametrize(("varied", "pays"), [(True, True), (False, False)])
def test_a_head_pays_where_the_image_matters(varied: bool, pays: bool) -> None:
    graph = place(trace(small_net(), SHAPE), Placement(always=True), lambda unit: unit.name == "one")
    group = ftwt_offline._Group(graph, graph.sites[0], saliencies(varied))
    assert group.pays(2) is pays


def test_a_head_that_costs_more_filters_than_it_saves_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = place(trace(small_net(), SHAPE), Placement(always=True), lambda unit: unit.name == "one")
    monkeypatch.setattr(ftwt_offline, "_macs_per_filter", lambda graph, site: 4.0)  # the head's are those of 8 filters
    assert not ftwt_offline._Group(graph, graph.sites[0], saliencies(varied=True)).pays(2)


def test_a_group_in_which_the_image_does_not_matter_has_no_head() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 1, 8, 8)
    gated = fit_heads(create_backbone("resnet8_digits").eval(), [x], macs=0.6)  # an untrained network: noise
    fixed = gated.config.fixed
    assert fixed
    with torch.no_grad():
        logits = gated(x)
    for name, filters in fixed.items():
        mask_BO = gated.masks[name]
        assert mask_BO.unique(dim=0).int().tolist() == [[int(o in filters) for o in range(mask_BO.shape[1])]]
        assert gated.gates.head_macs(gated.gates.sites[name]) == 0
    assert not any(key.startswith(f"gates.{name.replace('.', '_')}.") for name in fixed for key in gated.state_dict())
    engine = cofire.compile(gated)
    torch.testing.assert_close(engine(x), logits, rtol=1e-3, atol=1e-4)
    ours, theirs = gated.cost().total("executed"), sum(engine.last_macs.values())
    assert ours.tolist() == theirs.tolist()


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


def test_a_norm_that_activates_is_fitted_before_its_activation() -> None:
    """timm's norms hold their ReLU: fitted as the plain norm in front of the same ReLU would be."""
    plain, holding = small_net(), small_net()
    holding.call = lambda m, x: m.logits(m.bn2(m.two(m.bn1(m.one(x)))))
    holding.bn1, holding.bn2 = NormAct(8), NormAct(6)
    holding.load_state_dict(plain.state_dict())
    row = torch.tensor([[1.0, 0, 1, 0, 1, 1, 0, 1]])
    found = []
    for net in (plain, holding.eval()):
        with torch.no_grad():
            assert torch.equal(net(images(8)), plain(images(8)))
        graph = place(trace(copy.deepcopy(net), SHAPE), Placement(always=True), lambda unit: unit.name == "one")
        refit(graph, net, [images(8)], lambda site, inputs: row)
        found.append(graph.root.state_dict())
    assert not torch.equal(found[0]["bn2.weight"], plain.bn2.weight)
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected)


def test_a_budget_out_of_reach_is_refused(trained: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"macs=0\.01 cannot be met: with one filter in 8, 0\."):
        fit_heads(trained, digits(), macs=0.01)
    with pytest.raises(ConfigError, match=r"must be in \(0, 1\), got 1"):
        fit_heads(trained, digits(), macs=1.0)


def test_fixed_filters_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"Fixed.kept\['conv1'\] must be in 0..15, got \(3, 16\)"):
        gate(create_backbone("resnet8_digits"), Fixed(kept={"conv1": (3, 16)}))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"standardise": True}, "FTWT.softmax must be off where standardise is on"),
        ({"select": "top"}, 'FTWT.select = "top" needs a signature'),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        gate(create_backbone("resnet8_digits"), cofire.FTWT(**options))(torch.zeros(2, 1, 8, 8))


@pytest.mark.parametrize("far", [1, 2, 1000])
def test_what_is_not_held_is_taken_anew_or_from_a_file(far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual network whose sum is written in place, the images one by one: the same norms as all at once."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = m.bn2(m.two(F.relu(m.bn1(m.one(x)))))
        y += m.bn3(m.three(x))
        return m.logits(F.relu(y))

    torch.manual_seed(0)
    plain = Net(
        forward, one=conv(3, 8), bn1=bn(8), two=conv(8, 6), bn2=bn(6), three=conv(3, 6), bn3=bn(6), fc=fc(6)
    ).eval()
    batches, seen = [images(5), images(3, seed=9)], {}
    for held in (lockstep._HELD, 0):
        monkeypatch.setattr(lockstep, "_HELD", held)
        monkeypatch.setattr(lockstep, "_FAR", far)
        monkeypatch.setattr(lockstep, "_PIXELS", 3 * 8 * 8 if held == 0 else 1 << 20)
        changed = copy.deepcopy(plain)
        graph = place(trace(changed, SHAPE), Placement(always=True))
        pooled: dict[str, torch.Tensor] = {}

        def choose(site: Any, inputs: Any, pooled: dict[str, torch.Tensor] = pooled) -> torch.Tensor:
            pooled[site.name] = torch.cat([x.amax((2, 3)) for x in inputs])
            return (pooled[site.name][:, :1] + torch.arange(site.filters)) % 2 > 0.5

        refit(graph, plain, batches, choose)
        seen[held] = pooled, changed.state_dict()
    (one, state), (other, restate) = seen.values()
    for name, features in one.items():
        torch.testing.assert_close(other[name], features, rtol=1e-4, atol=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(restate[name], value, rtol=1e-3, atol=1e-4)

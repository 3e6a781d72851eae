"""FBS: exactly ceil(d C) filters, and an output that is the definition with the norm's factor replaced."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, bn, conv, fc, images, option_a_net
from small import tiny_images, tiny_plain
from torch import nn

import cofire
from cofire import FBS, ConfigError, Recipe, evaluate, fit, gate, signatures
from cofire.experiments.budgets import meet_budget
from cofire.experiments.recipes import read_experiment
from cofire.experiments.runs import build_gated, read_sets
from cofire.gates.gating import GatedModel
from cofire.gates.targets import largest

RECIPE = """
[data]
name = "synthetic"
args = {train = 40, test = 10}

[backbone]
name = "resnet20"

[gate]
type = "FBS"

[signature]
kind = "uniform"
macs = 0.5

[train]
epochs = 1
"""


def net() -> Net:
    return Net(lambda m, x: m.logits(F.relu(m.bn(m.one(x)))), one=conv(3, 10), bn=bn(10), fc=fc(10)).eval()


@pytest.mark.parametrize(("density", "kept"), [(0.05, 1), (0.3, 3), (0.31, 4), (0.7, 7), (1.0, 10)])
def test_exactly_the_share_of_filters_runs_for_every_image(density: float, kept: int) -> None:
    gated = gate(net(), FBS(density=density, always=True), input_shape=SHAPE)
    gated(images(7))
    assert gated.masks["one"].sum(1).tolist() == [kept] * 7


def test_a_signature_says_how_many_run_in_its_groups() -> None:
    plain = tiny_plain()
    wanted = signatures.uniform(plain, FBS(), 0.5) | {"layer1.0.conv1": 3}
    gated = gate(plain, FBS(signature=wanted, lowering=2)).eval()
    gated(next(iter(tiny_images(5).loader(5)))[0])
    assert {name: set(mask_BO.sum(1).tolist()) for name, mask_BO in gated.masks.items()} == {
        name: {k} for name, k in wanted.items()
    }
    gated.train().gates.on_epoch(0, 5)
    assert gated.gates.kept(gated.gates.sites["layer1.0.conv1"]) == math.ceil((16 + 3) / 2)  # halfway down
    with pytest.raises(ConfigError, match=r"FBS.signature must name every group, got none for 'conv1'"):
        gate(plain, FBS(signature={}))


@pytest.mark.parametrize("macs", [0.3, 0.5, 0.62])
def test_one_share_of_all_groups_meets_a_budget_within_a_point(macs: float) -> None:
    model = cofire.create_backbone("resnet20").eval()
    signature = signatures.uniform(model, FBS(), macs=macs)
    gated = gate(model, FBS(signature=signature))
    generator = torch.Generator().manual_seed(7)
    drawn = {
        name: largest(torch.rand(200, gated.gates.sites[name].filters, generator=generator), k)
        for name, k in signature.items()
    }
    heads = {name: gated.gates.head_macs(site) for name, site in gated.gates.sites.items()}
    executed = 1 - cofire.cost(gated.graph, drawn, heads=heads).reduction("executed+heads")
    assert float(executed.mean()) == pytest.approx(macs, abs=0.01)
    kept = [k / gated.gates.sites[name].filters for name, k in signature.items()]
    assert max(kept) - min(kept) <= 1 / 16 + 1e-9  # one share, but for one filter of the narrowest group


def same_filters_everywhere(gated: GatedModel) -> None:
    """As training may do: the last filters of each group run, for every image."""
    for gate_O in gated.gates.values():
        nn.init.zeros_(gate_O.linear.weight)
        gate_O.linear.bias.data = torch.arange(float(len(gate_O.linear.bias)))


@pytest.mark.parametrize("macs", [0.35, 0.5])
def test_a_trained_signature_is_recounted_for_what_it_leaves(macs: float) -> None:
    model = cofire.create_backbone("resnet20").eval()
    signature = signatures.uniform(model, FBS(), macs=macs)
    gated = gate(model, FBS(signature=signature)).eval()
    same_filters_everywhere(gated)
    loader = cofire.data.synthetic(40, (3, 32, 32), classes=10).loader(20)

    def left(signature: signatures.Signature) -> float:
        again = gate(model, FBS(signature=signature)).eval()
        again.load_state_dict(gated.state_dict())
        return 1 - evaluate(again, loader, text="").reduction["executed+heads"]

    assert abs(left(signature) - macs) > 0.01
    counted = signatures.recounted(gated, loader, macs=macs)
    assert left(counted) == pytest.approx(macs, abs=0.01)
    shares = [counted[name] / k for name, k in signature.items()]
    assert max(shares) - min(shares) < 2 / min(signature.values())  # one factor, but for whole filters
    with pytest.raises(ConfigError, match="a signature for each group that decides, got FBS d"):
        signatures.recounted(gate(model, FBS()), loader, macs=macs)


def test_a_run_ends_at_its_budget(tmp_path: Path) -> None:
    path = tmp_path / "budget.toml"
    path.write_text(RECIPE)
    experiment = read_experiment(path)
    sets = read_sets(experiment)
    gated = build_gated(experiment, sets).eval()
    assert isinstance(gated, GatedModel)
    same_filters_everywhere(gated)
    found = meet_budget(gated, experiment, sets.train, sets.val)
    left = 1 - evaluate(found, sets.train.loader(20), text="").reduction["executed+heads"]
    assert found is not gated
    assert left == pytest.approx(0.5, abs=0.01)
    assert meet_budget(found, experiment, sets.train, sets.val) is found  # there is nothing to do any more


def test_the_output_is_the_definition_with_gamma_replaced() -> None:
    plain = net()
    gated = gate(plain, FBS(density=0.5, always=True), input_shape=SHAPE)
    head, x = gated.gates["one"].linear, images()
    nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found = gated(x)
        g_BO = torch.relu(x.abs().mean((2, 3)) @ head.weight.T + head.bias)
        kept_BO = torch.zeros_like(g_BO)
        for row, saliency in zip(kept_BO, (x.abs().mean((2, 3)) @ head.weight.T + head.bias).tolist(), strict=True):
            for place in sorted(range(10), key=lambda o: -saliency[o])[:5]:
                row[place] = 1.0
        conv_out = plain.one(x)
        mean, var = plain.bn.running_mean[:, None, None], plain.bn.running_var[:, None, None]
        normal = (conv_out - mean) / (var + plain.bn.eps).sqrt()
        shifted = g_BO[:, :, None, None] * normal + plain.bn.bias[:, None, None]
        by_hand = plain.logits(F.relu(shifted * kept_BO[:, :, None, None]))
    torch.testing.assert_close(found, by_hand, rtol=1e-5, atol=1e-6)


def test_the_heads_start_at_the_norms_factor_and_take_its_shift() -> None:
    plain = net()
    gated = gate(plain, FBS(always=True), input_shape=SHAPE)
    assert torch.equal(gated.gates["one"].linear.bias, plain.bn.weight)
    assert torch.equal(gated.gates["one"].beta, plain.bn.bias)
    assert gated.get_parameter("bn.weight").tolist() == [1.0] * 10
    assert not gated.get_parameter("bn.bias").any()
    assert not gated.get_parameter("bn.weight").requires_grad
    assert plain.bn.weight.requires_grad  # the model that was given is left alone


def test_the_share_falls_epoch_by_epoch_in_training_only() -> None:
    gated = gate(tiny_plain(), FBS(density=0.25, lowering=3))
    site = gated.gates.sites["layer1.0.conv1"]
    found = []
    for epoch in range(4):
        gated.train().gates.on_epoch(epoch, 5)
        found.append(gated.gates.kept(site))
    assert found == [math.ceil(0.75 * 16), 8, 4, 4]
    gated.gates.on_epoch(0, 5)
    assert gated.eval().gates.kept(site) == 4


def test_trained_it_meets_its_cost_for_every_image(tmp_path: Path) -> None:
    gated = gate(tiny_plain(), FBS(density=0.5, lowering=1))
    fit(gated, tiny_images(64).loader(16, train=True), Recipe(epochs=2, lr=0.05), out=tmp_path)
    report = evaluate(gated, tiny_images(40).loader(20), text="")
    assert set(report.keep_rate.values()) == {0.5}


def test_saliencies_are_pulled_down_by_the_loss() -> None:
    gated = gate(net(), FBS(sparsity=0.5, always=True), input_shape=SHAPE).train()
    gated(images())
    step = gated.step()
    by_hand = 0.5 * torch.relu(gated.decisions["one"].logits_BO).sum(1).mean()  # type: ignore[arg-type]
    torch.testing.assert_close(gated.gates.loss(step), by_hand)


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"FBS.density must be in \(0, 1\], got 0"):
        FBS(density=0.0)
    with pytest.raises(ConfigError, match=r"must be >= 0, got -1"):
        FBS(lowering=-1)


def test_a_norm_it_cannot_take_over_is_refused_by_name() -> None:
    model = Net(lambda m, x: m.logits(F.relu(m.norm(m.one(x)))), one=conv(3, 8), norm=nn.InstanceNorm2d(8), fc=fc(8))
    with pytest.raises(ConfigError, match="FBS needs a plain BatchNorm2d behind unit 'one', got InstanceNorm2d"):
        gate(model, FBS(always=True), input_shape=SHAPE)


def test_the_engine_chooses_and_scales_as_pytorch_does() -> None:
    gated = gate(option_a_net().eval(), FBS(density=0.5, always=True), input_shape=SHAPE).eval()
    for part in gated.gates.values():
        nn.init.normal_(part.linear.weight, std=1.0)
    x = images(16)
    with torch.no_grad():
        logits = gated(x)
    engine = cofire.compile(gated)
    torch.testing.assert_close(engine(x), logits, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(torch.from_numpy(engine.last_masks[name]), mask) for name, mask in gated.masks.items())
    executed = gated.cost().executed
    assert {name: macs.tolist() for name, macs in engine.last_macs.items()} == {
        n: m.tolist() for n, m in executed.items()
    }
    masks = {name: torch.unique(mask, dim=0) for name, mask in gated.masks.items()}
    assert any(len(rows) > 1 for rows in masks.values())  # they choose by image

"""CGNet: closed positions hold the sum over the first inputs, open ones the whole sum; each costs what it adds up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, bn, conv, fc, images
from small import tiny_images, tiny_plain
from torch import Tensor, nn

import cofire
from cofire import CGNet, ConfigError, GatedModel, PixelMask, Recipe, evaluate, fit, gate, mask_loss


def net(inputs: int = 8, **options: Any) -> Net:
    modules = {"one": conv(3, inputs), "two": conv(inputs, 6, **options), "bn": bn(6)}
    return Net(lambda m, x: m.logits(F.relu(m.bn(m.two(F.relu(m.one(x)))))), **modules, fc=fc(6)).eval()


def only_two(plain: Net, **options: Any) -> GatedModel:
    return gate(plain, CGNet(**options), input_shape=SHAPE, filter_fn=lambda unit: unit.name == "two")


def by_hand(plain: Net, x: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """What enters the second conv, and its sums over the first channels of each of its groups."""
    inside, two = F.relu(plain.one(x)), plain.two
    rows = []
    for part, weight, bias in zip(
        inside.chunk(two.groups, 1), two.weight.chunk(two.groups), two.bias.chunk(two.groups), strict=True
    ):
        rows.append(F.conv2d(part[:, :channels], weight[:, :channels], bias, two.stride, two.padding))
    return inside, torch.cat(rows, 1)


@pytest.mark.parametrize(("inputs", "parts", "channels"), [(8, 4, 2), (7, 4, 2), (8, 3, 3), (3, 4, 1)])
def test_closed_positions_are_partial_sums_and_open_ones_whole_sums(inputs: int, parts: int, channels: int) -> None:
    plain, x = net(inputs), images()
    gated = only_two(plain, parts=parts, target=0.3)
    with torch.no_grad():
        logits = gated(x)
        inside, partial = by_hand(plain, x, channels)
        open_ = partial / (1 + 1e-5) ** 0.5 > 0.3  # the norm is fresh: mean 0, variance 1
        output = torch.where(open_, plain.two(inside), partial)
        expected = plain.logits(F.relu(plain.bn(output)))
    mask = gated.decisions["two"].mask
    assert isinstance(mask, PixelMask)
    assert torch.equal(mask.bits, open_)
    assert 0.1 < float(mask.keep_rate.mean()) < 0.9
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    paid = [6 * 64 * 9 * channels + int(sample.sum()) * 9 * (inputs - channels) for sample in open_]
    assert gated.cost().executed["two"].tolist() == paid
    assert gated.cost().heads["two"].tolist() == [0] * 3


@pytest.mark.parametrize("options", [{"groups": 2}, {"stride": 2}])
def test_grouped_and_strided_convs(options: Any) -> None:
    plain, x = net(**options), images()
    gated = only_two(plain, parts=2)
    channels = 4 // options.get("groups", 1)
    with torch.no_grad(), gated.force({"two": torch.zeros(1, 1, *gated.graph["two"].shape[1:])}):
        found = gated(x)
        _, partial = by_hand(plain, x, channels)
        expected = plain.logits(F.relu(plain.bn(partial)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert gated.cost().executed["two"].tolist() == [gated.cost().dense["two"] // 2] * 3


def test_forced_open_by_a_mask_it_is_the_dense_network() -> None:
    plain, x = net(), images()
    gated = only_two(plain)
    with torch.no_grad(), gated.force({"two": torch.ones(1, 1, 8, 8)}):
        assert torch.equal(gated(x), plain(x))


def test_the_gradient_of_a_decision_is_a_sigmoids() -> None:
    gated = only_two(net(), slope=3.0).train()
    gated(images())
    mask = gated.decisions["two"].mask.on
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    above = gated.decisions["two"].logits_BO
    assert above is not None
    mask.sum().backward()
    p = torch.sigmoid(3.0 * above)
    torch.testing.assert_close(gated.gates["two"].threshold_O.grad, -(3.0 * p * (1 - p)).sum((0, 2, 3)))


def test_the_loss_pulls_thresholds_to_the_target() -> None:
    gated = only_two(net(), target=2.0, strength=0.5).train()
    nn.init.constant_(gated.gates["two"].threshold_O, 0.5)
    gated(images())
    assert float(mask_loss(gated).detach()) == pytest.approx(0.5 * 6 * 1.5**2)


def test_a_unit_with_too_few_inputs_is_left_open() -> None:
    plain = Net(
        lambda m, x: m.logits(F.relu(m.depth(F.relu(m.wide(x))))),
        wide=conv(3, 8),
        depth=conv(8, 8, groups=8),
        fc=fc(8),
    )
    gated = gate(plain, CGNet(), input_shape=SHAPE)
    assert list(gated.gates) == ["wide"]
    assert "as many MACs as it can save" in next(unit.reason for unit in gated.units if unit.name == "depth")


def test_a_conv_it_cannot_take_apart_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="got Conv2d with padding_mode='circular' as unit 'two'"):
        only_two(net(padding_mode="circular"))


def test_a_higher_threshold_costs_less_and_a_budget_is_met() -> None:
    gated = gate(tiny_plain(), CGNet(target=0.0))
    loader = tiny_images(64).loader(16, train=True)
    fit(gated, loader, Recipe(epochs=2, lr=0.05, head_lr=0.05))
    before = evaluate(gated, tiny_images(40).loader(20), text="").reduction["executed"]
    assert 0.1 < before < 0.7
    assert cofire.calibrate(gated, tiny_images(40).loader(20), macs=0.4) == pytest.approx(0.4, abs=0.01)
    after = evaluate(gated, tiny_images(40).loader(20), text="").reduction["executed"]
    assert after == pytest.approx(0.6, abs=0.01)


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"CGNet.parts must be at least 2, got 1"):
        CGNet(parts=1)
    with pytest.raises(ConfigError, match=r"CGNet.slope above 0, got 0.0001 and 0"):
        CGNet(slope=0.0)

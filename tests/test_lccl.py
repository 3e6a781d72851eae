"""LCCL: closed positions are exactly those where the cheap conv gives zero, and they are not paid for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, bn, conv, fc, images
from small import tiny_images, tiny_plain
from torch import nn

from cofire import LCCL, PixelMask, Recipe, evaluate, fit, gate


def net(**options: Any) -> Net:
    return Net(lambda m, x: m.logits(F.relu(m.bn(m.one(x)))), one=conv(3, 8, **options), bn=bn(8), fc=fc(8)).eval()


def spread_out(gated: Any) -> None:
    """Cheap convs that close about half of the positions."""
    for gate_ in gated.gates.values():
        nn.init.normal_(gate_.conv.weight, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(gate_.norm.bias)


@pytest.mark.parametrize("form", ["single", "pointwise"])
def test_closed_positions_are_the_zeros_of_the_cheap_conv(form: Any) -> None:
    plain, x = net(), images()
    gated = gate(plain, LCCL(form=form), input_shape=SHAPE)
    spread_out(gated)
    with torch.no_grad():
        found = gated(x)
        cheap = gated.gates["one"]
        factor = F.relu(cheap.norm(cheap.conv(x)))
        by_hand = plain.logits(F.relu(plain.bn(plain.one(x))) * factor)
    torch.testing.assert_close(found, by_hand, rtol=1e-5, atol=1e-6)
    mask = gated.decisions["one"].mask
    assert isinstance(mask, PixelMask)
    assert torch.equal(mask.bits, factor > 0)
    assert 0.1 < float(mask.keep_rate.mean()) < 0.9


@pytest.mark.parametrize("form", ["single", "pointwise"])
def test_open_positions_are_counted_one_by_one(form: Any) -> None:
    gated, x = gate(net(), LCCL(form=form), input_shape=SHAPE), images()
    spread_out(gated)
    with torch.no_grad():
        gated(x)
    on = gated.decisions["one"].mask.bits.expand(3, 8, 8, 8)
    assert gated.cost().executed["one"].tolist() == [int(part.sum()) * 3 * 9 for part in on]
    cheap = 3 * 9 * 64 if form == "single" else 3 * 8 * 64
    assert gated.cost().heads["one"].tolist() == [cheap] * 3


def test_a_unit_that_the_cheap_conv_cannot_beat_is_left_open() -> None:
    plain = Net(
        lambda m, x: m.logits(F.relu(m.depth(F.relu(m.wide(x))))),
        wide=conv(3, 8),
        depth=conv(8, 8, groups=8),
        fc=fc(8),
    )
    gated = gate(plain, LCCL(), input_shape=SHAPE)
    assert list(gated.gates) == ["wide"]
    assert "as many MACs as it can save" in next(unit.reason for unit in gated.units if unit.name == "depth")


def test_a_strided_unit_keeps_its_size() -> None:
    gated = gate(net(stride=2), LCCL(form="pointwise"), input_shape=SHAPE)
    with torch.no_grad():
        gated(images())
    assert gated.decisions["one"].mask.on.shape == (3, 8, 4, 4)


def test_it_begins_close_to_the_network_with_all_positions_open() -> None:
    gated = gate(tiny_plain(), LCCL()).train()
    gated(next(iter(tiny_images(16).loader(16)))[0])
    for decision in gated.decisions.values():
        assert decision.mask.bits.all()
        assert decision.scale_BO is not None
        assert float((decision.scale_BO.detach() - 1).square().mean().sqrt()) == pytest.approx(0.1, rel=0.05)


def test_it_learns_from_the_task_alone() -> None:
    gated = gate(tiny_plain(), LCCL())
    before = gated.gates["layer1.0.conv1"].conv.weight.detach().clone()
    result = fit(gated, tiny_images(64).loader(16, train=True), Recipe(epochs=2, lr=0.05, head_lr=0.05))
    assert result.epochs[-1].mask_loss == 0.0
    assert not torch.equal(gated.gates["layer1.0.conv1"].conv.weight, before)
    report = evaluate(gated, tiny_images(20).loader(10), text="")
    assert all(0 < rate <= 1 for rate in report.keep_rate.values())

"""LCS: at most N masks, an output that is the chosen row times the norm's, gates that can reach zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, bn, conv, fc, images, option_a_net
from small import tiny_images, tiny_plain
from torch import Tensor

import cofire
from cofire import LCS, ConfigError, GatedModel, Recipe, evaluate, fit, gate, mask_loss
from cofire.gates.lcs import by_image


def net() -> Net:
    return Net(lambda m, x: m.logits(F.relu(m.bn(m.one(x)))), one=conv(3, 10), bn=bn(10), fc=fc(10)).eval()


def chosen_at_random(plain: Net, actions: int = 4, **options: Any) -> GatedModel:
    """A table with about half of its gates at zero, and heads that choose all of its rows."""
    gated = gate(plain, LCS(actions=actions, always=True, **options), input_shape=SHAPE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part in gated.gates.values():
            part.gates_NO.uniform_(-1.0, 1.0, generator=generator).clamp_(min=0.0)
            part.linear.weight.normal_(generator=generator)
    return gated


def rows_by_hand(gated: GatedModel, x: Tensor) -> list[int]:
    """Which row of the table an image gets, by the cosine of its means and the head's rows."""
    weight = gated.gates["one"].linear.weight
    means = x.mean((2, 3))
    return [max(range(len(weight)), key=lambda n: float(mean @ weight[n] / weight[n].norm())) for mean in means]


def test_there_are_at_most_as_many_masks_as_actions() -> None:
    gated = chosen_at_random(net())
    with torch.no_grad():
        gated(images(200))
    found = {tuple(row) for row in gated.masks["one"].tolist()}
    table = {tuple(row) for row in (gated.gates["one"].gates_NO > 0).tolist()}
    assert found == table
    assert len(found) == 4


def test_the_output_is_the_chosen_row_times_the_norms() -> None:
    plain = net()
    gated, x = chosen_at_random(plain), images(16)
    with torch.no_grad():
        found = gated(x)
        rows = rows_by_hand(gated, x)
        gates_BO = torch.stack([gated.gates["one"].gates_NO[row] for row in rows])
        own = gated.backbone
        by_hand = plain.logits(F.relu(gates_BO[:, :, None, None] * own.bn(plain.one(x))))
    torch.testing.assert_close(found, by_hand, rtol=1e-5, atol=1e-6)
    assert len(set(rows)) > 1
    on_B = (gates_BO > 0).sum(1)
    assert gated.cost().executed["one"].tolist() == [int(on) * 3 * 9 * 64 for on in on_B]
    assert gated.cost().heads["one"].tolist() == [3 * 4] * 16


def test_in_training_noise_chooses_a_row() -> None:
    """The largest of logits plus Gumbel noise, drawn as the library draws it."""
    gated, x = chosen_at_random(net()).train(), images(32)
    torch.manual_seed(5)
    gated(x)
    gate_ = gated.gates["one"]
    logits_BN = x.mean((2, 3)) @ F.normalize(gate_.linear.weight, dim=1).T
    torch.manual_seed(5)
    noise_BN = -torch.empty(32, 4).exponential_().log()
    rows = (logits_BN + noise_BN).argmax(1)
    assert rows.tolist() != logits_BN.argmax(1).tolist()
    torch.testing.assert_close(gated.decisions["one"].scale_BO, gate_.gates_NO[rows])


def test_it_begins_with_the_network_as_it_is_and_the_norms_factors_as_gates() -> None:
    plain, x = net(), images()
    with torch.no_grad():
        plain.bn.weight.copy_(torch.tensor([-2.0, 7.0, 0.0, *[0.5] * 7]))
    gated = gate(plain, LCS(actions=3, always=True), input_shape=SHAPE).eval()
    assert gated.gates["one"].gates_NO.tolist() == [pytest.approx([2.0, 5.0, 0.01, *[0.5] * 7])] * 3
    assert gated.get_parameter("bn.weight").tolist() == pytest.approx([-1.0, 1.4, 0.0, *[1.0] * 7])
    with torch.no_grad():
        torch.testing.assert_close(gated(x), plain(x), rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_squared_distance_of_executed_macs_to_the_target() -> None:
    gated = chosen_at_random(option_a_net().eval(), target=0.25, strength=2.0).train()
    gated(images(16))
    share = 1 - float(gated.cost().reduction("executed+heads").mean())
    assert 0.3 < share < 1.0
    assert float(mask_loss(gated).detach()) == pytest.approx(2.0 * (share - 0.25) ** 2, rel=1e-5)


@pytest.mark.parametrize(("target", "sign"), [(0.0, 1), (1.0, -1)])
def test_small_gates_are_pulled_hardest_down_or_where_too_little_runs_up(target: float, sign: int) -> None:
    gated = gate(net(), LCS(actions=1, target=target, always=True), input_shape=SHAPE).train()
    gates_NO = gated.gates["one"].gates_NO
    with torch.no_grad():
        gates_NO[0] = torch.arange(10) / 10
    gated(images())
    mask_loss(gated).backward()
    assert gates_NO.grad is not None
    pull = sign * gates_NO.grad[0]
    assert (pull > 0).all()
    torch.testing.assert_close(pull / pull[0], torch.exp(-gates_NO.detach()[0] / 0.25))


def test_a_row_learns_from_the_mean_over_the_images_that_chose_it() -> None:
    """Three of four images choose the first row, one the other: both feel a gradient of one per image."""
    gates_NO = torch.ones(3, 2, requires_grad=True)
    chosen_BN = torch.tensor([[1.0, 0, 0], [1, 0, 0], [1, 0, 0], [0, 1, 0]])
    (chosen_BN @ by_image(gates_NO, chosen_BN.sum(0))).mean(0).sum().backward()
    assert gates_NO.grad is not None
    assert gates_NO.grad.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


def test_gates_stay_in_their_range() -> None:
    gated = gate(net(), LCS(actions=1, always=True), input_shape=SHAPE)
    gates_NO = gated.gates["one"].gates_NO
    with torch.no_grad():
        gates_NO.copy_(torch.tensor([[-3.0, 0.0, 2.0, 5.0, 7.0, 1.0, -1.0, 4.0, 6.0, 5.5]]))
    gated.gates.on_step()
    assert gates_NO[0].tolist() == [0.0, 0.0, 2.0, 5.0, 5.0, 1.0, 0.0, 4.0, 5.0, 5.0]


def test_trained_it_has_no_more_masks_than_actions() -> None:
    gated = gate(tiny_plain(), LCS(actions=4, target=0.2, strength=200.0))
    fit(gated, tiny_images(64).loader(16, train=True), Recipe(epochs=4, lr=0.1))
    report = evaluate(gated, tiny_images(40).loader(20), text="")
    assert report.reduction["executed"] > 0.2
    for name, part in gated.gates.items():
        assert len(part.gates_NO.gt(0).unique(dim=0)) <= 4, name


def test_the_engine_chooses_and_scales_as_pytorch_does() -> None:
    gated, x = chosen_at_random(option_a_net().eval()).eval(), images(32)
    with torch.no_grad():
        logits = gated(x)
    engine = cofire.compile(gated)
    torch.testing.assert_close(engine(x), logits, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(torch.from_numpy(engine.last_masks[name]), mask) for name, mask in gated.masks.items())
    assert len(gated.masks["a2"].unique(dim=0)) > 1
    assert (engine.last_masks["gates.a2"].sum(1) == 1).all()  # one action for each image
    executed = gated.cost().executed
    assert {name: engine.last_macs[name].tolist() for name in executed} == {n: m.tolist() for n, m in executed.items()}


def test_what_the_engine_is_told_is_the_same_choice() -> None:
    """`LinearHead.chosen` is the definition of what `lower` gives."""
    gated, x = chosen_at_random(net()), images(32)
    with torch.no_grad():
        gated(x)
        head = gated.gates.lower(gated.gates.sites["one"])
        assert torch.equal(head.chosen(x, 0.0), gated.masks["one"])


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"LCS.actions must be at least 1, got 0"):
        LCS(actions=0)
    with pytest.raises(ConfigError, match=r"LCS.target must be in \[0, 1\], got 2"):
        LCS(target=2.0)
    with pytest.raises(ConfigError, match=r"LCS.temperature above 0, got 20.0 and 0"):
        LCS(temperature=0.0)

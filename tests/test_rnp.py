"""RNP: prefixes that nest, one memory over all layers, Q-targets by hand, exploration that falls."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, conv, fc, images
from small import tiny_images, tiny_plain

from cofire import RNP, ConfigError, GatedModel, Recipe, evaluate, fit, gate, mask_loss


def net(filters: int = 10) -> Net:
    return Net(
        lambda m, x: m.logits(F.relu(m.two(F.relu(m.one(x))))), one=conv(3, filters), two=conv(filters, 6), fc=fc(6)
    )


def curious(plain: Net, **options: Any) -> GatedModel:
    """An agent whose decisions differ from image to image."""
    torch.manual_seed(0)
    gated = gate(plain.eval(), RNP(always=True, **options), input_shape=SHAPE)
    with torch.no_grad():
        for parameter in gated.gates.parameters():
            parameter.normal_()
    return gated


@pytest.mark.parametrize(("filters", "widths"), [(8, [2, 4, 6, 8]), (10, [3, 5, 8, 10]), (3, [1, 2, 3, 3])])
def test_the_parts_nest(filters: int, widths: list[int]) -> None:
    method = gate(net(filters), RNP(always=True), input_shape=SHAPE).gates
    found = method.prefixes(method.sites["one"])
    assert found.tolist() == [[o < width for o in range(filters)] for width in widths]
    assert all((smaller <= larger).all() for smaller, larger in pairwise(found))


def test_decisions_are_by_one_memory_over_the_layers() -> None:
    gated, x = curious(net()), 10 * images(12)
    with torch.no_grad():
        gated(x)
        agent, plain = gated.gates.agent, gated.backbone
        memory = torch.tanh(gated.gates["one"](x.mean((2, 3))))
        first = agent.worth(memory).argmax(1)
        y = F.relu(plain.one(x)) * (torch.arange(10) < torch.tensor([3, 5, 8, 10])[first][:, None])[:, :, None, None]
        memory = torch.tanh(gated.gates["two"](y.mean((2, 3))) + memory @ agent.again.weight.T)
        second = agent.worth(memory).argmax(1)
    assert gated.masks["one"].sum(1).tolist() == [[3, 5, 8, 10][a] for a in first]
    assert gated.masks["two"].sum(1).tolist() == [[2, 3, 5, 6][a] for a in second]
    assert len(set(first.tolist())) > 1
    assert gated.cost().heads["two"].tolist() == [32 * 10 + 32 * 32 + 32 * 4] * 12


def test_the_memory_of_one_batch_ends_with_it() -> None:
    gated, x = curious(net()), images(5)
    with torch.no_grad():
        first = gated(x)
        gated(images(7, seed=3))
        assert torch.equal(gated(x), first)


def test_the_targets_by_hand() -> None:
    """The price of the parts beyond the first, and the best of the next site, which is never above 0; at the end the
    task's loss."""
    method = gate(net(), RNP(price=0.9, blame=2.0, always=True), input_shape=SHAPE).gates
    worth = torch.tensor([[[9.0, 9.0, 9.0, 9.0], [-1.0, 0.5, 0.25, -3.0], [-0.5, -0.25, -2.0, -1.0]]])
    found = method.targets(worth, torch.tensor([[3, 0, 1]]), torch.tensor([0.7]))
    assert found[0].tolist() == pytest.approx([-0.3 + 0.0, -0.0 - 0.25, -0.1 - 2.0 * 0.7])


def test_the_loss_by_hand() -> None:
    gated = curious(net(), explore=0.5).train()
    x, labels = images(6), torch.tensor([0, 1, 2, 3, 4, 0])
    logits = gated(x)
    found = mask_loss(gated, labels)
    worth = [gated.step(labels).seen[name].detach() for name in ("one", "two")]
    actions = [
        [widths.index(int(width)) for width in gated.masks[name].sum(1)]
        for name, widths in (("one", [3, 5, 8, 10]), ("two", [2, 3, 5, 6]))
    ]
    by_hand = 0.0
    for n in range(6):
        task = -float(torch.log_softmax(logits[n].detach(), 0)[labels[n]])
        first = -actions[0][n] / 12 + min(0.0, float(worth[1][n].max()))
        second = -actions[1][n] / 12 - min(task, math.log(5))  # five classes: no worse than a guess
        for site, target in enumerate((first, second)):
            error = abs(float(worth[site][n, actions[site][n]]) - target)
            by_hand += (error**2 / 2 if error < 1 else error - 0.5) / 6
    assert float(found.detach()) == pytest.approx(by_hand / 2, rel=1e-4)  # mean over two sites


def test_the_agent_sends_no_gradient_into_the_backbone() -> None:
    gated = curious(net()).train()
    gated(images())
    mask_loss(gated, torch.tensor([0, 1, 2])).backward()
    assert {name for name, p in gated.named_parameters() if p.grad is not None} == {
        f"gates.{name}" for name, _ in gated.gates.named_parameters()
    }


def test_random_decisions_become_rarer_and_are_for_training_only() -> None:
    gated = gate(tiny_plain(), RNP(explore=0.2, exploring=2))
    found = []
    for epoch in range(4):
        gated.gates.on_epoch(epoch, 4)
        found.append(gated.gates.chance)
    assert found == pytest.approx([1.0, 0.6, 0.2, 0.2])

    gated.gates.on_epoch(0, 4)  # every decision at random
    x = tiny_images(200).loader(200).batches(0).__next__()[0]
    gated.train()(x)
    widths = gated.masks["layer1.0.conv1"].sum(1)
    assert [int((widths == width).sum()) for width in (4, 8, 12, 16)] == pytest.approx([50] * 4, abs=25)
    gated.eval()(x)
    best = gated.gates["conv1"](x.mean((2, 3))).tanh() @ gated.gates.agent.worth.weight.T + gated.gates.agent.worth.bias
    assert gated.masks["conv1"].sum(1).tolist() == [4 * (int(action) + 1) for action in best.argmax(1)]


def test_it_begins_with_the_network_as_it_is() -> None:
    gated, x = gate(tiny_plain(), RNP()).eval(), tiny_images(20).loader(20).batches(0).__next__()[0]
    gated(x)
    assert all(mask.all() for mask in gated.masks.values())


def test_a_high_price_makes_layers_narrow() -> None:
    kept = []
    for price in (0.0, 20.0):
        gated = gate(tiny_plain(), RNP(price=price, explore=1.0))
        fit(gated, tiny_images(64).loader(16, train=True), Recipe(epochs=8, train="heads", lr=0.1))
        report = evaluate(gated, tiny_images(40).loader(20), text="")
        kept.append(sum(report.keep_rate.values()) / len(report.keep_rate))
    assert kept[1] == pytest.approx(0.25)
    assert kept[0] > 0.25


def test_without_labels_it_says_what_it_needs() -> None:
    gated = gate(tiny_plain(), RNP()).train()
    gated(tiny_images(4).loader(4).batches(0).__next__()[0])
    with pytest.raises(ConfigError, match="RNP learns from labels"):
        mask_loss(gated)


def test_a_group_with_the_agents_name_is_refused() -> None:
    plain = Net(lambda m, x: m.logits(F.relu(m.agent(x))), agent=conv(3, 8), fc=fc(8))
    with pytest.raises(ConfigError, match="a group is named 'agent'"):
        gate(plain, RNP(always=True), input_shape=SHAPE)


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"RNP.parts and RNP.memory must be at least 1, got 0 and 32"):
        RNP(parts=0)
    with pytest.raises(ConfigError, match=r"RNP.explore must be in \[0, 1\], got 1.5"):
        RNP(explore=1.5)
    with pytest.raises(ConfigError, match=r"RNP.exploring must be >= 0, got -1"):
        RNP(price=-1.0)

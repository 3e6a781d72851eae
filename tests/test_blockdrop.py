"""BlockDrop: rewards by hand, branches that are off cost nothing, a curriculum that frees them from the back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, conv, fc, images, option_a_net
from small import tiny_gated, tiny_images, tiny_plain

import cofire
from cofire import (
    BlockDrop,
    BlockMask,
    CompileError,
    ConfigError,
    NoUnitError,
    Recipe,
    cost,
    evaluate,
    fit,
    gate,
    mask_loss,
    trace,
)


def test_the_reward_by_hand() -> None:
    method = gate(tiny_plain(), BlockDrop(penalty=7.0)).gates
    logits = torch.tensor([[2.0, 1.0], [2.0, 1.0], [0.0, 3.0]])
    on = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    found = method.reward(logits, torch.tensor([0, 1, 1]), on)
    assert found.tolist() == pytest.approx([1 - (2 / 3) ** 2, -7.0, 1 - (1 / 3) ** 2])


def test_residual_branches_are_found_with_all_their_convs() -> None:
    gated = gate(option_a_net(), BlockDrop(), input_shape=SHAPE)
    branches = {name: [unit.name for unit in site.units] for name, site in gated.gates.sites.items()}
    assert branches == {"a1": ["a1", "a2"], "b1": ["b1", "b2"], "c1": ["c1", "c2"]}
    open_units = {unit.name: unit.reason for unit in gated.units if not unit.gated}
    assert open_units == {"stem": "not in a residual branch", "down": "not in a residual branch"}


def test_a_branch_that_is_off_leaves_its_shortcut_and_costs_nothing() -> None:
    plain = option_a_net().eval()
    gated, x = gate(plain, BlockDrop(), input_shape=SHAPE), images()
    with torch.no_grad(), gated.force({"a1": torch.tensor([1.0, 0.0, 1.0]), "b1": torch.zeros(1), "c1": torch.ones(1)}):
        found = gated(x)
    executed, dense = gated.cost().executed, gated.cost().dense
    assert executed["a1"].tolist() == [dense["a1"], 0, dense["a1"]]
    assert executed["a2"].tolist() == [dense["a2"], 0, dense["a2"]]
    assert executed["b1"].tolist() == executed["b2"].tolist() == [0, 0, 0]
    # Behind the dropped branch the channels that its shortcut pads with zeros are dead: half of its twelve.
    assert executed["c1"].tolist() == [dense["c1"] // 2] * 3

    with torch.no_grad():
        y = F.relu(plain.bn0(plain.stem(x)))
        branch = plain.bn1(plain.a2(F.relu(plain.a1(y))))
        y = F.relu(branch * torch.tensor([1.0, 0.0, 1.0]).reshape(3, 1, 1, 1) + y)
        y = F.relu(F.pad(y[:, :, ::2, ::2], (0, 0, 0, 0, 3, 3)))
        y = F.relu(plain.bn3(plain.c2(F.relu(plain.c1(y)))) + plain.down(y))
        by_hand = plain.fc(F.max_pool2d(y, 2).flatten(1))
    torch.testing.assert_close(found, by_hand, rtol=1e-5, atol=1e-5)


def test_the_policy_is_paid_for_once() -> None:
    gated = gate(tiny_plain(), BlockDrop())
    policy = cost(trace(gated.gates.policy, (1, 8, 8)), {}).dense_total
    assert [gated.gates.head_macs(site) for site in gated.gates.sites.values()] == [policy, 0, 0]


def test_the_loss_by_hand() -> None:
    """Policy gradient against the most likely decisions; entropy on top."""
    gated = gate(tiny_plain(), BlockDrop(penalty=2.0, squash=0.8, entropy=0.1)).train()
    x, labels = tiny_images(6).loader(6).batches(0).__next__()
    torch.manual_seed(3)
    logits = gated(x)
    on = torch.stack([decision.mask.on for decision in gated.decisions.values()], 1)
    z = torch.cat([decision.logits_BO for decision in gated.decisions.values()], 1).detach()  # type: ignore[misc]
    found = mask_loss(gated, labels)
    likely = (z > 0).float()
    likely_logits = gated.rerun(x, {name: likely[:, s] for s, name in enumerate(gated.gates)})
    p = 0.8 / (1 + torch.exp(-z)) + 0.2 * (1 - 1 / (1 + torch.exp(-z)))
    by_hand = 0.0
    for n in range(6):
        earned = [
            1 - float(masks[n].mean()) ** 2 if int(out[n].argmax()) == int(labels[n]) else -2.0
            for out, masks in ((logits, on), (likely_logits, likely))
        ]
        log_p = sum(float(torch.log(p[n, s] if on[n, s] else 1 - p[n, s])) for s in range(3))
        entropy = -sum(float(q * torch.log(q)) for s in range(3) for q in (p[n, s], 1 - p[n, s]))
        by_hand -= ((earned[0] - earned[1]) * log_p + 0.1 * entropy) / 6
    assert float(found.detach()) == pytest.approx(by_hand, rel=1e-4)


def test_branches_are_freed_from_the_back() -> None:
    gated = gate(tiny_plain(), BlockDrop(curriculum=3)).train()
    torch.nn.init.constant_(gated.gates.policy.linear.bias, -20.0)  # it would drop them all
    torch.nn.init.zeros_(gated.gates.policy.linear.weight)
    found = []
    for epoch in range(4):
        gated.gates.on_epoch(epoch, 6)
        torch.manual_seed(0)
        gated(tiny_images(40).loader(40).batches(0).__next__()[0])
        found.append([bool(decision.mask.bits.all()) for decision in gated.decisions.values()])
    assert found == [[True, True, False], [True, False, False], [False] * 3, [False] * 3]


def test_without_labels_it_says_what_it_needs() -> None:
    gated = gate(tiny_plain(), BlockDrop()).train()
    gated(tiny_images(4).loader(4).batches(0).__next__()[0])
    with pytest.raises(ConfigError, match="BlockDrop learns from labels"):
        mask_loss(gated)


def test_a_network_without_branches_is_refused() -> None:
    plain = Net(lambda m, x: m.logits(F.relu(m.one(x))), one=conv(3, 8), fc=fc(8))
    with pytest.raises(NoUnitError, match="not in a residual branch: one"):
        gate(plain, BlockDrop(), input_shape=SHAPE)


def test_masks_of_another_kind_are_refused_by_name() -> None:
    gated = gate(tiny_plain(), BlockDrop())
    with pytest.raises(ConfigError, match=r"group 'layer1.0': mask must have shape \(B,\), got \(2, 16\)"):
        gated.cost({"layer1.0": torch.ones(2, 16)})
    with pytest.raises(ConfigError, match="site 'conv1' takes masks of filters, got one of block"):
        tiny_gated().cost({"conv1": BlockMask(torch.ones(2))})


def test_the_policy_learns_alone_while_the_backbone_rests() -> None:
    gated = gate(tiny_plain(), BlockDrop(curriculum=1))
    before = {name: p.detach().clone() for name, p in gated.named_parameters()}
    fit(gated, tiny_images(64).loader(16, train=True), Recipe(epochs=2, train="heads", head_lr=0.05))
    moved = {name for name, p in gated.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if name.startswith("gates.policy")}
    report = evaluate(gated, tiny_images(20).loader(10), text="")
    assert list(report.keep_rate) == ["layer1.0", "layer2.0", "layer3.0"]


def test_the_engine_runs_a_branch_that_is_off_for_nothing() -> None:
    torch.manual_seed(1)
    gated = gate(option_a_net().eval(), BlockDrop(), input_shape=SHAPE).eval()
    torch.nn.init.normal_(gated.gates.policy.linear.weight, std=3.0)
    torch.nn.init.zeros_(gated.gates.policy.linear.bias)
    x = images(32)
    with torch.no_grad():
        logits = gated(x)
    engine = cofire.compile(gated)
    found = engine(x)
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
    executed = gated.cost().executed
    assert {name: engine.last_macs[name].tolist() for name in executed} == {n: m.tolist() for n, m in executed.items()}
    off = ~gated.decisions["b1"].mask.bits
    assert off.any()
    assert not off.all()
    assert not engine.last_macs["b1"][off.numpy()].any()


def test_a_branch_that_the_engine_cannot_leave_out_is_refused_by_name() -> None:
    plain = Net(lambda m, x: m.logits(F.relu(x * 2 + F.gelu(m.one(x)))), one=conv(3, 3), fc=fc(3)).eval()
    gated = gate(plain, BlockDrop(), input_shape=SHAPE)
    plain_end = Net(lambda m, x: m.logits(x + 2 * F.relu(m.one(x))), one=conv(3, 3), fc=fc(3)).eval()
    ends_elsewhere = gate(plain_end, BlockDrop(), input_shape=SHAPE)
    assert list(gated.gates) == list(ends_elsewhere.gates) == ["one"]
    with pytest.raises(CompileError, match="branch 'one' must end with its last layer"):
        cofire.compile(ends_elsewhere)

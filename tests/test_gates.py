"""Gates: which loss reaches what, the heads' formulas, forced masks, what is kept and dropped."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, bn, conv, fc, gated_net, images, run
from torch import Tensor, nn

import cofire
from cofire import (
    FTWT,
    ConfigError,
    DataError,
    GatedModel,
    TrainingError,
    create_backbone,
    gate,
    mask_loss,
)
from cofire.gates.heads import PoolingHead
from cofire.gates.losses import mask_bce
from cofire.gates.targets import activity, mass_target

LABELS = torch.tensor([0, 3, 4])


def residual_net(in_place: bool = False, between: Callable[[Tensor], Tensor] = lambda x: x) -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = between(F.relu(m.bn0(m.stem(x))))
        y = m.bn2(m.two(F.relu(m.bn1(m.one(x)))))
        if in_place:
            y += x
        else:
            y = y + x
        return m.logits(F.relu(y))

    norms = {"bn0": bn(8), "bn1": bn(8), "bn2": bn(8)}
    return Net(forward, stem=conv(3, 8), one=conv(8, 8), two=conv(8, 8), **norms, fc=fc(8))


def training_net(
    preset: str = "default", in_place: bool = False, between: Callable[[Tensor], Tensor] = lambda x: x, **options: Any
) -> GatedModel:
    torch.manual_seed(0)
    config = FTWT.preset(preset, **{"always": True, **options})
    return gate(residual_net(in_place, between).train(), config, input_shape=SHAPE)


def gradients(gated: GatedModel, loss: Tensor) -> tuple[dict[str, float], dict[str, float]]:
    """Largest absolute gradient of each parameter of the backbone and of the heads; 0 where there is none."""
    gated.zero_grad()
    loss.backward()
    found = {name: 0.0 if p.grad is None else float(p.grad.abs().max()) for name, p in gated.named_parameters()}
    heads = {name for name in found if name.startswith("gates.")}
    return {n: g for n, g in found.items() if n not in heads}, {n: g for n, g in found.items() if n in heads}


def task_loss(gated: GatedModel) -> Tensor:
    return F.cross_entropy(gated(images()), LABELS)


# Which loss reaches what


@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("between", [lambda x: x, lambda x: F.avg_pool2d(x, 2)])
def test_decoupled_the_mask_loss_reaches_only_the_heads(pool: str, between: Callable[[Tensor], Tensor]) -> None:
    gated = training_net(between=between, pool=pool)
    gated(images())
    backbone, heads = gradients(gated, mask_loss(gated))
    assert set(backbone.values()) == {0.0}
    assert all(heads.values())


def test_decoupled_the_task_loss_reaches_only_the_backbone() -> None:
    gated = training_net()
    backbone, heads = gradients(gated, task_loss(gated))
    assert set(heads.values()) == {0.0}
    assert all(value > 0 for name, value in backbone.items() if name.endswith("weight"))


def test_joint_both_losses_reach_both() -> None:
    gated = training_net(mode="joint", softmax=False)
    backbone, heads = gradients(gated, task_loss(gated))
    assert all(heads.values())
    assert all(value > 0 for name, value in backbone.items() if name.endswith("weight"))
    gated(images())
    backbone, heads = gradients(gated, mask_loss(gated))
    assert all(heads.values())
    # what lies before the input of a head; the last unit's own filters are read by no head
    assert all(backbone[name] > 0 for name in ("stem.weight", "bn0.weight", "one.weight", "bn1.weight"))
    assert backbone["two.weight"] == backbone["fc.weight"] == 0


def test_official_joint_only_the_mask_loss_crosses_over() -> None:
    gated = training_net("official", mode="joint")
    backbone, heads = gradients(gated, task_loss(gated))
    assert set(heads.values()) == {0.0}
    assert backbone["stem.weight"] > 0
    gated(images())
    backbone, heads = gradients(gated, mask_loss(gated))
    assert all(heads.values())
    assert backbone["stem.weight"] > 0


@pytest.mark.parametrize("softmax", [True, False])
def test_joint_the_heads_gradient_is_the_straight_through_formula(softmax: bool) -> None:
    net = Net(lambda m, x: m.logits(F.relu(m.one(x))), one=conv(3, 8), fc=fc(8))
    gated = gated_net(net, mode="joint", softmax=softmax).train()
    head = gated.gates["one"].head
    task_loss(gated).backward()
    decision = gated.decisions["one"]
    assert decision.logits_BO is not None

    mask_BO = (decision.logits_BO > 0).float().requires_grad_()
    assert torch.equal(mask_BO, decision.mask.on)
    with gated.force({"one": mask_BO}):
        (by_mask_BO,) = torch.autograd.grad(task_loss(gated), mask_BO)
    p_BO = 1 / (1 + torch.exp(-decision.logits_BO.detach()))
    by_logit_BO = by_mask_BO * p_BO * (1 - p_BO)
    pooled_BI = images().amax((2, 3))
    pooled_BI = pooled_BI.softmax(1) if softmax else pooled_BI
    assert by_logit_BO.abs().max() > 1e-4
    torch.testing.assert_close(head.linear.weight.grad, by_logit_BO.T @ pooled_BI, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(head.linear.bias.grad, by_logit_BO.sum(0), rtol=1e-4, atol=1e-7)


def test_joint_masks_are_exactly_0_or_1() -> None:
    gated = training_net(mode="joint")
    gated(images())
    for decision in gated.decisions.values():
        assert set(decision.mask.on.unique().tolist()) <= {0.0, 1.0}
        assert decision.mask.on.requires_grad


# Losses


def test_mask_bce_is_summed_over_filters_and_averaged_over_samples() -> None:
    logits = [[0.0, 2.0, -1.0], [3.0, -0.5, 1.5]]
    target = [[1, 1, 0], [0, 1, 1]]
    by_hand = 0.0
    for row, wanted in zip(logits, target, strict=True):
        for z, t in zip(row, wanted, strict=True):
            p = 1 / (1 + math.exp(-z))
            by_hand -= math.log(p if t else 1 - p) / 2
    found = mask_bce(torch.tensor(logits), torch.tensor(target, dtype=torch.bool))
    assert found.ndim == 0
    assert found.item() == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize(("preset", "divisor"), [("default", 3), ("paper", 1), ("official", 3)])
def test_mask_loss_is_the_mean_over_groups_and_in_the_paper_the_sum(preset: str, divisor: int) -> None:
    gated = training_net(preset, ratio=0.7)
    outputs: dict[str, Tensor] = {}
    with gated.observe(lambda group, _, y_BOHW: outputs.update({group: y_BOHW.detach().clone()})):
        gated(images())
    tolerance = 1e-5 if preset == "official" else 0.0
    floor = 1 if preset == "default" else 0
    by_hand = 0.0
    for group, y_BOHW in outputs.items():
        target = mass_target(activity(y_BOHW), 0.7, floor=floor, tolerance=tolerance)
        logits_BO = gated.decisions[group].logits_BO
        assert logits_BO is not None
        by_hand += mask_bce(logits_BO, target).item()
    assert list(outputs) == ["stem", "one", "two"]
    assert mask_loss(gated).item() == pytest.approx(by_hand / divisor, rel=1e-5)


def test_mask_loss_without_a_training_forward_says_what_to_do() -> None:
    gated = training_net()
    with pytest.raises(TrainingError, match=r"call gated\.train\(\)"):
        mask_loss(gated)
    gated(images())
    gated.eval()(images())
    with pytest.raises(TrainingError, match=r"call gated\.train\(\)"):
        mask_loss(gated)
    with pytest.raises(ConfigError, match="a gated model is needed, got Linear"):
        mask_loss(nn.Linear(1, 1))


def test_mask_loss_finds_the_gated_model_inside_a_wrapper() -> None:
    gated = training_net()
    wrapper = nn.Sequential(gated)
    wrapper(images())
    assert mask_loss(wrapper).item() == mask_loss(gated).item()


def test_what_a_target_read_is_not_changed_by_an_addition_in_place() -> None:
    plain, in_place = training_net(), training_net(in_place=True)
    in_place.load_state_dict(plain.state_dict())
    assert torch.equal(plain(images()), in_place(images()))
    for group in plain.gates:
        torch.testing.assert_close(plain.switchboard.seen[group], in_place.switchboard.seen[group], rtol=0, atol=0)
    plain.eval(), in_place.eval()
    run(plain, images(), "targets"), run(in_place, images(), "targets")
    assert all(torch.equal(mask, in_place.masks[group]) for group, mask in plain.masks.items())


# Heads


def by_hand_head(x_IHW: list[list[list[float]]], head: PoolingHead) -> list[float]:
    flat = [[v for row in channel for v in row] for channel in x_IHW]
    pooled = [max(c) if head.pool == "max" else sum(c) / len(c) for c in flat]
    if head.softmax:
        total = sum(math.exp(v) for v in pooled)
        pooled = [math.exp(v) / total for v in pooled]
    weight = head.linear.weight.tolist()
    bias = [0.0] * len(weight) if head.linear.bias is None else head.linear.bias.tolist()
    return [sum(w * v for w, v in zip(row, pooled, strict=True)) + b for row, b in zip(weight, bias, strict=True)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("pool", ["max", "avg"])
def test_a_head_pools_normalises_and_maps(pool: Any, softmax: bool, bias: bool) -> None:
    gated = gated_net(
        Net(lambda m, x: m.logits(F.relu(m.one(x))), one=conv(3, 8), fc=fc(8)), pool=pool, softmax=softmax, bias=bias
    )
    x = images() - 3  # negative nearly everywhere: a maximum must not start at 0
    gated(x)
    found = gated.decisions["one"].logits_BO
    assert found is not None
    expected = torch.tensor([by_hand_head(sample, gated.gates["one"].head) for sample in x.tolist()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(gated.masks["one"], found > 0)
    assert ("gates.one.head.linear.bias" in gated.state_dict()) is bias
    assert gated.gates.head_macs(gated.gates.sites["one"]) == 3 * 8


def relu_in_place(m: Net, x: Tensor) -> Tensor:
    y = m.one(x)
    F.relu_(y)  # and what it returns is not used
    return y


UNUSED = "in place, result not used"
FIRST: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "relu": lambda m, x: F.relu(m.one(x)),
    "hardswish": lambda m, x: F.hardswish(m.one(x)),
    "negative": lambda m, x: F.hardtanh(m.one(x) - 5),
    "linear": lambda m, x: m.one(x),
    "pooled": lambda m, x: F.avg_pool2d(F.relu(m.one(x)), 2),
    "post_add": lambda m, x: F.relu(m.one(F.relu(m.zero(x))) + m.zero(x)),
    UNUSED: relu_in_place,
}


@pytest.mark.parametrize("mode", ["decoupled", "joint"])
@pytest.mark.parametrize("first", FIRST)
def test_in_training_a_head_reads_the_very_input_of_its_unit(first: str, mode: str) -> None:
    forward = FIRST[first]
    zero = {"zero": conv(3, 3)} if first == "post_add" else {}
    net = Net(lambda m, x: m.logits(F.relu(m.two(forward(m, x)))), one=conv(3, 8), **zero, two=conv(8, 8), fc=fc(8))
    if first == "post_add":
        net.one = conv(3, 3)
        net.two = conv(3, 8)
    net.one.bias.data[:2] = -20.0  # two maps negative everywhere, of which one is switched off
    gated = gated_net(net, mode=mode, linear=True, site="post_add").train()
    head = gated.gates["one"].head.linear
    nn.init.zeros_(head.weight)
    head.bias.data = torch.ones(8)[: len(head.bias)].index_fill(0, torch.tensor([1]), -1.0)
    assert {"one", "two"} <= set(gated.gates)
    seen: list[Tensor] = []
    gated.two.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    gated(images())
    assert gated.masks["one"][:, :2].tolist() == [[True, False]] * 3
    two = gated.decisions["two"].logits_BO
    assert two is not None
    torch.testing.assert_close(two, gated.gates["two"].head(seen[0]), rtol=1e-6, atol=1e-6)
    gated.eval()(images())
    again = gated.decisions["two"].logits_BO
    assert again is not None
    torch.testing.assert_close(again, two, rtol=1e-6, atol=1e-6)


# The dial, forced masks, signatures


def test_raising_the_threshold_only_switches_filters_off() -> None:
    gated = gated_net(Net(lambda m, x: m.logits(F.relu(m.one(x))), one=conv(3, 32), fc=fc(32)))
    assert gated.threshold == 0.0
    masks = []
    for threshold in (-math.inf, -0.5, 0.0, 0.1, 0.5, math.inf):
        gated.threshold = threshold
        gated(images())
        logits_BO = gated.decisions["one"].logits_BO
        assert logits_BO is not None
        assert torch.equal(gated.masks["one"], logits_BO > threshold)
        masks.append(gated.masks["one"])
    assert all((lower >= higher).all() for lower, higher in pairwise(masks))
    assert masks[0].all()
    assert not masks[-1].any()
    assert len({int(mask.sum()) for mask in masks}) >= 5


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masks_can_be_forced_for_all_samples_or_each(dtype: torch.dtype) -> None:
    gated, x = training_net().eval(), images()
    rows = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    with torch.no_grad(), gated.force({"one": rows.to(dtype), "two": rows[0].to(dtype)}):
        gated(x)
    assert torch.equal(gated.masks["one"], rows)
    assert torch.equal(gated.masks["two"], rows[:1].expand(3, -1))
    assert gated.decisions["one"].logits_BO is None
    assert gated.decisions["stem"].logits_BO is not None  # left out, so it decided by itself
    gated(x)
    assert gated.decisions["one"].logits_BO is not None


def test_forcing_ends_with_the_block_and_nests() -> None:
    gated, x = training_net().eval(), images()
    free = gated(x)
    with pytest.raises(ZeroDivisionError), gated.force("open"):
        raise ZeroDivisionError
    assert torch.equal(gated(x), free)
    with gated.force("open"):
        with gated.force({"one": torch.zeros(8)}):
            gated(x)
            assert [bool(mask.any()) for mask in gated.masks.values()] == [True, False, True]
        gated(x)
        assert all(mask.all() for mask in gated.masks.values())


def test_forced_targets_are_those_of_the_masked_stream() -> None:
    gated, x = training_net(ratio=0.6).eval(), images()
    outputs: dict[str, Tensor] = {}
    with torch.no_grad(), gated.force("targets"), gated.observe(lambda g, _, y: outputs.update({g: y.clone()})):
        gated(x)
    for group, y_BOHW in outputs.items():
        assert torch.equal(gated.masks[group], mass_target(activity(y_BOHW), 0.6))
        assert not gated.masks[group].all()


def test_forcing_what_is_not_there_is_refused() -> None:
    gated = training_net()
    with (
        pytest.raises(ConfigError, match="unknown group 'tow'; did you mean 'two'"),
        gated.force({"tow": torch.ones(8)}),
    ):
        pass
    with pytest.raises(ConfigError, match="unknown forced masks 'opne'; did you mean 'open'"), gated.force("opne"):  # type: ignore[arg-type]
        pass
    for shape in ((7,), (2, 7), (2, 8, 1, 1), ()):
        with (
            pytest.raises(ConfigError, match=r"group 'two': mask must have shape \(B, 8\), got"),
            gated.force({"two": torch.ones(shape)}),
        ):
            pass
    gated.eval()(images())
    assert gated.decisions["two"].logits_BO is not None


def test_a_forced_mask_of_another_batch_size_is_refused() -> None:
    gated = training_net().eval()
    with gated.force({"two": torch.ones(2, 8)}), pytest.raises(ConfigError, match="two"):
        gated(images(3))


def test_images_of_another_shape_are_refused() -> None:
    gated = training_net()
    for shape in ((3, 8, 8), (2, 1, 8, 8), (2, 3)):
        with pytest.raises(DataError, match=r"images must have shape \(B, 3, H, W\), got"):
            gated(torch.zeros(shape))


def test_a_signature_keeps_exactly_its_number_of_filters() -> None:
    signature = {"stem": 8, "one": 1, "two": 5}
    gated = training_net(signature=signature).eval()
    run(gated, images(), "targets")
    for group, k in signature.items():
        assert gated.masks[group].sum(1).tolist() == [k] * 3


@pytest.mark.parametrize(
    ("signature", "problem"),
    [
        ({"stem": 1, "one": 1}, "must name every group, got none for 'two'"),
        ({"stem": 1, "one": 1, "two": 0}, r"\['two'\] must be in 1\.\.8, got 0"),
        ({"stem": 1, "one": 9, "two": 8}, r"\['one'\] must be in 1\.\.8, got 9"),
    ],
)
def test_a_signature_that_does_not_fit_is_refused(signature: dict[str, int], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        training_net(signature=signature)


# What is kept and what is dropped


def digits(**options: Any) -> GatedModel:
    torch.manual_seed(0)
    return gate(create_backbone("resnet8_digits"), FTWT(**options))


@pytest.mark.parametrize("mode", ["decoupled", "joint"])
def test_the_last_batch_is_dropped_on_deepcopy_and_pickling_and_not_in_the_state_dict(mode: Any) -> None:
    gated = digits(mode=mode)
    keys = set(gated.state_dict())
    size = len(pickle.dumps(gated))
    gated(images(64, (1, 8, 8)))
    loss = mask_loss(gated)
    assert set(gated.state_dict()) == keys
    assert {key for key in keys if key.startswith("gates.")} == {
        f"gates.{group.replace('.', '_')}.head.linear.{what}" for group in gated.gates for what in ("weight", "bias")
    }
    with gated.force("open"):
        for twin in (copy.deepcopy(gated), pickle.loads(pickle.dumps(gated))):
            assert twin.decisions == {}
            with pytest.raises(TrainingError, match="mask_loss needs a forward"):
                mask_loss(twin)
            twin(images(2, (1, 8, 8)))
            assert all(decision.logits_BO is not None for decision in twin.decisions.values())
    assert len(pickle.dumps(gated)) < 1.05 * size
    assert set(gated.decisions) == set(gated.gates)
    assert mask_loss(gated).item() == loss.item()


def test_decisions_of_a_new_forward_replace_the_old() -> None:
    gated = digits().eval()
    assert gated.decisions == {}
    gated(images(4, (1, 8, 8)))
    gated(images(2, (1, 8, 8)))
    assert {len(decision.mask.on) for decision in gated.decisions.values()} == {2}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"ratio": 0.0}, r"FTWT\.ratio must be in \(0, 1\], got 0"),
        ({"ratio": 1.5}, r"FTWT\.ratio must be in \(0, 1\], got 1\.5"),
        ({"tolerance": -0.1}, r"FTWT\.tolerance must be in \[0, 1\), got -0\.1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        FTWT(**options)


def test_presets_are_the_columns_of_the_methods_table() -> None:
    assert FTWT.preset("default") == FTWT()
    paper, official = FTWT.preset("paper"), FTWT.preset("official")
    assert (paper.pool, paper.floor, paper.silent) == ("max", 0, "floor")
    assert (paper.reduction, paper.straight_through, paper.linear) == ("sum", True, False)
    assert paper.depthwise == official.depthwise == "separate"
    assert (official.pool, official.floor, official.silent, official.tolerance) == ("avg", 0, "all", 1e-5)
    assert (official.reduction, official.straight_through, official.linear) == ("mean", False, True)
    assert FTWT.preset("official", pool="max").pool == "max"
    with pytest.raises(ConfigError, match="unknown FTWT preset 'offical'; did you mean 'official'"):
        FTWT.preset("offical")


@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6, nn.SiLU])
def test_masks_written_in_place_change_no_gradient(
    activation: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training the mask goes into ReLU's and batch norm's own output; a plain product must give the same."""
    torch.manual_seed(0)
    model = cofire.create_backbone("resnet8_digits")
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.ReLU):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], activation())
    one = cofire.gate(model, cofire.FTWT()).train()
    other = copy.deepcopy(one)
    x = torch.randn(4, 1, 8, 8)

    def gradients(gated: cofire.GatedModel) -> list[Tensor]:
        (gated(x).square().sum() + cofire.mask_loss(gated)).backward()
        return [p.grad for p in gated.parameters() if p.grad is not None]

    in_place = gradients(one)
    assert not all(mask.all() for mask in one.masks.values())
    monkeypatch.setattr("cofire.gates.base.switched_off", lambda y, mask: y * mask)
    plain = gradients(other)
    assert len(in_place) == len(plain) > 0
    for ours, reference in zip(in_place, plain, strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)

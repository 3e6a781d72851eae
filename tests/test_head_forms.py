"""What FTWT's heads are and learn from: two maps, saliency by gradient, targets of a teacher."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import OwnNet, digest, tiny_gated, tiny_images, tiny_plain
from torch import Tensor

import cofire
from cofire import FTWT, ConfigError, GatedModel, Recipe, TrainingError, fit, gate, mask_loss, trim
from cofire.export import to_onnx
from cofire.gates.heads import PoolingHead
from cofire.gates.losses import felt_later, mask_bce
from cofire.gates.targets import activity, mass_target
from cofire.runtime.program import Conv

TWO_MAPS: list[dict[str, Any]] = [
    {"rank": 3, "pool": "both", "softmax": False, "standardise": True},
    {"hidden": 5, "pool": "both", "softmax": False, "standardise": True},
    {"hidden": 4, "pool": "max"},
    {"rank": 2, "pool": "avg", "bias": False},
]
LABELS = torch.tensor([0, 1, 2, 0])


def images(n: int = 4, shape: tuple[int, int, int] = (1, 8, 8), seed: int = 5) -> Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def lively(**options: Any) -> GatedModel:
    """Heads with statistics of images and large weights, so that masks differ from image to image."""
    torch.manual_seed(0)
    gated = gate(cofire.create_backbone("resnet8_digits").eval(), FTWT(always=True, **options)).eval()
    for one in gated.gates.values():
        torch.nn.init.normal_(one.head.linear.weight, std=3.0)
        torch.nn.init.normal_(one.head.inner.weight, std=3.0)
        one.head.train()
    with torch.no_grad():
        for seed in range(20):
            gated(images(32, seed=seed))
    return gated.eval()


# Two maps


def test_a_head_of_two_maps_by_hand() -> None:
    """Maxima (2, 6) -> inner (1 * 2 - 6 + 1, 2 * 6 - 5) = (-3, 7) -> 10 * a + b, and -a + 0.5."""
    x = torch.tensor([[[[1.0, 2.0]], [[6.0, -3.0]]]])
    for options, expected in (({"rank": 2}, [-23.0, 3.5]), ({"hidden": 2}, [7.0, 0.5])):
        head = PoolingHead(2, 2, pool="max", softmax=False, bias=True, **options)
        assert head.inner is not None
        values = {
            "inner.weight": [[1.0, -1.0], [0.0, 2.0]],
            "inner.bias": [1.0, -5.0],
            "linear.weight": [[10.0, 1.0], [-1.0, 0.0]],
            "linear.bias": [0.0, 0.5],
        }
        head.load_state_dict({name: torch.tensor(value) for name, value in values.items()})
        assert head(x).tolist() == [expected]
        assert head.macs == 2 * 2 + 2 * 2


@pytest.mark.parametrize("options", TWO_MAPS)
def test_both_maps_are_counted(options: dict[str, Any]) -> None:
    gated = lively(**options)
    between = options.get("rank", 0) + options.get("hidden", 0)
    for name, site in gated.gates.sites.items():
        features = site.units[0].in_channels * (2 if options["pool"] == "both" else 1)
        expected = features * between + between * site.filters
        assert gated.gates.head_macs(site) == expected, name
        assert set(gated.cost().heads[name].tolist()) == {expected}


def test_a_gate_whose_two_maps_cannot_pay_is_left_out() -> None:
    assert set(tiny_gated(rank=1).gates) == set(tiny_gated().gates)
    with pytest.raises(cofire.NoUnitError):
        tiny_gated(rank=100_000)


@pytest.mark.parametrize("options", TWO_MAPS)
def test_the_engine_runs_both_maps_as_pytorch_does(options: dict[str, Any]) -> None:
    gated, x = lively(**options), images(32)
    with torch.no_grad():
        logits = gated(x)
    engine = cofire.compile(gated)
    found = engine(x)
    assert any(len(mask.unique(dim=0)) > 4 for mask in gated.masks.values())  # it does see the image
    assert all(torch.equal(torch.from_numpy(engine.last_masks[name]), mask) for name, mask in gated.masks.items())
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
    executed = gated.cost().executed
    assert {name: engine.last_macs[name].tolist() for name in executed} == {n: m.tolist() for n, m in executed.items()}


@pytest.mark.parametrize("options", TWO_MAPS)
def test_what_the_engine_is_told_is_the_same_choice(options: dict[str, Any]) -> None:
    gated = lively(**options)
    with torch.no_grad():
        for name, site in gated.gates.sites.items():
            x = images(16, (site.units[0].in_channels, 5, 5))
            logits_BO = gated.gates[name].head(x)
            assert torch.equal(gated.gates.lower(site).chosen(x, 0.1), logits_BO > 0.1), name


@pytest.mark.parametrize("options", TWO_MAPS[:3])
def test_it_is_written_as_onnx(options: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is needed (extra export)")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is needed")
    gated, x = lively(**options), images(8)
    path = to_onnx(gated, tmp_path / "gated.onnx")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = gated(x)
    torch.testing.assert_close(torch.from_numpy(session.run(None, {"images": x.numpy()})[0]), expected)


@pytest.mark.parametrize("options", TWO_MAPS)
def test_trimmed_it_computes_the_same(options: dict[str, Any]) -> None:
    gated, x = lively(**options), images(24)
    for one in gated.gates.values():
        if options.get("bias", True):
            one.head.linear.bias.data[:3] = -1e4
        else:
            one.head.linear.weight.data[:3] = 0.0
    trimmed = trim(gated, [x])
    assert isinstance(trimmed, GatedModel)
    with torch.no_grad():
        torch.testing.assert_close(trimmed(x), gated(x), rtol=1e-4, atol=1e-5)
    assert sum(trimmed.cost().heads.values())[0] < sum(gated.cost().heads.values())[0]


def test_in_int8_the_engine_does_what_the_simulation_does() -> None:
    gated, x = lively(**TWO_MAPS[1]), images(16)
    quantized = cofire.quantize(gated, [x])
    with torch.no_grad():
        torch.testing.assert_close(cofire.compile(quantized)(x), quantized(x), rtol=0, atol=0)
    kept = {f"gates.{name}" for name in gated.gates}
    names = [
        {op.name for op in q.program.ops if type(op) is Conv}
        for q in (quantized, cofire.quantize(gated, [x], keep=kept))
    ]
    assert not kept & names[0]
    assert kept <= names[1]


# Saliency by gradient


def test_a_target_that_the_gradient_tells_by_hand() -> None:
    """Two filters of two positions; the loss is 3 z00 - z01 + 10 z10, and filter 1 is off.

    Saliencies |1 * 3| + |2 * -1| = 5 and |-1 * 10| + |4 * 0| = 10: of these r = 0.7 keeps filter 1 alone.
    """
    y = torch.tensor([[[[1.0, 2.0]], [[-1.0, 4.0]]]], requires_grad=True)
    mask = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    logits = torch.tensor([[0.0, 2.0]], requires_grad=True)
    seen: list[Tensor] = []

    def wanted(saliency_BO: Tensor) -> Tensor:
        seen.append(saliency_BO)
        return mass_target(saliency_BO, 0.7)

    masked, loss = felt_later(y, mask, logits, wanted)
    assert masked.tolist() == [[[[1.0, 2.0]], [[0.0, 0.0]]]]
    assert float(loss.detach()) == 0.0
    (masked * torch.tensor([[[[3.0, -1.0]], [[10.0, 0.0]]]])).sum().add(loss, alpha=2).backward()
    assert seen[0].tolist() == [[5.0, 10.0]]
    assert y.grad is not None
    assert logits.grad is not None
    assert y.grad.tolist() == [[[[3.0, -1.0]], [[0.0, 0.0]]]]
    share = 1 / (1 + torch.exp(torch.tensor(-2.0)))
    torch.testing.assert_close(logits.grad, 2 * torch.tensor([[0.5, float(share) - 1]]))


def by_gradient(**options: Any) -> GatedModel:
    torch.manual_seed(0)
    return gate(OwnNet(), FTWT(saliency="gradient", always=True, **options), input_shape=(3, 8, 8)).train()


def own_loss(gated: GatedModel, x: Tensor) -> Tensor:
    return F.cross_entropy(gated(x), LABELS)


def test_heads_learn_what_the_loss_hangs_on() -> None:
    """Against a forward and a loss by hand, with the masks that were chosen."""
    gated, x = by_gradient(ratio=0.7), images(4, (3, 8, 8))
    (own_loss(gated, x) + mask_loss(gated)).backward()
    net, masks = gated.backbone, {name: mask[:, :, None, None].float() for name, mask in gated.masks.items()}
    assert not all(mask.all() for mask in gated.masks.values())
    first = torch.relu(net.first(x)).detach()
    kept_first = (first * masks["first"]).requires_grad_()
    second = torch.relu(net.second(kept_first))
    kept_second = second * masks["second"]
    kept_second.retain_grad()
    F.cross_entropy(net.last(kept_second.mean((2, 3))), LABELS).backward()
    total = torch.zeros(())
    for name, y, z, into in (("first", first, kept_first, x), ("second", second, kept_second, kept_first)):
        assert z.grad is not None
        target_BO = mass_target((y * z.grad).abs().sum((2, 3)).detach(), 0.7)
        total = total + mask_bce(gated.gates[name].head(into.detach()), target_BO) / 2
    heads = list(gated.gates.parameters())
    for found, expected in zip((p.grad for p in heads), torch.autograd.grad(total, heads), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_filter_that_is_off_can_be_wanted() -> None:
    """Its own gradient is zero behind the mask, that of what it would add is not."""
    gated, x = by_gradient(ratio=1.0), images(4, (3, 8, 8))
    with torch.no_grad():
        gated.gates["second"].head.linear.bias[:4] = -50.0
    (own_loss(gated, x) + mask_loss(gated)).backward()
    gradient_O = gated.gates["second"].head.linear.bias.grad
    assert gradient_O is not None
    assert (gradient_O[:4] < 0).all()  # towards on


def test_decoupled_the_backbones_gradient_is_bit_equal_to_that_without_heads() -> None:
    gated, x = tiny_gated(saliency="gradient", always=True).train(), images()
    plain = copy.deepcopy(gated)
    (own_loss(gated, x) + mask_loss(gated)).backward()
    assert not all(mask.all() for mask in gated.masks.values())
    with plain.force({name: decision.mask for name, decision in gated.decisions.items()}):
        own_loss(plain, x).backward()
    for (name, one), other in zip(gated.backbone.named_parameters(), plain.backbone.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad), name


def test_joint_the_task_loss_reaches_the_heads_as_with_any_saliency() -> None:
    grads = []
    for saliency in ("gradient", "max"):
        gated = tiny_gated(saliency=saliency, mode="joint", always=True).train()
        own_loss(gated, images()).backward()
        grads.append([p.grad for p in gated.parameters()])
    assert sum(grad is not None for grad in grads[0]) == len(grads[0])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_half_the_loss_has_the_same_targets_and_half_the_gradient() -> None:
    """As gradient accumulation has it."""
    found = []
    for factor in (1.0, 0.5):
        gated = by_gradient()
        ((own_loss(gated, images(4, (3, 8, 8))) + mask_loss(gated)) * factor).backward()
        found.append([p.grad / factor for p in gated.gates.parameters() if p.grad is not None])
    assert len(found[0]) == 4
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_loss_of_masks_alone_is_refused() -> None:
    gated = by_gradient()
    gated(images(4, (3, 8, 8)))
    with pytest.raises(TrainingError, match="warm_heads must be 0"):
        mask_loss(gated).backward()


def test_without_a_backward_pass_there_are_no_targets() -> None:
    gated = by_gradient().eval()
    with pytest.raises(ConfigError, match="FTWT has no targets to force"), gated.force("targets"):
        gated(images(4, (3, 8, 8)))
    gated.train()
    with torch.no_grad():
        gated(images(4, (3, 8, 8)))
    with pytest.raises(TrainingError, match=r"without torch\.no_grad"):
        mask_loss(gated)


# Targets of a teacher


def test_targets_are_those_of_the_teacher() -> None:
    student, teacher, x = tiny_gated(0, targets="teacher").train(), tiny_plain(1).eval(), images()
    watched = student.gates.taught_by(teacher)
    seen: dict[str, Tensor] = {}
    reference = gate(teacher, FTWT()).eval()
    with torch.no_grad():
        with reference.force("open"), reference.observe(lambda name, _, y: seen.update({name: activity(y)})):
            expected = reference(x)
        student(x)
        assert torch.equal(watched(x), expected)
    logits = {name: decision.logits_BO for name, decision in student.decisions.items()}
    losses = [mask_bce(logits[name], mass_target(seen[name], 0.9)) for name in student.gates]
    torch.testing.assert_close(mask_loss(student), torch.stack(losses).mean())


def test_fit_lets_the_teacher_be_watched() -> None:
    ends = []
    for targets in ("self", "teacher"):
        student = tiny_gated(0, targets=targets)
        loader = tiny_images(24).loader(12, train=True)
        fit(student, loader, Recipe(epochs=1, lr=0.0, head_lr=0.1, distill=0.5), teacher=tiny_plain(1))
        ends.append(digest(student.gates))
    assert ends[0] != ends[1]


def test_without_its_teacher_it_says_what_to_do() -> None:
    student = tiny_gated(targets="teacher")
    with pytest.raises(ConfigError, match=r"needs a teacher that sees the images of each step: fit\(teacher="):
        fit(student, tiny_images(24).loader(12, train=True), Recipe(epochs=1))
    narrow = OwnNet()
    narrow.second, narrow.last = torch.nn.Conv2d(8, 4, 3, padding=1), torch.nn.Linear(4, 3)
    student = gate(OwnNet(), FTWT(targets="teacher", always=True), input_shape=(3, 8, 8))
    with pytest.raises(ConfigError, match="as many filters in each"):
        student.gates.taught_by(narrow)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rank": -1}, "must be at least 0, and one of them 0, got -1 and 0"),
        ({"rank": 2, "hidden": 3}, "must be at least 0, and one of them 0, got 2 and 3"),
        ({"targets": "teacher", "saliency": "gradient"}, 'must not be "gradient" with targets of a teacher'),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        FTWT(**options)

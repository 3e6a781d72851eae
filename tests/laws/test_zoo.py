"""Models of torchvision and timm, as they are published, can be gated; or the error says why not.

The numbers of units are sums over the blocks of each architecture, written out from its paper or source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
import zoo
from nets import random_masks, run
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from cofire import FTWT, GatedModel, NoUnitError, Unit, gate, mask_loss

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(zoo.why_not), reason=zoo.why_not)]

REASONS = {
    "a shortcut": "shortcut",
    "linear": "linear",
    "works on a 1x1 map": "pooled",
    "the classifier": "classifier",
    "its head would cost": "costly",
    "Conv1d": "foreign",
    "LayerNorm2d mixes its channels": "mixed",
}


class Case(NamedTuple):
    """``units`` counts the gated convs by role (``shared``: a depthwise conv under its feeder's mask) and the others
    by reason."""

    name: str
    units: Mapping[str, int]
    size: int = 64
    options: Mapping[str, Any] = {}
    opaque: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name


RESNET18 = dict(plain=1 + 8, residual=8, shortcut=3)
RESNET50 = dict(plain=1 + 16 * 2, residual=16, shortcut=4)
EFFICIENTNET_B0 = dict(plain=1 + 15 + 1, shared=16, linear=16, pooled=16 * 2)
DENSENET121 = dict(plain=1 + 58, linear=58 + 3)  # a layer's second conv and the transitions: norms come after a concat

CASES = [
    Case("torchvision/alexnet", dict(plain=5)),
    Case("torchvision/vgg16_bn", dict(plain=13), 32, {"init_weights": False}),
    Case("torchvision/resnet18", RESNET18),
    Case("torchvision/resnet50", RESNET50),
    Case("torchvision/resnext50_32x4d", RESNET50),
    # 17 blocks; the first has no expansion, so that the stem feeds its depthwise conv
    Case("torchvision/mobilenet_v2", dict(plain=1 + 16 + 1, shared=17, linear=17)),
    Case("torchvision/mnasnet1_0", dict(plain=1 + 16 + 1, shared=1 + 16, linear=1 + 16)),
    Case("torchvision/mobilenet_v3_small", dict(plain=1 + 10 + 1, shared=11, linear=11, pooled=9 * 2)),
    # the stem also feeds a skip, so that the first depthwise conv has a mask of its own
    Case("torchvision/mobilenet_v3_large", dict(plain=1 + 14 + 1, shared=14, depthwise=1, linear=15, pooled=8 * 2)),
    Case("torchvision/squeezenet1_1", dict(plain=1 + 8 * 3, classifier=1)),
    Case("torchvision/densenet121", DENSENET121),
    Case("torchvision/googlenet", dict(plain=3 + 9 * 6), 64, {"init_weights": False}),
    # its auxiliary head wants larger images in training
    Case(
        "torchvision/inception_v3",
        dict(plain=5 + 3 * 7 + 4 + 4 * 10 + 6 + 2 * 9),
        128,
        {"init_weights": False, "aux_logits": False},
    ),
    # 16 blocks of 1x1, depthwise, 1x1; three have a second branch of depthwise (fed by the fork), 1x1
    Case("torchvision/shufflenet_v2_x1_0", dict(plain=2 + 16 * 2 + 3, shared=16, linear=3)),
    Case("torchvision/regnet_y_400mf", dict(plain=1 + 16 * 2, residual=16, shortcut=4, pooled=16 * 2), 96),
    Case("torchvision/regnet_x_400mf", dict(plain=1 + 22 * 2, residual=22, shortcut=4), 96),
    Case("torchvision/efficientnet_b0", EFFICIENTNET_B0),
    # 2 blocks of one conv, 8 of a conv and a projection, 30 inverted residuals
    Case(
        "torchvision/efficientnet_v2_s",
        dict(plain=1 + 2 + 8 + 30 + 1, shared=30, linear=8 + 30, pooled=30 * 2),
    ),
    Case("timm/resnet18", RESNET18),
    Case("timm/resnet26d", dict(plain=3 + 8 * 2, residual=8, shortcut=4)),
    # pre-activation: the stem and a block's last conv are followed by a sum that others read too
    Case("timm/resnetv2_50", dict(plain=16 * 2, linear=1 + 16, shortcut=4, classifier=1)),
    # the same without norms; where the sum goes nowhere but into an activation (a stage's end), its branch is gated
    Case("timm/nf_resnet26", dict(plain=8 * 2, residual=4, linear=1 + 4, shortcut=4)),
    Case("timm/efficientnet_b0", EFFICIENTNET_B0),
    Case("timm/tf_efficientnet_b0", EFFICIENTNET_B0),
    Case("timm/mobilenetv3_large_100", dict(plain=16, shared=14, depthwise=1, linear=15, pooled=8 * 2 + 1)),
    Case("timm/regnetx_002", dict(plain=1 + 13 * 2, residual=13, shortcut=4), 96),
    Case("timm/regnety_002", dict(plain=1 + 13 * 2, residual=13, shortcut=4, pooled=13 * 2), 96),
    Case("timm/densenet121", DENSENET121),
    # two convs side by side, summed with the input's norm before the activation
    Case("timm/repvgg_a0", dict(residual=22 * 2)),
    # a 3x3 stem and 21 blocks of five depthwise and four 1x1 convs, all side by side; starts its sums from 0
    Case("timm/mobileone_s0", dict(residual=2 + 21 * 4, linear=21 * 5)),
    # 12 blocks, 6 roots that join them by a concat, 4 projections
    Case("timm/dla34", dict(plain=3 + 12 + 6, residual=12, shortcut=4, classifier=1)),
    # stem, 23 blocks (5 of them bottlenecks), transitions, heads; 25 convs into the 2 + 3 + 4 sums across
    # resolutions: in each of these the longest way is gated, 5 convs on the ways are plain
    Case(
        "timm/hrnet_w18_small",
        dict(plain=2 + 18 + 5 * 2 + 4 + 5 + 3 + 1, residual=18 + 5 + 9, shortcut=5 + 25 - 5 - 9),
    ),
    # 16 blocks of two ghost modules (1x1 and a depthwise conv on it, concatenated; the second ones linear);
    # on maps of 4x4 and 2x2 a mask for the cheap depthwise convs does not pay
    Case(
        "timm/ghostnet_100",
        dict(plain=1 + 16 + 1, depthwise=9, costly=7, linear=16 * 2 + 4 + 5, shortcut=5, pooled=7 * 2 + 1),
    ),
    Case("timm/convnext_atto", dict(plain=12, linear=12 + 4, mixed=12)),
    Case("timm/poolformer_s12", dict(plain=12, linear=12 + 4)),
    Case("timm/seresnet18", dict(**RESNET18, pooled=8 * 2)),
    Case("timm/legacy_seresnet18", dict(plain=1 + 8 * 2, shortcut=3, pooled=8 * 2)),  # activates before rescaling
    Case("timm/ese_vovnet19b_slim", dict(plain=3 + 4 * (3 + 1), pooled=4)),
    Case("timm/res2net50_26w_4s", dict(plain=1 + 16 * (1 + 3), residual=16, shortcut=4)),
    Case("timm/starnet_s1", dict(plain=1 + 15, linear=15 * 4 + 4)),
    # attention over the channels by a Conv1d
    Case("timm/eca_resnext26ts", dict(plain=3 + 8 * 2, residual=8, shortcut=4, foreign=8)),
    # two convs weighted by a softmax and summed by stack(...).sum(1): all channels count as live there
    Case(
        "timm/skresnet18",
        dict(plain=1 + 8 * 2, residual=8, shortcut=3, pooled=8 * 2),
        opaque=frozenset({"sum", "softmax"}),
    ),
]


@dataclass(frozen=True)
class Pair:
    case: Case
    model: nn.Module
    gated: GatedModel

    def images(self, batch: int = 2) -> Tensor:
        return images(batch, self.case.size)


def images(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request: pytest.FixtureRequest) -> Pair:
    case: Case = request.param
    model = zoo.build(case.name, **case.options)
    return Pair(case, model, gate(model, FTWT(), input_shape=(3, case.size, case.size)))


def described(unit: Unit) -> str:
    if unit.gated:
        return unit.role if unit.group == unit.name else "shared"
    return next((kind for start, kind in REASONS.items() if unit.reason.startswith(start)), unit.reason)


def test_units_are_those_of_the_architecture(pair: Pair) -> None:
    assert Counter(map(described, pair.gated.units)) == Counter(pair.case.units)
    assert {op.what for op in pair.gated.graph.opaque} == pair.case.opaque


@torch.no_grad()
def test_open_gates_change_nothing(pair: Pair) -> None:
    x = pair.images()
    expected = pair.model(x)
    assert torch.isfinite(expected).all()
    assert torch.equal(run(pair.gated, x, "open"), expected)
    cost = pair.gated.cost()
    for column in ("paper", "executed"):
        assert cost.reduction(column).tolist() == [0.0, 0.0]
    assert set(pair.model.state_dict()) <= set(pair.gated.state_dict())


@torch.no_grad()
def test_dense_macs_are_those_torch_counts(pair: Pair) -> None:
    with FlopCounterMode(display=False) as counter:
        pair.model(pair.images(1))
    assert 2 * pair.gated.cost({}).dense_total == counter.get_total_flops()


def test_it_trains(pair: Pair) -> None:
    gated = pair.gated.train()
    found = gated(pair.images())
    outputs = [found] if isinstance(found, Tensor) else [output for output in found if output is not None]
    loss = sum(output.square().mean() for output in outputs) + mask_loss(gated)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in gated.gates.parameters())


ERRORS = [
    ("torchvision/vit_b_16", 224, NoUnitError, r"no activation comes after it: conv_proj"),
]


@pytest.mark.parametrize(("name", "size", "error", "text"), ERRORS, ids=[name for name, *_ in ERRORS])
def test_a_model_without_units_is_refused_with_the_reason(name: str, size: int, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        gate(zoo.build(name), FTWT(), input_shape=(3, size, size))


# Random masks, against the plain model with hooks


MASKED = [
    "torchvision/alexnet",  # no norms; features flattened into a linear layer
    "torchvision/squeezenet1_1",  # concatenation
    "torchvision/densenet121",
    "torchvision/googlenet",
    "torchvision/shufflenet_v2_x1_0",  # split, concatenation, shuffle
    "torchvision/mobilenet_v3_small",  # depthwise, squeeze-and-excite
    "torchvision/regnet_y_400mf",  # groups, squeeze-and-excite, residual
    "timm/seresnet18",  # squeeze-and-excite before the addition
    "timm/res2net50_26w_4s",  # split, addition of a part, concatenation
    "timm/ghostnet_100",
    "timm/hrnet_w18_small",  # sums of many operands
    "timm/repvgg_a0",
    "timm/starnet_s1",  # products
]


class Masked:
    """The plain model under masks, by hooks: masks act where the norm after a conv ends (or the conv, without norm).

    That is before the activation, not after it as in a gated model; the same for activations with f(0) = 0.
    """

    def __init__(self, model: nn.Module, masks: Mapping[str, Tensor], x: Tensor) -> None:
        self.masks = masks
        self.macs: dict[str, Tensor] = {}
        self.made_by: dict[int, tuple[str, Tensor]] = {}  # a tensor's id -> the conv it comes from
        self.normed: set[str] = set()
        names = {module: name for name, module in model.named_modules()}
        for masking in (False, True):  # the first run only finds out after which convs there is a norm
            self.masking = masking
            hooks = [module.register_forward_hook(self._hook(name)) for module, name in names.items()]
            self.logits = model(x)
            for hook in hooks:
                hook.remove()

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            if isinstance(module, nn.BatchNorm2d):
                conv, _ = self.made_by.get(id(inputs[0]), ("", None))
                self.normed.add(conv)
                return self._masked(conv, output)
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                self.macs[name] = self._macs(name, module, inputs[0], output)
                self.made_by[id(output)] = (name, output)  # kept, so that the id stays its own
                return None if name in self.normed else self._masked(name, output)
            return None

        return hook

    def _masked(self, conv: str, output: Tensor) -> Tensor | None:
        if not self.masking or conv not in self.masks:
            return None
        return output * self.masks[conv][:, :, None, None]

    def _macs(self, name: str, module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
        """Channels that are not zero everywhere, times filters that are on, times taps and positions; (B,)."""
        groups = getattr(module, "groups", 1)
        read = (x != 0).flatten(2).any(2) if x.ndim > 2 else x != 0
        on = self.masks.get(name, torch.ones(output.shape[:2], dtype=torch.bool))
        pairs = read.unflatten(1, (groups, -1)).sum(2) * on.unflatten(1, (groups, -1)).sum(2)
        return pairs.sum(1) * prod(getattr(module, "kernel_size", ())) * prod(output.shape[2:])


def randomise(model: nn.Module, alive: bool) -> None:
    """Random norms and biases; with ``alive`` all weights are positive, so that no activation kills a channel."""
    generator = torch.Generator().manual_seed(2)
    for name, tensor in model.named_parameters():
        if alive:
            tensor.uniform_(0.5, 1.5, generator=generator).div_(tensor[0].numel())  # a conv then averages its input
        elif name.endswith("bias"):
            tensor.normal_(generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("alive", [True, False], ids=["alive", "some dead"])
@pytest.mark.parametrize("name", MASKED)
def test_masked_outputs_and_executed_macs_are_those_of_the_hooked_model(name: str, alive: bool) -> None:
    case = next(case for case in CASES if case.name == name)
    model, x = zoo.build(name, **case.options), images(2, case.size).abs()
    randomise(model, alive)
    gated = gate(model, FTWT(), input_shape=(3, case.size, case.size))
    masks = random_masks(gated, 2)
    masks[list(masks)[len(masks) // 2]][0] = False  # a sample for which a whole unit is off
    hooked = Masked(model, {unit.name: masks[unit.group] for unit in gated.units if unit.gated}, x)
    assert torch.isfinite(hooked.logits).all()
    assert not torch.equal(hooked.logits, model(x))
    assert torch.equal(run(gated, x, masks), hooked.logits)

    executed = {name: macs.tolist() for name, macs in gated.cost(masks).executed.items()}
    counted = {name: macs.tolist() for name, macs in hooked.macs.items()}
    if alive:
        assert executed == counted
    assert executed.keys() == counted.keys()
    assert all(ours >= seen for name in counted for ours, seen in zip(executed[name], counted[name], strict=True))

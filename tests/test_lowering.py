"""Laws of lowering: a program computes what PyTorch does, under the same masks, for the MACs that ``cost`` says."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import zoo
from nets import SHAPE, Net, bn, conv, fc, gated_net, images, random_masks
from small import digest, tiny_gated, tiny_plain
from test_graph import FrozenNorm, NormAct
from torch import Tensor, nn

import cofire
from cofire import FTWT, FileError, GatedModel, cost, create_backbone, gate, list_backbones
from cofire.backbones.vgg import VGG
from cofire.errors import CompileError
from cofire.runtime.interpreter import Trace, run, trace
from cofire.runtime.lowering import lower
from cofire.runtime.program import Activation, Add, Affine, Conv, Program, kind_of
from cofire.runtime.program_file import read, to_bytes, write

Shape = tuple[int, int, int]


def counts(program: Program) -> dict[str, int]:
    """Kind -> how many ops of it there are."""
    kinds = [kind_of(op) for op in program.ops]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


# The law


@torch.no_grad()
def check(model: nn.Module, shape: Shape, batch: int = 2) -> Program:
    """PyTorch's outputs, masks and MACs are the program's; in float64, lest a deep net blow up rounding errors."""
    program = lower(model, shape)
    x = images(batch, shape).double()
    expected = model.double()(x)
    masks = model.masks if isinstance(model, GatedModel) else {}
    model.float()
    done = trace(program, x, forced=masks)
    assert done.out.shape == expected.shape
    assert float((done.out - expected).abs().max()) <= 1e-4 * float(expected.std())
    check_masks(done, masks, program.threshold)
    check_macs(done, model, masks, shape)
    return program


def check_masks(done: Trace, masks: Mapping[str, Tensor], threshold: float) -> None:
    """Heads decide as in PyTorch; a logit so close to the threshold that rounding decides may go either way."""
    assert done.masks.keys() == masks.keys()
    for group, mask in masks.items():
        away = done.logits[group] - threshold
        close = away.abs() < 1e-4
        assert torch.equal((away > 0) | close, mask | close), group
        assert close.float().mean() < 0.1


def check_macs(done: Trace, model: nn.Module, masks: Mapping[str, Tensor], shape: Shape) -> None:
    if isinstance(model, GatedModel):
        counted = model.cost(masks, shape).executed
    else:
        counted = {
            name: macs.expand(len(done.out)) for name, macs in cost(cofire.trace(model, shape), {}).executed.items()
        }
    assert done.macs.keys() == counted.keys()
    for name, macs in counted.items():
        assert torch.equal(done.macs[name], macs), name


def in_place(program: Program) -> int:
    return sum(isinstance(op, Conv) and op.residual and op.dst == op.src[1] for op in program.ops)


@torch.no_grad()
def settled(model: nn.Module, shape: Shape) -> nn.Module:
    """Norms with statistics and weights that are not the identity and fit their inputs; in eval mode."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    generator = torch.Generator().manual_seed(5)
    for norm in norms:
        norm.momentum = 1.0
        norm.weight.uniform_(0.5, 1.5, generator=generator)
        norm.bias.normal_(0.0, 0.3, generator=generator)
    if norms:
        model.train()(images(4, shape))
    return model.eval()


@torch.no_grad()
def gated_as(model: nn.Module, shape: Shape, config: FTWT) -> GatedModel:
    """Behind heads whose decisions depend on the input."""
    gated = gate(model, config, input_shape=shape).eval()
    generator = torch.Generator().manual_seed(6)
    for one in gated.gates.values():
        linear = one.head.linear
        linear.weight.normal_(0.0, linear.in_features**0.5, generator=generator)
        if linear.bias is not None:
            linear.bias.normal_(0.2, 0.2, generator=generator)
    return gated


# Backbones

SMALL = (3, 32, 32)
PRESETS = {"default": FTWT(always=True), "paper": FTWT.preset("paper"), "official": FTWT.preset("official")}
EVERY_PRESET = ("resnet8_digits", "resnet20", "vgg11_bn", "mobilenet_v1", "mobilenet_v2")


def backbone(name: str, **options: Any) -> tuple[nn.Module, Shape]:
    """At no more than 32 x 32; a VGG for ImageNet with fewer than its 120 million weights between linear layers."""
    torch.manual_seed(3)
    with torch.device("meta"):
        model = create_backbone(name, num_classes=10, **options)
    shape = model.input_shape if model.input_shape[1] <= 32 else SMALL
    if isinstance(model, VGG) and isinstance(model.classifier, nn.Sequential):
        model.classifier = nn.Sequential(nn.Linear(512 * 49, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 10))
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()
    return settled(model, shape), shape


def cases() -> list[Any]:
    found = []
    for name in list_backbones():
        marks = [] if name in EVERY_PRESET else [pytest.mark.slow]
        found += [
            pytest.param(name, preset, marks=marks)
            for preset in ("plain", *PRESETS)
            if preset in ("plain", "default") or name in EVERY_PRESET
        ]
    return found


@pytest.mark.parametrize(("name", "preset"), cases())
def test_a_backbone_computes_what_pytorch_does(name: str, preset: str) -> None:
    model, shape = backbone(name)
    program = check(model if preset == "plain" else gated_as(model, shape, PRESETS[preset]), shape)
    assert set(counts(program)) <= {"conv", "pool", "move"}


@pytest.mark.parametrize("name", ["resnet20", "mobilenet_v2"])
def test_masks_on_the_activated_sum(name: str) -> None:
    model, shape = backbone(name)
    check(gated_as(model, shape, FTWT(site="post_add", linear=True, always=True)), shape)


def test_tensorflows_padding_is_folded_where_no_head_reads_it() -> None:
    model, shape = backbone("mobilenet_v1_imagenet", tensorflow=True, width=0.25)[0], (3, 64, 64)
    assert counts(check(model, shape)) == {"conv": 28, "pool": 1}
    grouped = check(gated_as(model, shape, FTWT(always=True)), shape)
    assert counts(grouped) == {"conv": 28, "pool": 1, "move": 1}  # the stem's
    separate = check(gated_as(model, shape, FTWT(always=True, depthwise="separate")), shape)
    assert counts(separate) == {"conv": 28, "pool": 1, "move": 5}


def test_resnet20_by_hand() -> None:
    model, shape = backbone("resnet20")
    for program in (check(model, shape), check(gated_as(model, shape, FTWT(always=True)), shape)):
        # 19 convs and the linear layer, 2 shortcuts that change the shape, the mean over the map
        assert counts(program) == {"conv": 20, "move": 2, "pool": 1}
        assert in_place(program) == 9
        assert len(program.buffers) == 1 + 20 + 2 + 1 - 9
        assert [op.act for op in program.ops if isinstance(op, Conv)] == ["relu"] * 19 + ["none"]
        assert (program.output_shape, program.buffers[program.output]) == ((10,), (10, 1, 1))


def test_of_two_convs_that_are_added_the_gated_one_adds_the_other() -> None:
    shape = (3, 64, 64)
    program = check(gated_as(backbone("resnet18")[0], shape, FTWT(always=True)), shape)
    adders = [op for op in program.ops if isinstance(op, Conv) and op.residual]
    assert [op.name.split(".")[-1] for op in adders] == ["conv2"] * 8
    assert in_place(program) == 8
    assert {group.name for group in program.groups} == {op.name for op in program.ops if op.gate}


def test_a_group_has_its_head_on_its_first_conv() -> None:
    model, shape = backbone("mobilenet_v2")
    program = check(gated_as(model, shape, FTWT(always=True)), shape)
    seen: list[int] = []
    for op in program.ops:
        if op.gate is not None:
            assert (op.gate.head is not None) == (op.gate.group not in seen)
            seen.append(op.gate.group)
    assert list(dict.fromkeys(seen)) == list(range(len(program.groups)))
    assert len(seen) > len(program.groups)  # depthwise convs follow


@pytest.mark.parametrize(
    "options", [{"softmax": False}, {"bias": False}, {"pool": "avg", "softmax": False, "bias": False}]
)
def test_every_option_of_a_head(options: dict[str, Any]) -> None:
    shape = (1, 8, 8)
    program = check(gated_as(settled(tiny_plain(), shape), shape, FTWT(always=True, **options)), shape, batch=4)
    (head, *_) = (op.gate.head for op in program.ops if op.gate is not None)
    assert head is not None
    assert (head.softmax, head.pool) == (options.get("softmax", True), options.get("pool", "max"))
    assert (head.bias is None) == ("bias" in options)


def test_the_batch_and_the_threshold_are_free() -> None:
    gated = tiny_gated(always=True).eval()
    gated.threshold = 0.1
    program = lower(gated)
    assert program.threshold == 0.1
    x = images(5, (1, 8, 8))
    for threshold in (0.1, -1e9, 1e9):
        gated.threshold = threshold
        with torch.no_grad():
            expected = gated(x)
        out, masks, macs = run(program, x, threshold)
        assert all(torch.equal(masks[group], mask) for group, mask in gated.masks.items())
        assert torch.allclose(out, expected, atol=1e-5)
        assert torch.equal(torch.stack(list(macs.values())).sum(0), gated.cost().total("executed"))


def test_the_interpreter_in_float64_is_a_reference() -> None:
    model, shape = backbone("resnet20")
    x = images(2, shape).double()
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x)
    out, _, _ = run(lower(model), x)
    assert out.dtype == torch.float64
    assert torch.allclose(out, expected, atol=1e-5 * float(expected.std()))


# The model


def test_the_model_is_left_alone_and_taken_in_eval_mode() -> None:
    model = tiny_plain().train()
    before, x = digest(model), images(2, (1, 8, 8))
    program = lower(model)
    assert digest(model) == before
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        expected = model.eval()(x)
        for weight in model.parameters():
            weight.zero_()
    assert torch.allclose(run(program, x)[0], expected, atol=1e-5)


def test_a_gated_model_is_compiled_at_another_input_shape() -> None:
    gated = tiny_gated(always=True).eval()
    assert check(gated, (1, 12, 20)).buffers[0] == (1, 12, 20)
    assert gated.graph.input_shape == (1, 8, 8)


# Other libraries' models

ZOO: dict[str, dict[str, int]] = {
    "torchvision/mobilenet_v3_small": {"conv": 54, "pool": 10, "mul": 9},
    "torchvision/shufflenet_v2_x0_5": {"conv": 57, "pool": 2, "cat": 16, "move": 29},
    "torchvision/googlenet": {"conv": 58, "pool": 14, "cat": 9},
    "torchvision/squeezenet1_1": {"conv": 26, "pool": 4, "cat": 8},
    "torchvision/efficientnet_b0": {"conv": 82, "pool": 17, "mul": 16},
    "torchvision/resnet18": {"conv": 21, "pool": 2},
    "torchvision/mnasnet0_5": {"conv": 53, "pool": 1},
    "timm/regnety_002": {"conv": 71, "pool": 14, "mul": 13},
    "timm/tf_mobilenetv3_small_minimal_100": {"conv": 36, "pool": 1},  # pads as TensorFlow does
    "timm/resnetv2_18": {"conv": 21, "pool": 2, "affine": 9},  # norms that hold their activation
}
DENSENET = {"growth_rate": 8, "block_config": (2, 3), "num_init_features": 16}


@pytest.mark.slow
@pytest.mark.skipif(bool(zoo.why_not), reason=zoo.why_not)
@pytest.mark.parametrize("name", ZOO)
def test_models_of_other_libraries(name: str) -> None:
    options = {"init_weights": False, "aux_logits": False} if name.endswith("googlenet") else {}
    shape = (3, 64, 64)
    model = settled(zoo.build(name, **options), shape)
    assert counts(check(model, shape)) == ZOO[name]
    check(gated_as(model, shape, FTWT(always=True)), shape)


@pytest.mark.skipif(bool(zoo.why_not), reason=zoo.why_not)
def test_a_densenet() -> None:
    import torchvision

    shape = (3, 64, 64)
    model = settled(torchvision.models.DenseNet(**DENSENET), shape)
    # norms come after a concatenation: one in each layer, in the transition and at the end
    assert counts(check(model, shape)) == {"conv": 1 + 2 * 5 + 1 + 1, "pool": 3, "cat": 5, "affine": 5 + 1 + 1}
    check(gated_as(model, shape, FTWT(always=True)), shape)


# One small net for each rule


class Case(NamedTuple):
    """``plain`` and ``gated``: the ops by kind; None: as plain."""

    forward: Callable[[Any, Tensor], Tensor]
    plain: dict[str, int]
    modules: Mapping[str, nn.Module] = MappingProxyType({})
    gated: dict[str, int] | None = None


def ops(**kinds: int) -> dict[str, int]:
    """Beside the pooling and the linear layer that every net ends in, and its convs."""
    return kinds


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    both = x.chunk(2, 1)
    return both[0], both[1]


def shuffled(x: Tensor, groups: int = 2) -> Tensor:
    batch, channels, height, width = x.shape
    return x.view(batch, groups, channels // groups, height, width).transpose(1, 2).reshape(batch, -1, height, width)


def pre_activation(m: Any, x: Tensor) -> Tensor:
    x = m.one(x)
    return F.relu(m.bn2(x + m.two(F.relu(m.bn(x)))))


def written_over(m: Any, x: Tensor) -> Tensor:
    y = m.bn(m.one(x))
    F.relu_(y)
    return y


def excited(m: Any, x: Tensor) -> Tensor:
    y = F.relu(m.one(x))
    return y * torch.sigmoid(m.excite(y.mean((2, 3), keepdim=True)))


TWO = {"two": conv(8, 8)}
NORM = {"bn": bn(8)}
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu method": lambda x: x.relu(),
    "relu in place": F.relu_,
    "clamp": lambda x: x.clamp(min=0),
    "relu6": F.relu6,
    "clamp to 6": lambda x: torch.clamp(x, 0, 6),
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "sigmoid method": lambda x: x.sigmoid(),
    "hardsigmoid": F.hardsigmoid,
}
MODULES = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.Hardsigmoid, nn.PReLU)
POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: F.max_pool2d(x, 2),
    "max in ceil mode": lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "max with dilation": lambda x: F.max_pool2d(x, (2, 3), 1, (0, 1), dilation=2),
    "mean": lambda x: F.avg_pool2d(x, 2),
    "mean with padding": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "mean without padding's zeros": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "mean in ceil mode": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "mean in ceil mode without zeros": lambda x: F.avg_pool2d(x, (2, 3), (3, 2), (1, 0), True, False),
    "adaptive mean": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
    "adaptive maximum to more": lambda x: F.adaptive_max_pool2d(x, (9, 3)),
    "amax": lambda x: x.amax((2, 3), keepdim=True),
}

CASES: dict[str, Case] = {
    "pre-activation": Case(pre_activation, ops(affine=2), TWO | NORM | {"bn2": bn(8)}),
    "conv, act, norm": Case(lambda m, x: m.bn(F.relu(m.one(x))), ops(affine=1), NORM),
    "norm twice": Case(lambda m, x: F.relu(m.bn2(m.bn(m.one(x)))), ops(), NORM | {"bn2": bn(8)}),
    "frozen norm": Case(lambda m, x: F.relu(m.bn(m.one(x))), ops(), {"bn": FrozenNorm(8)}),
    "norm with activation": Case(lambda m, x: m.bn(m.one(x)), ops(), {"bn": NormAct(8)}),
    "norm of a sum": Case(lambda m, x: m.bn(m.one(x) + m.two(m.one(x))), ops(affine=1), TWO | NORM),
    "numbers": Case(lambda m, x: F.relu(m.one(x)) * 0.5 + 3, ops(affine=1)),
    "numbers, other way round": Case(lambda m, x: 3 - 2 * F.relu(m.one(x)) / 4, ops(affine=1)),
    "numbers on a conv": Case(lambda m, x: F.relu(m.one(x) * 0.5 + 3), ops(), gated=ops(affine=1)),
    "twice itself": Case(lambda m, x: (lambda y: y + y)(F.relu(m.one(x))), ops(affine=1)),
    "parameter per channel": Case(lambda m, x: F.relu(m.one(x)) * m.one.bias[:, None, None], ops(affine=1)),
    "scale before a conv": Case(lambda m, x: F.relu(m.two(F.relu(m.one(x)) * 2)), ops(), TWO, ops(affine=1)),
    "norm before a conv": Case(
        lambda m, x: F.relu(m.two(m.bn(F.relu(m.one(x))))), ops(), {"two": conv(8, 8, 1)} | NORM, ops(affine=1)
    ),
    "norm before a conv with padding": Case(
        lambda m, x: F.relu(m.two(m.bn(F.relu(m.one(x))))), ops(affine=1), TWO | NORM
    ),
    "swish written out": Case(lambda m, x: (lambda y: y * torch.sigmoid(y))(m.one(x)), ops(act=1, mul=1)),
    "in place, result unused": Case(written_over, ops(), NORM),
    "dropout between": Case(lambda m, x: F.relu(m.bn(m.drop(m.one(x)))), ops(), NORM | {"drop": nn.Dropout(0.5)}),
    "two convs added": Case(lambda m, x: F.relu(m.one(x) + m.other(x)), ops(), {"other": conv(3, 8)}),
    "in place addition": Case(
        lambda m, x: F.relu(m.two(F.relu(m.one(x))).add_(m.other(x))), ops(), TWO | {"other": conv(3, 8, 1)}
    ),
    "difference": Case(lambda m, x: F.relu(m.one(x) - m.other(x)), ops(), {"other": conv(3, 8)}, None),
    "addition with alpha": Case(
        lambda m, x: torch.add(F.relu(m.one(x)), F.relu(m.other(x)), alpha=0.5),
        ops(affine=1, add=1),
        {"other": conv(3, 8)},
    ),
    "activation before the addition": Case(
        lambda m, x: (lambda y: y + F.relu(m.two(y)))(F.relu(m.one(x))), ops(add=1), TWO
    ),
    "sigmoid of a sum": Case(lambda m, x: (lambda y: torch.sigmoid(y + m.two(y)))(F.relu(m.one(x))), ops(act=1), TWO),
    "sum of three": Case(
        lambda m, x: (lambda y: F.relu(y + m.two(y) + m.three(y)))(F.relu(m.one(x))), ops(), TWO | {"three": conv(8, 8)}
    ),
    "sum with one value per channel": Case(
        lambda m, x: (lambda y: F.relu(y.mean((2, 3), keepdim=True) + m.two(y)))(F.relu(m.one(x))),
        ops(pool=1, add=1),
        TWO,
    ),
    "squeeze and excite": Case(excited, ops(pool=1, mul=1), {"excite": conv(8, 8, 1)}),
    "spatial attention": Case(
        lambda m, x: (lambda y: torch.sigmoid(m.where(y)) * y)(F.relu(m.one(x))),
        ops(move=1, mul=1),
        {"where": conv(8, 1)},
    ),
    "one number per image": Case(
        lambda m, x: (lambda y: y * torch.sigmoid(m.where(y.mean((2, 3), True))))(F.relu(m.one(x))),
        ops(pool=1, move=1, mul=1),
        {"where": conv(8, 1, 1)},
    ),
    "channel shuffle": Case(lambda m, x: F.relu(m.two(shuffled(F.relu(m.one(x))))), ops(move=1), TWO),
    "halves, one of them further": Case(
        lambda m, x: (lambda a, b: torch.cat([a, F.relu(m.two(b))], 1))(*halves(F.relu(m.one(x)))),
        ops(move=2, cat=1),
        {"two": conv(4, 8), "fc": fc(12)},
    ),
    "concatenation": Case(
        lambda m, x: F.relu(m.two(torch.cat([F.relu(m.one(x)), x, F.relu(m.other(x))], 1))),
        ops(cat=1),
        {"other": conv(3, 8), "two": conv(19, 8)},
    ),
    "option A": Case(
        lambda m, x: F.relu(m.down(F.relu(m.one(x))) + F.pad(F.relu(m.one(x))[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))),
        ops(move=1),
        {"down": conv(8, 16, stride=2), "fc": fc(16)},
    ),
    "asymmetric padding": Case(
        lambda m, x: F.relu(m.two(F.pad(F.relu(m.one(x)), (0, 1, 2, 0)))),
        ops(),
        {"two": nn.Conv2d(8, 8, 3, stride=2)},
        ops(move=1),
    ),
    "cropping": Case(lambda m, x: F.relu(m.two(F.relu(m.one(x))[:, :, 1:-2, 2:])), ops(move=1), TWO),
    "padding before a pooling": Case(
        lambda m, x: F.max_pool2d(m.pad(-F.relu(m.one(x))), 3), ops(affine=1, move=1, pool=1), {"pad": nn.ZeroPad2d(1)}
    ),
    "even kernel, same": Case(
        lambda m, x: F.relu(m.two(F.relu(m.one(x)))),
        ops(),
        {"two": nn.Conv2d(8, 8, (4, 2), padding="same", dilation=(1, 3))},
    ),
    "stride, dilation, groups": Case(
        lambda m, x: F.relu(m.two(F.relu(m.one(x)))),
        ops(),
        {"two": nn.Conv2d(8, 8, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(2, 1), groups=4, bias=False)},
    ),
    "one module twice": Case(lambda m, x: F.relu(m.two(F.relu(m.two(F.relu(m.one(x)))))), ops(), TWO),
    "functions": Case(lambda m, x: F.relu(F.conv2d(F.relu(m.one(x)), m.two.weight, stride=2, padding=1)), ops(), TWO),
    **{f"act {name}": Case(lambda m, x, act=act: act(m.bn(m.one(x))), ops(), NORM) for name, act in ACTS.items()},
    **{
        f"module {kind.__name__}": Case(lambda m, x: m.act(m.bn(m.one(x))), ops(), NORM | {"act": kind()})
        for kind in MODULES
    },
    **{
        f"pool {name}": Case(lambda m, x, pool=pool: pool(F.relu(m.one(x))), ops(pool=1))
        for name, pool in POOLS.items()
    },
}


def net_of(case: Case) -> Net:
    modules = {"one": conv(3, 8), "fc": fc(8), **{name: copy.deepcopy(module) for name, module in case.modules.items()}}
    return Net(lambda m, x: m.logits(case.forward(m, x)), **modules).eval()


def without_convs(program: Program) -> dict[str, int]:
    found = {kind: count for kind, count in counts(program).items() if kind != "conv"}
    found["pool"] -= 1  # the last one
    return {kind: count for kind, count in found.items() if count}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", CASES)
def test_a_small_net_computes_what_pytorch_does(name: str) -> None:
    case, shape = CASES[name], (3, 9, 8)
    net = net_of(case)
    assert without_convs(check(net, shape)) == case.plain
    for site in ("pre_add", "post_add"):
        gated = gated_net(net, shape, linear=True, site=site)
        program = check(gated, shape)
        masks = random_masks(gated, 3)
        with torch.no_grad(), gated.force(masks):
            expected = gated(images(3, shape))
        done = trace(program, images(3, shape), forced=masks)
        assert torch.allclose(done.out, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
        check_macs(done, gated, masks, shape)
        if site == "pre_add":
            assert without_convs(program) == (case.plain if case.gated is None else case.gated)


def ends(forward: Callable[[Any, Tensor], Tensor], **modules: nn.Module) -> Program:
    return check(Net(forward, one=conv(3, 8), **modules).eval(), SHAPE)


def test_a_linear_layer_reads_a_flattened_map_in_any_order() -> None:
    for forward in (
        lambda m, x: m.fc(F.relu(m.one(x)).flatten(1)),
        lambda m, x: m.fc(F.relu(m.one(x)).view(x.size(0), -1)),
        lambda m, x: m.fc(F.relu(m.one(x)).permute(0, 2, 3, 1).flatten(1)),
        lambda m, x: m.fc(torch.dropout(F.relu(m.one(x)).flatten(1), 0.5, False)),
    ):
        program = ends(forward, fc=fc(8 * 64))
        assert counts(program) == {"conv": 2}
        assert program.ops[-1].kernel == (8, 8)  # type: ignore[attr-defined]


def test_what_else_reads_a_flattened_map_has_it_flattened_but_for_activations() -> None:
    assert counts(ends(lambda m, x: m.fc(torch.sigmoid(m.one(x).flatten(1))), fc=fc(512))) == dict(conv=2)
    assert counts(ends(lambda m, x: m.one(x).flatten(1))) == dict(conv=1, flatten=1)
    part = ends(lambda m, x: m.fc(m.one(x).flatten(1)[:, 10:30]), fc=fc(20))
    assert counts(part) == dict(conv=2, flatten=1, move=1)


def test_a_vector_has_norms_and_activations_too() -> None:
    program = ends(
        lambda m, x: m.last(F.relu(m.bn(m.fc(m.one(x).mean((2, 3)))))), fc=fc(8, 6), bn=nn.BatchNorm1d(6), last=fc(6)
    )
    assert counts(program) == dict(conv=3, pool=1)


def test_a_map_may_be_the_output() -> None:
    program = ends(lambda m, x: F.relu(m.one(x)))
    assert (program.output_shape, counts(program)) == ((8, 8, 8), {"conv": 1})


class SameConv(nn.Conv2d):
    """Pads as TensorFlow does, in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = (max((-(-n // 2) - 1) * 2 + 5 - n, 0) for n in x.shape[2:])  # kernel 5, stride 2
        return super().forward(F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2)))


@pytest.mark.parametrize("side", [1, 2, 5, 8])
def test_a_conv_that_pads_by_itself_may_have_a_kernel_larger_than_its_map(side: int) -> None:
    net = Net(lambda m, x: m.logits(m.same(m.one(x))), one=conv(3, 8), same=SameConv(8, 8, 5, stride=2), fc=fc(8))
    assert counts(check(net.eval(), (3, side, side))) == dict(conv=3, pool=1)


def test_names_are_those_of_the_cost_table_and_the_calls() -> None:
    net = Net(
        lambda m, x: m.logits(torch.sigmoid(m.add(m.add(m.one(x)) + m.one(x)).sigmoid() * m.one(x))),
        one=conv(3, 8),
        add=conv(8, 8),
        fc=fc(8),
    ).eval()
    names = [op.name for op in check(net, SHAPE).ops]
    assert len(set(names)) == len(names)
    assert {"one", "one#2", "one#3", "add", "add#2", "fc"} <= set(names)


def test_a_residual_that_is_read_again_is_not_written_over() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.one(x))
        return m.logits(F.relu(m.three(F.relu(m.two(y) + y)) + y))

    modules = {"one": conv(3, 8), "two": conv(8, 8), "three": conv(8, 8), "fc": fc(8)}
    program = check(Net(forward, **modules).eval(), SHAPE)
    two, three = (op for op in program.ops if isinstance(op, Conv) and op.residual)
    # `two` also reads it as its input, and `three` after that
    assert two.dst not in two.src
    assert three.dst == three.src[1]


def test_the_input_and_a_convs_own_source_are_not_written_over() -> None:
    own = Net(lambda m, x: m.logits(m.two(F.relu(m.one(x) + x))), one=conv(3, 3), two=conv(3, 8), fc=fc(8)).eval()
    program = check(own, SHAPE)
    assert in_place(program) == 0
    assert program.ops[0].src == (program.input, program.input)


def test_a_mask_ends_a_unit_before_what_makes_something_of_zero() -> None:
    """The norm's shift, or a sigmoid behind the unit's end, must not be switched off with the filter."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.one(x)
        return m.logits(torch.sigmoid(y) + m.bn(y))

    gated = gated_net(Net(forward, one=conv(3, 8), bn=bn(8), fc=fc(8)), linear=True)
    program = check(gated, SHAPE)
    kinds = [type(op) for op in program.ops]
    assert kinds[:4] == [Conv, Activation, Affine, Add]
    assert [op.gate is not None for op in program.ops[:4]] == [True, False, False, False]
    assert program.ops[2].lift  # type: ignore[attr-defined]


def test_a_gate_whose_filters_are_all_off_works() -> None:
    gated = tiny_gated(always=True).eval()
    x, program = images(2, (1, 8, 8)), lower(gated)
    off = {group: torch.zeros(2, units[-1].out_channels) for group, units in gated.units.groups.items()}
    with torch.no_grad(), gated.force(off):
        expected = gated(x)
    done = trace(program, x, forced=off)
    assert torch.allclose(done.out, expected, atol=1e-6)
    assert sum(int(macs.sum()) for name, macs in done.macs.items() if name != "linear") == 0


# What cannot be compiled


class OddConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def view_written(m: Any, x: Tensor) -> Tensor:
    y = m.one(x)
    half = y[:, :4]
    F.relu_(half)
    return y


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], dict[str, nn.Module], str]] = {
    "activation": (lambda m, x: m.one(x).exp(), {}, r"'exp' \(exp in the model's own forward\).*it is no activation"),
    "module": (lambda m, x: m.act(m.one(x)), {"act": nn.Softsign()}, r"'act' \(Softsign in module 'act'\)"),
    "norm without statistics": (
        lambda m, x: m.norm(m.one(x)),
        {"norm": nn.BatchNorm2d(8, track_running_stats=False)},
        "it is no scale and shift per channel, group, layer or RMS norm",
    ),
    "odd conv": (lambda m, x: m.two(m.one(x)), {"two": OddConv(8, 8, 3)}, "a forward of its own"),
    "three dimensions": (
        lambda m, x: m.two(m.one(x)[:, :, None]),
        {"two": nn.Conv3d(8, 8, 1)},
        "one or two dimensions",
    ),
    "sorting": (lambda m, x: m.two(m.one(x).sort(1)[0]), {"two": conv(8, 8)}, "there is no such op"),
    "its input": (lambda m, x: (m.one(x), x), {}, "must not return its input"),
    "samples mixed": (
        lambda m, x: m.two(m.one(x).flip(0)),
        {"two": conv(8, 8)},
        "must keep the images of a batch apart",
    ),
    "view in place": (view_written, {}, "in place, it changes 'one' too"),
    "softmax over images": (lambda m, x: m.one(x).softmax(0), {}, "a dim that is not the batch, got 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_does_not_have_is_named(name: str) -> None:
    forward, modules, message = REFUSED[name]
    net = Net(forward, one=conv(3, 8), **copy.deepcopy(modules)).eval()
    with pytest.raises(CompileError, match=message) as error:
        lower(net, SHAPE)
    text = str(error.value)
    assert "cannot be compiled" in text
    assert "\nSupported: convs" in text


def test_a_threshold_must_be_finite() -> None:
    gated = tiny_gated(always=True)
    gated.threshold = float("inf")
    with pytest.raises(CompileError, match="the threshold must be finite, got inf"):
        lower(gated)


def test_a_mask_behind_squeeze_and_excite_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        y = m.two(F.relu(m.one(x)))
        return m.logits(F.relu(y * torch.sigmoid(m.excite(y.mean((2, 3), keepdim=True))) + x))

    net = Net(forward, stem=conv(3, 8), one=conv(8, 8), two=conv(8, 8), excite=conv(8, 8, 1), fc=fc(8))
    check(gated_net(net), SHAPE)
    with pytest.raises(CompileError, match=r"unit 'two': its mask must come before 'excite', .* site='pre_add'"):
        lower(gated_net(net, site="post_add"))


# Files


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Program]:
    program = lower(tiny_gated(always=True).eval())
    return write(program, tmp_path / "tiny.cofire"), program


def test_a_program_comes_back_as_it_was(written: tuple[Path, Program]) -> None:
    path, program = written
    again = read(path)
    assert to_bytes(again) == to_bytes(program) == path.read_bytes()
    x = images(2, (1, 8, 8))
    assert torch.equal(run(again, x)[0], run(program, x)[0])
    assert (again.groups, again.threshold, again.buffers) == (program.groups, program.threshold, program.buffers)


def test_every_kind_of_op_comes_back_as_it_was(tmp_path: Path) -> None:
    for name in (
        "halves, one of them further",
        "squeeze and excite",
        "pre-activation",
        "act leaky",
        "sigmoid of a sum",
    ):
        program = lower(gated_net(net_of(CASES[name]), linear=True))
        path = write(program, tmp_path / "net.cofire")
        assert to_bytes(read(path)) == to_bytes(program)


def test_a_program_file_is_a_safetensors_file(written: tuple[Path, Program]) -> None:
    from safetensors import safe_open

    path, _ = written
    with safe_open(path, "pt") as file:
        assert list(file.metadata()) == ["cofire.program"]
        table = json.loads(file.metadata()["cofire.program"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    named = [name for op in table["ops"] for name in op["weights"]]
    named += [
        op["gate"]["head"][part]
        for op in table["ops"]
        if op["gate"] and op["gate"]["head"]
        for part in ("weight", "bias")
    ]
    assert sorted(named) == sorted(tensors)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert len(path.read_bytes()) % 4 == 0


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the table of a program file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    table = json.loads(header["__metadata__"]["cofire.program"])
    change(table)
    header["__metadata__"]["cofire.program"] = json.dumps(table)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "newer": (lambda t: t.update(version=4), "file has version 4, this cofire reads 1 to 3"),
    "digest": (lambda t: t.update(sha256="0" * 64), "the file is damaged"),
    "no digest": (lambda t: t.pop("sha256"), 'lacks the key "sha256"'),
    "unknown key": (lambda t: t.update(extra=1), 'unknown key "extra"'),
    "missing key": (lambda t: t.pop("groups"), 'lacks the key "groups"'),
    "unknown kind": (lambda t: t["ops"][0].update(kind="exec"), "kind must be one of conv"),
    "unknown attr": (lambda t: t["ops"][0]["attrs"].update(size=1), "unknown key"),
    "missing attr": (lambda t: t["ops"][0]["attrs"].pop("act"), 'attrs lacks the key "act"'),
    "missing tensor": (
        lambda t: t["ops"][0].update(weights=["0.weight", "none"]),
        'tensor "none" must be in the file',
    ),
    "unused tensors": (lambda t: t["ops"].pop(), "must be written by an op"),
    "wrong type": (lambda t: t.update(input="0"), "input must be an integer from 0 to"),
    "wrong activation": (lambda t: t["ops"][0]["attrs"].update(act="exp"), "act must be one of none relu"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_refused(name: str, written: tuple[Path, Program]) -> None:
    path, _ = written
    change, message = CHANGES[name]
    rewritten(path, change)
    with pytest.raises(FileError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


def test_a_truncated_damaged_or_foreign_file_is_refused(written: tuple[Path, Program], tmp_path: Path) -> None:
    path, _ = written
    content = path.read_bytes()
    for size in (0, 4, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(FileError, match=r"truncated|not a program"):
            read(path)
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(FileError, match="the file is damaged"):
        read(path)
    cofire.save(tiny_plain(), tmp_path / "model")
    with pytest.raises(FileError, match="is not a program"):
        read(tmp_path / "model" / "model.safetensors")
    with pytest.raises(FileError, match="cannot be read"):
        read(tmp_path / "none.cofire")


def test_no_change_of_a_byte_goes_unnoticed(written: tuple[Path, Program]) -> None:
    path, program = written
    content = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    end = 8 + int.from_bytes(content[:8], "little")
    for place in [*torch.randint(0, end, (150,), generator=generator).tolist(), end, end + 1, len(content) - 1]:
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        try:
            found = read(path)
        except FileError:
            continue
        # Only what a header means can change without contradiction, such as a name.
        assert place < end
        assert len(found.ops) == len(program.ops)


def test_ops_of_one_call_are_numbered() -> None:
    """Hundreds of ops that one call needs had as many underscores in their names."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.fc(F.hardtanh(m.one(x), -1.0, 3.0).mean((2, 3)))

    names = [op.name for op in lower(Net(forward, one=conv(3, 4), fc=fc(4)).eval(), SHAPE).ops]
    assert [name for name in names if "hardtanh" in name][-1].startswith("hardtanh#")
    assert not any(name.endswith("_") for name in names)

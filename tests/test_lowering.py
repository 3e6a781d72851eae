"""Laws of lowering: a program computes what PyTorch does, under the same masks, for the MACs that ``cost`` says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from lowered import (
    PRESETS,
    backbone,
    cases,
    check,
    counts,
    gated_as,
    in_place,
    settled,
)
from nets import SHAPE, Net, conv, fc, gated_net, images
from small import digest, tiny_gated, tiny_plain
from torch import Tensor, nn

from cofire import FTWT
from cofire.errors import CompileError
from cofire.runtime.interpreter import run
from cofire.runtime.lowering import lower
from cofire.runtime.program import Conv


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


def test_ops_of_one_call_are_numbered() -> None:
    """Hundreds of ops that one call needs had as many underscores in their names."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.fc(F.hardtanh(m.one(x), -1.0, 3.0).mean((2, 3)))

    names = [op.name for op in lower(Net(forward, one=conv(3, 4), fc=fc(4)).eval(), SHAPE).ops]
    assert [name for name in names if "hardtanh" in name][-1].startswith("hardtanh#")
    assert not any(name.endswith("_") for name in names)

"""The laws of lowering as checks, and networks in states that they can see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from nets import images
from torch import Tensor, nn

import cofire
from cofire import FTWT, GatedModel, cost, create_backbone, gate, list_backbones
from cofire.backbones.vgg import VGG
from cofire.runtime.interpreter import Trace, trace
from cofire.runtime.lowering import lower
from cofire.runtime.program import Conv, Program, kind_of

Shape = tuple[int, int, int]


def counts(program: Program) -> dict[str, int]:
    """Kind -> how many ops of it there are."""
    kinds = [kind_of(op) for op in program.ops]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


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

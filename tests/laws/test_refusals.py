"""A model that a method cannot handle: it says which unit and why, and leaves the model as it was.

For every registered method, dynamic and static, and models that are awkward in one way each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import outside_method
import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, conv, fc, images
from small import digest
from torch import Tensor, nn

from cofire import CofireError, gate, prune
from cofire.gates.base import gate_types
from cofire.pruning import prune_types

DYNAMIC = sorted(gate_types())
STATIC = sorted({config.__name__ for config in prune_types().values()})
assert outside_method.Outside.__name__ in DYNAMIC


def twice() -> Net:
    return Net(lambda m, x: m.logits(F.relu(m.picked(F.relu(m.picked(x))))), picked=conv(3, 3), fc=fc(3))


def functional() -> Net:
    return Net(lambda m, x: m.logits(F.relu(F.conv2d(x, m.picked.weight, padding=1))), picked=conv(3, 8), fc=fc(8))


def one_pixel() -> Net:
    return Net(lambda m, x: m.fc(F.relu(m.picked(x)).flatten(1)), picked=nn.Conv2d(3, 8, SHAPE[1:]), fc=fc(8))


def classifier() -> Net:
    return Net(lambda m, x: m.picked(x).mean((2, 3)), picked=conv(3, 8))


def group_norm() -> Net:
    return Net(lambda m, x: m.logits(F.relu(m.norm(m.picked(x)))), picked=conv(3, 8), norm=nn.GroupNorm(2, 8), fc=fc(8))


def circular() -> Net:
    options: Any = {"padding_mode": "circular"}
    layers = {"picked": conv(3, 8, **options), "two": conv(8, 8, **options)}
    return Net(lambda m, x: m.logits(F.relu(m.two(F.relu(m.picked(x))))), **layers, fc=fc(8))


def weight_norm() -> Net:
    net = Net(lambda m, x: m.logits(F.relu(m.picked(x))), picked=conv(3, 8), fc=fc(8))
    nn.utils.parametrizations.weight_norm(net.picked)
    return net


NOBODY = {"twice": twice, "functional": functional, "one pixel": one_pixel, "classifier": classifier}
SOME = {"group norm": group_norm, "circular": circular, "weight norm": weight_norm}
MODELS = NOBODY | SOME


def state(model: nn.Module) -> Any:
    """Everything that a method could have changed: weights, modules, hooks, modes, what learns, gradients."""
    modules = [
        (name, id(module), type(module), module.training, list(module._forward_hooks), list(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]
    learning = [(name, id(p), p.requires_grad, p.grad is None) for name, p in model.named_parameters()]
    return digest(model), modules, learning


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(images(10, seed=seed), torch.arange(10) % 5) for seed in range(2)]


def refusal(call: Callable[[], nn.Module]) -> str | None:
    """What the error says, or None if there is none and the result runs."""
    try:
        made = call()
    except CofireError as error:
        return str(error)
    made(images(2))
    return None


def check(net: nn.Module, model: str, call: Callable[[], nn.Module]) -> None:
    before = state(net)
    found = refusal(call)
    assert state(net) == before
    if found is None or "within one point" in found:  # a budget is no matter of units
        assert model in SOME
    else:
        assert ("conv2d" if model == "functional" else "picked") in found
        assert len(found.split()) > 8  # a reason, not a name alone


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", DYNAMIC)
def test_a_dynamic_method_names_the_unit_and_leaves_the_model(method: str, model: str) -> None:
    net = MODELS[model]()
    check(net, model, lambda: gate(net, gate_types()[method](), input_shape=SHAPE))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", STATIC)
def test_a_static_method_names_the_unit_and_leaves_the_model(method: str, model: str) -> None:
    net, config = MODELS[model](), prune_types()[method](macs=0.6)
    check(net, model, lambda: prune(net, config, batches(), input_shape=SHAPE))


@pytest.mark.parametrize("method", STATIC)
def test_a_static_method_that_lacks_labels_says_so_and_leaves_the_model(method: str) -> None:
    net, config = group_norm(), prune_types()[method](macs=0.6)
    before = state(net)
    found = refusal(lambda: prune(net, config, [(x, None) for x, _ in batches()], input_shape=SHAPE))
    assert state(net) == before
    assert found is None or "labelled images" in found or "picked" in found

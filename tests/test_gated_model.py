"""The model around the gates: its modes, keys, names and copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import (
    HALF,
    SHAPE,
    Net,
    chain,
    conv,
    depthwise_net,
    fc,
    gated_net,
    images,
    live_inputs,
    random_masks,
    randomise,
    residual_net,
    run,
)
from torch import Tensor, nn

from cofire import FTWT, ConfigError, create_backbone, gate, trace


@pytest.mark.parametrize("nested", [False, True])
def test_dropout_as_a_function_stays_on_in_training_and_off_in_eval(nested: bool) -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, training=self.training)

    net = chain(lambda m, x: m.drops(x) if nested else F.dropout(x, p=0.5, training=m.training), drops=Drops())
    x = images()
    for before in (net.train(), net.eval()):
        gated = gate(before, FTWT(always=True), input_shape=SHAPE)
        gated.train()
        assert not torch.equal(run(gated, x, "open"), run(gated, x, "open"))
        gated.eval()
        assert torch.equal(run(gated, x, "open"), run(gated, x, "open"))


def test_dropout_that_is_always_on_stays_always_on() -> None:
    gated, x = gated_net(chain(lambda m, x: F.dropout(x, 0.5, True))), images()
    assert not torch.equal(run(gated, x, "open"), run(gated, x, "open"))


def test_arguments_of_forward_with_a_default_are_fixed_to_it() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.fc = conv(3, 8), fc(8)

        def forward(
            self, x: Tensor, scale: Tensor | None = None, factor: float = 3.0, *, features: bool = False
        ) -> Tensor:
            y = F.relu(self.one(x)) * factor
            if scale is not None:
                y = y * scale
            return y if features else self.fc(y.mean((2, 3)))

    net, x = Optional().eval(), images()
    gated = gated_net(net)
    assert torch.equal(run(gated, x, "open"), net(x))


def test_gating_keeps_every_key_and_value_and_leaves_the_model_alone() -> None:
    net = residual_net().train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    gated = gate(net, FTWT(always=True), input_shape=SHAPE)
    after = gated.state_dict()
    assert [key for key in after if not key.startswith("gates.")] == list(before)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
    assert all(module.training for module in net.modules())
    gated.one.weight.data.zero_()
    assert net.one.weight.any()


def test_the_plain_model_inside_shares_its_weights() -> None:
    gated = gated_net(residual_net())
    assert gated.backbone.one.weight is gated.one.weight


def test_parameters_and_constants_of_the_model_itself_stay() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.fc = conv(3, 8), fc(8)
            self.scale = nn.Parameter(torch.full((1, 8, 1, 1), 2.0))
            self.register_buffer("shift", torch.full((1, 8, 1, 1), 3.0))
            self.register_buffer("hidden", torch.full((1, 8, 1, 1), 5.0), persistent=False)
            self.constant = torch.full((1, 8, 1, 1), 7.0)

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.one(x)) * self.scale * self.hidden
            return self.fc((y * self.constant + self.shift).mean((2, 3)))

    net, x = Scaled().eval(), images()
    gated = gated_net(net)
    assert {key for key in gated.state_dict() if not key.startswith("gates.")} == set(net.state_dict())
    assert torch.equal(run(gated, x, "open"), net(x))
    assert live_inputs(gated, "fc", {"one": HALF}) == [8]  # adding the shift lifts
    assert gated.scale is gated.backbone.scale


def test_a_submodule_named_gates_is_refused() -> None:
    with pytest.raises(ConfigError, match="submodule named 'gates'"):
        gated_net(Net(lambda m, x: m.logits(F.relu(m.gates(x))), gates=conv(3, 8), fc=fc(8)))


@pytest.mark.parametrize("name", ["backbone", "graph", "config", "code", "units", "masks", "cost"])
def test_a_submodule_may_have_the_name_of_something_a_gated_model_has(name: str) -> None:
    net = Net(lambda m, x: m.logits(F.relu(m.get_submodule(name)(x))), **{name: conv(3, 8)}, fc=fc(8))
    gated, x = gated_net(net), images()
    assert set(net.state_dict()) <= set(gated.state_dict())
    assert torch.equal(run(gated, x, "open"), net(x))


@pytest.mark.parametrize("name", ["key", "values", "items"])
def test_a_conv_may_have_any_name(name: str) -> None:
    net = Net(lambda m, x: m.logits(F.relu(m.get_submodule(name)(x))), **{name: conv(3, 8)}, fc=fc(8))
    gated, x = gated_net(net), images()
    assert torch.equal(run(gated, x, "open"), net(x))


def test_both_names_of_a_shared_module_stay_in_the_state_dict() -> None:
    shared = conv(3, 8)
    net = Net(lambda m, x: m.logits(F.relu(m.one(x))), one=shared, same=shared, fc=fc(8))
    assert set(net.state_dict()) <= set(gated_net(net).state_dict())


def test_a_norm_that_was_frozen_in_eval_mode_stays_so() -> None:
    net = residual_net().train()
    net.bn1.eval()
    gated = gate(net, FTWT(always=True), input_shape=SHAPE)
    assert not gated.bn1.training
    assert gated.bn2.training


def duplicates() -> dict[str, Callable[[Any], Any]]:
    return {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("how", duplicates())
def test_a_duplicate_computes_the_same_from_weights_of_its_own(how: str) -> None:
    backbone = create_backbone("resnet8_digits").eval()
    randomise(backbone)
    gated = gate(backbone, FTWT(mode="joint"), filter_fn=lambda unit: unit.name != "conv1")
    gated.threshold = 0.1
    x = images(shape=(1, 8, 8))
    twin = duplicates()[how](gated)
    assert torch.equal(twin(x), gated(x))
    assert (twin.threshold, twin.config, list(twin.gates)) == (0.1, gated.config, list(gated.gates))
    twin.conv1.weight.data.zero_()
    assert gated.conv1.weight.any()
    assert twin.backbone.conv1.weight is twin.conv1.weight


@pytest.mark.parametrize("how", duplicates())
def test_a_duplicate_is_in_the_same_mode_everywhere(how: str) -> None:
    gated = gate(create_backbone("resnet8_digits").train(), FTWT()).eval()
    twin = duplicates()[how](gated)
    assert not any(module.training for module in twin.modules())


def test_units_print_as_a_table_with_names_macs_and_reasons() -> None:
    text = str(gated_net(depthwise_net()).units)
    assert "3 of 3 units gated" in text
    assert "of wide" in text
    text = str(gated_net(residual_net(activated=False)).units)
    assert "2 of 3 units gated" in text
    for word in ("stem", "one", "two", f"{3 * 8 * 9 * 64:,}", f"{8 * 8 * 9 * 64:,}", "8 -> 8", "3x3", "8x8", "own"):
        assert word in text
    assert "no activation" in text


def test_tracing_takes_the_default_shape_of_a_backbone_or_a_guess() -> None:
    assert trace(create_backbone("resnet8_digits")).input_shape == (1, 8, 8)
    net = Net(lambda m, x: m.logits(F.relu(m.one(x))), one=nn.Conv2d(2, 4, 3, stride=8), fc=fc(4))
    assert trace(net).input_shape == (2, 224, 224)


def test_masks_of_a_batch_are_applied_per_sample() -> None:
    net = residual_net()
    gated, x = gated_net(net), images(4)
    masks = random_masks(gated, 4)
    together = run(gated, x, masks)
    for i in range(4):
        alone = run(gated, x[i : i + 1], {group: mask[i] for group, mask in masks.items()})
        torch.testing.assert_close(alone, together[i : i + 1], rtol=1e-5, atol=1e-5)

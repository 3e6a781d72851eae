"""Laws that hold for every registered backbone behind gates; a new one is tested the day it is registered."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import cofire
from cofire import FTWT, Backbone, GatedModel

BATCH = 2


class Case(NamedTuple):
    plain: Backbone
    gated: GatedModel
    x: Tensor


def random_backbone(name: str) -> Backbone:
    """With random weights and norm statistics that keep the signal's size, filled without the default first."""
    with torch.device("meta"):
        model = cofire.create_backbone(name)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                bound = math.sqrt(6 / module.weight[0].numel())
                some = module.weight[:64].uniform_(-bound, bound, generator=generator)
                for rows in module.weight[64:].split(64):  # repeated, because 100 million random numbers take long
                    rows.copy_(some[: len(rows)].flip(1))
                if module.bias is not None:
                    module.bias.uniform_(-0.5, 0.5, generator=generator)
            elif isinstance(module, nn.BatchNorm2d):
                for tensor in (module.weight, module.running_var):
                    tensor.uniform_(0.5, 1.5, generator=generator)
                for tensor in (module.bias, module.running_mean):
                    tensor.uniform_(-0.5, 0.5, generator=generator)
                module.num_batches_tracked.zero_()
    return model.eval()


def backbones() -> list[Any]:
    """Every name; networks with a hundred million weights are left out by ``make quick``."""
    heavy = [name for name in cofire.list_backbones("vgg*_imagenet") if name != "vgg11_bn_imagenet"]
    return [pytest.param(name, marks=pytest.mark.slow if name in heavy else ()) for name in cofire.list_backbones()]


@pytest.fixture(scope="module", params=backbones())
def case(request: pytest.FixtureRequest) -> Case:
    plain = random_backbone(request.param)
    side = min(plain.input_shape[1], 32 if request.param.startswith("vgg") else 64)  # small, to be quick
    shape = (plain.input_shape[0], side, side)
    torch.manual_seed(0)
    gated = cofire.gate(plain, FTWT(), input_shape=shape)
    return Case(plain, gated, torch.randn(BATCH, *shape))


def random_masks(gated: GatedModel, keep: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    widths = {group: units[-1].out_channels for group, units in gated.units.groups.items()}
    return {group: torch.rand(BATCH, width, generator=generator) < keep for group, width in widths.items()}


@torch.no_grad()
def with_masked_norms(model: nn.Module, x: Tensor, masks: dict[str, Tensor]) -> Tensor:
    """The plain model's logits with hooks that multiply a conv's output (its norm's, if one runs next) by a mask.

    After that come only activations that leave zero at zero, so this equals a mask behind the activation.
    """
    order: list[nn.Module] = []
    leaves = [
        module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.ReLU6))
    ]
    hooks = [leaf.register_forward_pre_hook(lambda module, _: order.append(module)) for leaf in leaves]
    model(x)
    for hook in hooks:
        hook.remove()
    hooks = []
    for name, mask in masks.items():
        place = order.index(model.get_submodule(name))
        after = order[place + 1] if place + 1 < len(order) else None
        site = after if isinstance(after, nn.BatchNorm2d) else order[place]
        factor = mask.float()[:, :, None, None]
        hooks.append(site.register_forward_hook(lambda _, args, y, factor=factor: y * factor))
    logits = model(x)
    for hook in hooks:
        hook.remove()
    return logits


def test_with_all_gates_open_it_is_the_plain_model_bit_by_bit_and_saves_exactly_nothing(case: Case) -> None:
    plain, gated, x = case
    with torch.no_grad(), gated.force("open"):
        assert torch.equal(gated(x), plain(x))
    for column in ("paper", "executed"):
        assert gated.cost().reduction(column).tolist() == [0.0] * BATCH
    ones = {group: torch.ones(units[-1].out_channels) for group, units in gated.units.groups.items()}
    with torch.no_grad(), gated.force(ones):
        assert torch.equal(gated(x), plain(x))


def test_dense_macs_are_those_that_torch_counts(case: Case) -> None:
    plain, gated, x = case
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        plain(x[:1])
    assert 2 * gated.cost({}).dense_total == counter.get_total_flops()


def test_the_backbones_keys_and_values_are_in_the_state_dict(case: Case) -> None:
    plain, gated, _ = case
    own, all_of_it = plain.state_dict(), gated.state_dict()
    assert [key for key in all_of_it if not key.startswith("gates.")] == list(own)
    assert all(torch.equal(all_of_it[key], tensor) for key, tensor in own.items())


def test_random_masks_give_what_the_plain_model_gives_with_hooks(case: Case) -> None:
    plain, gated, x = case
    masks = random_masks(gated, 0.6, seed=1)
    by_conv = {unit.name: masks[unit.group] for unit in gated.units if unit.gated}
    with torch.no_grad(), gated.force(masks):
        found = gated(x)
    assert found.isfinite().all()
    assert torch.equal(found, with_masked_norms(plain, x, by_conv))
    assert not torch.equal(found, plain(x))


def test_filters_that_are_off_are_exactly_zero_and_the_others_untouched(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, gated, x = case
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    masked = gated.switchboard.masked

    def recording(group: str, y: Tensor, decision: Any) -> Tensor:
        before = y.clone()
        result = masked(group, y, decision)
        seen[group] = (before, result.clone())
        return result

    monkeypatch.setattr(gated.switchboard, "masked", recording)
    masks = random_masks(gated, 0.5, seed=2)
    with torch.no_grad(), gated.force(masks):
        gated(x)
    assert seen.keys() == masks.keys()
    for group, (before, after) in seen.items():
        on = masks[group]
        assert not after[~on].any()
        assert torch.equal(after[on], before[on])


def test_a_mask_that_lets_more_through_never_costs_less(case: Case) -> None:
    gated = case.gated
    few = random_masks(gated, 0.4, seed=3)
    extra = random_masks(gated, 0.3, seed=4)
    low = gated.cost(few)
    high = gated.cost({group: mask | extra[group] for group, mask in few.items()})
    assert all((low.executed[name] <= high.executed[name]).all() for name in low.dense)
    assert (low.total("executed") < high.total("executed")).all()
    assert (high.total("executed") < high.dense_total).all()


def test_the_order_of_a_batch_does_not_matter(case: Case) -> None:
    _, gated, x = case
    with torch.no_grad():
        logits, macs = gated(x), gated.cost().total("executed")
        masks = gated.masks
        swapped, macs_swapped = gated(x.flip(0)), gated.cost().total("executed")
    torch.testing.assert_close(swapped.flip(0), logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(macs_swapped.flip(0), macs)
    assert all(torch.equal(gated.masks[group].flip(0), mask) for group, mask in masks.items())
    assert any(mask.any() and not mask.all() for mask in masks.values())


def test_switching_every_filter_off_works(case: Case) -> None:
    _, gated, x = case
    nothing = {group: torch.zeros(units[-1].out_channels) for group, units in gated.units.groups.items()}
    with torch.no_grad(), gated.force(nothing):
        logits = gated(x)
    assert logits.isfinite().all()
    executed = gated.cost().executed
    assert all(executed[unit.name].tolist() == [0] * BATCH for unit in gated.units if unit.gated)

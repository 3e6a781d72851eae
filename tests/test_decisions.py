"""Collected decisions are what the gates decided, in bits, whatever the batches were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from nets import gated_net, images, inverted_net, random_masks, randomise
from small import tiny_gated, tiny_images, tiny_plain

from cofire import ConfigError, DataError, evaluate
from cofire.analysis import collect


def test_masks_are_those_of_the_model_s_own_forward() -> None:
    gated, some = tiny_gated(ratio=0.8), tiny_images(20)
    found = collect(gated, some.loader(7))
    with torch.no_grad():
        logits = gated.eval()(some.normalise(some.pixels_NCHW))
    assert found.groups == tuple(gated.gates)
    for group, mask in gated.masks.items():
        assert found.mask(group).dtype == np.bool_
        assert np.array_equal(found.mask(group), mask.numpy())
        assert found.keep_rate(group) == pytest.approx(mask.double().mean(0).numpy())
    assert found.predicted_N.tolist() == logits.argmax(1).tolist()
    assert found.macs_N.tolist() == gated.cost().total("executed").tolist()
    assert found.dense_macs == gated.cost().dense_total
    assert some.label_N is not None
    assert found.label_N is not None
    assert found.label_N.tolist() == some.label_N.tolist()


def test_a_byte_holds_eight_filters_and_the_last_one_the_rest() -> None:
    net = inverted_net()
    randomise(net)
    gated, x = gated_net(net), images(5)
    masks = random_masks(gated, 5)
    with gated.force(masks):
        found = collect(gated, [x])
    widths = {group: mask.shape[1] for group, mask in masks.items()}
    assert {9, 4, 7} <= set(widths.values())
    assert found.filters == widths
    assert found.label_N is None
    for group, mask in masks.items():
        assert found.bits[group].dtype == np.uint8
        assert found.bits[group].shape == (5, -(-widths[group] // 8))
        assert np.array_equal(found.mask(group), mask.numpy())


def test_targets_come_on_demand_and_agree_with_the_report() -> None:
    gated, loader = tiny_gated(ratio=0.8), tiny_images(20).loader(6)
    report = evaluate(gated, loader)
    found = collect(gated, loader, targets=True)
    for group in found.groups:
        agreed = (found.mask(group) == found.target(group)).mean()
        assert agreed == pytest.approx(report.mask_accuracy[group])
    assert 1 - found.macs_N.mean() / found.dense_macs == pytest.approx(report.reduction["executed"])


def test_forced_targets_are_their_own_masks() -> None:
    gated = tiny_gated(ratio=0.8)
    with gated.force("targets"):
        found = collect(gated, tiny_images(10).loader(10), targets=True)
    assert all(np.array_equal(found.bits[group], found.target_bits[group]) for group in found.groups)
    assert any(not found.mask(group).all() for group in found.groups)


def test_asking_for_what_was_not_collected_says_what_to_do() -> None:
    found = collect(tiny_gated(), tiny_images(4).loader(4))
    with pytest.raises(ConfigError, match="collect them with targets=True"):
        found.target(found.groups[0])
    with pytest.raises(ConfigError, match="unknown group 'conv2'; did you mean 'conv1'"):
        found.mask("conv2")


@pytest.mark.parametrize(
    ("loader", "error"),
    [
        ([], "the loader gave no batch"),
        ([torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 16, 16)], "images of one size"),
        ([(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])), torch.zeros(2, 1, 8, 8)], "all with labels or all without"),
    ],
)
def test_a_loader_that_does_not_fit_gets_an_error_that_says_so(loader: Any, error: str) -> None:
    with pytest.raises(DataError, match=error):
        collect(tiny_gated(), loader)


def test_a_plain_model_takes_no_decisions() -> None:
    with pytest.raises(ConfigError, match="needs a gated model, got"):
        collect(tiny_plain(), tiny_images(4).loader(4))

"""What a bench is made of: figures by hand, fair order, masks of the right cost, the paper's way of slicing."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from nets import images, random_masks
from small import tiny_gated
from torch import Tensor

from cofire import FTWT, create_backbone, gate
from cofire.bench import random_plan
from cofire.bench.masks import pool_for_keep, pool_for_macs
from cofire.bench.rounds import Contestant, interleaved, pinned, ratio_by_round, ratio_of_medians, rotated, spread
from cofire.bench.sliced import Sliced
from cofire.errors import ConfigError
from cofire.gates.base import LinearHead

# Rounds and figures


def test_a_round_begins_one_contestant_later_than_the_one_before() -> None:
    calls: list[str] = []
    contestants = {name: Contestant(lambda name=name: calls.append(name)) for name in "abc"}
    interleaved(contestants, rounds=3, warm_up=1)
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"


def test_rotation_goes_around() -> None:
    assert rotated("abc", 4) == ["b", "c", "a"]
    assert rotated([], 4) == []


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux pins processes to cores")
def test_a_pinned_process_stays_on_one_core_and_is_let_go() -> None:
    before = os.sched_getaffinity(0)
    with pinned(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_only_the_call_is_timed_and_warm_up_is_not_kept() -> None:
    ticks = iter(range(0, 100_000, 5))
    entered: list[int] = []

    def setting(n: int) -> nullcontext[None]:
        entered.append(n)
        next(ticks)  # time that passes before the call
        return nullcontext()

    seconds = interleaved({"a": Contestant(lambda: None, setting)}, 2, 3, clock=lambda: next(ticks))
    assert seconds == {"a": [5e-9, 5e-9]}
    assert entered == [0, 1, 2, 3, 4]


def test_rounds_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="rounds must be at least 1, got 0"):
        interleaved({}, 0, 0)


def test_medians_and_tenths_by_hand() -> None:
    found = spread([float(value) for value in range(11)])
    assert (found.median, found.p10, found.p90) == (5.0, 1.0, 9.0)
    assert vars(spread([3.0])) == {"median": 3.0, "p10": 3.0, "p90": 3.0}


def test_ratios_by_hand() -> None:
    ours, theirs = [1.0, 2.0, 9.0], [4.0, 4.0, 3.0]
    assert ratio_of_medians(ours, theirs) == 0.5
    assert ratio_by_round(ours, theirs).median == 0.5
    assert ratio_by_round(ours, theirs).p90 == pytest.approx(0.5 + 0.8 * 2.5)


# Masks


@pytest.mark.parametrize("name", ["resnet20", "vgg16_bn", "mobilenet_v1"])
def test_macs_are_met_within_half_a_point(name: str) -> None:
    gated = gate(create_backbone(name), FTWT())
    for macs in (0.25, 0.48, 0.74, 1.0):
        pool = pool_for_macs(gated, macs)
        assert abs(pool.macs - macs) < 0.005
        remaining = 1 - gated.cost(pool.masks).reduction("executed").mean()
        assert pool.macs == pytest.approx(float(remaining))


def test_masks_keep_the_same_number_of_filters_in_every_set_and_differ() -> None:
    gated = tiny_gated()
    pool = pool_for_keep(gated, 0.6, sets=5)
    for group, mask in pool.masks.items():
        kept = mask.sum(1)
        assert kept.unique().numel() == 1
        assert abs(int(kept[0]) - 0.6 * mask.shape[1]) <= 1, group
    assert len({tuple(mask[n].tolist()) for n in range(5) for mask in [pool.masks["layer3.0.conv1"]]}) > 1
    assert pool.number(7).keys() == pool.masks.keys()
    assert torch.equal(pool.number(7)["conv1"][0], pool.masks["conv1"][2])


def test_at_least_one_filter_is_kept() -> None:
    assert all(bool((mask.sum(1) == 1).all()) for mask in pool_for_keep(tiny_gated(), 1e-6).masks.values())


def test_masks_are_a_function_of_the_seed() -> None:
    one, same, other = (pool_for_keep(tiny_gated(), 0.5, seed=seed).masks["conv1"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_cost_that_cannot_be_reached_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"macs must be at least 0\.\d+, the share with one filter left.*got 0.0001"):
        pool_for_macs(tiny_gated(), 0.0001)
    with pytest.raises(ConfigError, match=r"macs, the share that REMAINS, must be in \(0, 1\], got 1.5"):
        pool_for_macs(tiny_gated(), 1.5)
    with pytest.raises(ConfigError, match=r"keep must be in \(0, 1\], got 0"):
        pool_for_keep(tiny_gated(), 0.0)


# The paper's way


@torch.no_grad()
@pytest.mark.parametrize("name", ["vgg11_bn", "mobilenet_v2", "resnet8_digits"])
@pytest.mark.parametrize("options", [{}, {"pool": "avg", "depthwise": "separate"}])
def test_sliced_weights_give_the_logits_of_the_gated_model(name: str, options: Any) -> None:
    plan = random_plan(name)
    gated = gate(plan.gated.backbone, FTWT(**options)).eval()
    sliced, x = Sliced(gated), images(1, gated.graph.input_shape)
    for seed in range(2):
        masks = random_masks(gated, 1, keep=0.4, seed=seed)
        with gated.force(masks), sliced.force(masks):
            torch.testing.assert_close(sliced(x), gated(x), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(sliced(x), gated(x), rtol=1e-3, atol=1e-4)  # gates decide


@torch.no_grad()
def test_sliced_weights_of_filters_that_are_off_do_not_matter() -> None:
    plain = create_backbone("resnet8_digits").eval()
    gated = gate(plain, FTWT()).eval()
    masks = random_masks(gated, 1)
    sliced = Sliced(gated)
    expected = Sliced(gated)
    with torch.no_grad():
        weight = dict(sliced._run.named_parameters())["layer1.0.conv1.weight"]
        weight[~masks["layer1.0.conv1"][0]] = float("nan")
    with sliced.force(masks), expected.force(masks):
        assert torch.equal(sliced(images(1, (1, 8, 8))), expected(images(1, (1, 8, 8))))


def test_heads_run_also_where_masks_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = tiny_gated().eval()
    sliced = Sliced(gated)
    asked: list[str] = []
    groups = {id(head): group for group, head in sliced._heads.items()}
    chosen = LinearHead.chosen

    def asking(head: LinearHead, *given: Any) -> Tensor:
        asked.append(groups[id(head)])
        return chosen(head, *given)

    monkeypatch.setattr(LinearHead, "chosen", asking)
    with sliced.force(random_masks(gated, 1)):
        sliced(images(1, (1, 8, 8)))
    assert asked == list(gated.gates)


@torch.no_grad()
def test_groups_that_are_the_same_for_every_image_are_sliced_too() -> None:
    gated = tiny_gated(fixed={"layer1.0.conv1": (0, 2, 3)}).eval()
    x = images(1, gated.graph.input_shape)
    torch.testing.assert_close(Sliced(gated)(x), gated(x), rtol=1e-3, atol=1e-4)


def test_slicing_takes_one_image_and_masks_before_the_addition() -> None:
    with pytest.raises(ConfigError, match="one image at a time, got a batch of 2"):
        Sliced(tiny_gated())(images(2, (1, 8, 8)))
    with pytest.raises(ConfigError, match=r"unit 'layer1.0.conv2': .* mask behind an addition"):
        Sliced(tiny_gated(site="post_add"))

"""Masks with a kind: what each costs, by brute force; expected MACs at probabilities 0 and 1 and in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, conv, fc, option_a_net

import cofire
from cofire import BlockDrop, BlockMask, ConfigError, FilterMask, PixelMask, create_backbone, gate, trace
from cofire.graph.placement import place, place_pixels
from cofire.graph.units import Placement


def random(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


def pixel_graph(partial: int = 0, **options: Any) -> Any:
    net = Net(
        lambda m, x: m.logits(F.relu(m.two(F.relu(m.one(x))))), one=conv(3, 8), two=conv(8, 6, **options), fc=fc(6)
    )
    at: Any = "conv" if partial else "end"
    return place_pixels(
        trace(net, SHAPE), Placement(linear=True), None, lambda units: 0, at=at, partial=lambda unit: partial
    )


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("maps", [1, 6])
def test_pixels_cost_their_open_positions_times_live_inputs(maps: int, groups: int) -> None:
    graph = pixel_graph(groups=groups)
    mask = random((2, maps, 8, 8))
    found = cofire.cost(graph, {"two": PixelMask(mask)}, heads={"two": 0}).executed["two"]
    by_hand = [0, 0]
    for b in range(2):
        for o in range(6):
            for h in range(8):
                for w in range(8):
                    by_hand[b] += 9 * (8 // groups) * int(mask[b, o % maps, h, w])
    assert found.tolist() == by_hand


def test_a_filter_that_is_closed_everywhere_is_dead_for_its_readers() -> None:
    graph = pixel_graph()
    mask = random((2, 8, 8, 8))
    mask[0, :3] = False
    cost = cofire.cost(graph, {"one": PixelMask(mask)}, heads={"one": 0})
    assert cost.executed["two"].tolist() == [9 * 64 * 5 * 6, 9 * 64 * 8 * 6]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("maps", [1, 6])
def test_partial_sums_are_paid_for_at_every_position_and_the_rest_at_open_ones(maps: int, groups: int) -> None:
    graph = pixel_graph(partial=3, groups=groups)
    mask = random((2, maps, 8, 8))
    found = cofire.cost(graph, {"two": PixelMask(mask)}, heads={"two": 0}).executed["two"]
    by_hand = [0, 0]
    for b in range(2):
        for o in range(6):
            for h in range(8):
                for w in range(8):
                    by_hand[b] += 9 * (8 // groups if mask[b, o % maps, h, w] else 3)
    assert found.tolist() == by_hand
    expected = cofire.expected_macs(graph, {"two": mask.double()})
    assert expected.tolist() == cofire.cost(graph, {"two": mask}).total("executed").tolist()


def test_partial_sums_keep_a_closed_filter_alive() -> None:
    graph = pixel_graph(partial=1)
    cost = cofire.cost(graph, {"one": torch.zeros(2, 8, 8, 8)}, heads={"one": 0})
    assert cost.executed["one"].tolist() == [9 * 64 * 1 * 8] * 2
    assert cost.executed["two"].tolist() == [9 * 64 * 8 * 6] * 2


def test_keep_rate_and_empty_of_each_kind() -> None:
    filters = FilterMask(torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0] * 4]))
    pixels = PixelMask(torch.tensor([[[[True, False], [False, False]]], [[[False] * 2] * 2]]))
    block = BlockMask(torch.tensor([1, 0]))
    assert [mask.keep_rate.tolist() for mask in (filters, pixels, block)] == [[0.75, 0.0], [0.25, 0.0], [1.0, 0.0]]
    assert all(mask.empty.tolist() == [False, True] for mask in (filters, pixels, block))


@pytest.mark.parametrize("kind", ["filters", "pixels", "block"])
def test_expected_macs_at_0_and_1_are_the_executed_ones(kind: str) -> None:
    if kind == "block":
        graph = gate(option_a_net(), BlockDrop(), input_shape=SHAPE).graph
        shapes: dict[str, tuple[int, ...]] = {site.name: (4,) for site in graph.sites}
    else:
        traced = trace(option_a_net(), SHAPE)
        graph = place(traced, Placement(always=True)) if kind == "filters" else pixel_graph()
        size = (lambda s: (4, s.filters)) if kind == "filters" else (lambda s: (4, s.filters, 8, 8))
        shapes = {site.name: size(site) for site in graph.sites}
    masks = {name: random(shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    found = cofire.expected_macs(graph, {name: mask.double() for name, mask in masks.items()})
    heads = dict.fromkeys(masks, 0)
    assert found.tolist() == cofire.cost(graph, masks, heads=heads).total("executed").tolist()


def test_expected_macs_are_the_mean_over_independent_masks() -> None:
    graph = place(trace(option_a_net(), SHAPE), Placement(always=True))
    shares = {site.name: torch.full((1, site.filters), 0.7, dtype=torch.float64) for site in graph.sites}
    generator = torch.Generator().manual_seed(0)
    masks = {site.name: torch.rand((20_000, site.filters), generator=generator) < 0.7 for site in graph.sites}
    drawn = cofire.cost(graph, masks).total("executed").double()
    expected = float(cofire.expected_macs(graph, shares))
    assert expected == pytest.approx(float(drawn.mean()), abs=4 * float(drawn.std()) / 20_000**0.5)


def test_expected_macs_have_a_gradient() -> None:
    graph = place(trace(create_backbone("resnet8_digits"), (1, 8, 8)), Placement())
    shares = {site.name: torch.full((2, site.filters), 0.5, requires_grad=True) for site in graph.sites}
    cofire.expected_macs(graph, shares).sum().backward()
    assert all(share.grad is not None and (share.grad > 0).all() for share in shares.values())


def test_a_mask_of_another_kind_is_refused() -> None:
    graph = pixel_graph()
    with pytest.raises(ConfigError, match="site 'one' takes masks of pixels, got one of filters"):
        cofire.cost(graph, {"one": FilterMask(torch.ones(2, 8))}, heads={"one": 0})
    with pytest.raises(ConfigError, match=r"mask must have shape \(B, 1, 8, 8\) or \(B, 8, 8, 8\)"):
        cofire.cost(graph, {"one": torch.ones(2, 8)}, heads={"one": 0})

"""Which convs are left open, and why; what cannot be gated is said in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import (
    HALF,
    NONE,
    SHAPE,
    Forward,
    Net,
    chain,
    conv,
    depthwise_net,
    fc,
    gated_net,
    images,
    live_inputs,
    run,
)
from torch import Tensor, nn

from cofire import FTWT, NoUnitError, TraceError, gate, trace

# Squeeze-and-excite, classifiers, repeated and foreign modules


def test_convs_on_1x1_maps_are_not_gated() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = F.relu(m.one(x))
        return m.logits(y * torch.sigmoid(m.up(F.relu(m.down(F.adaptive_avg_pool2d(y, 1))))))

    gated = gated_net(Net(forward, one=conv(3, 8), down=conv(8, 2, 1), up=conv(2, 8, 1), fc=fc(8)))
    units = {unit.name: unit for unit in gated.units}
    assert list(gated.gates) == ["one"]
    assert "1x1 map" in units["down"].reason
    assert "1x1 map" in units["up"].reason
    assert live_inputs(gated, "down", {"one": HALF}) == [4]
    assert live_inputs(gated, "fc", {"one": HALF}) == [4]


@pytest.mark.parametrize(
    "classify",
    [
        lambda m, x: m.cls(x).mean((2, 3)),
        lambda m, x: torch.flatten(m.pool(F.relu(m.cls(x))), 1),
    ],
)
def test_a_conv_that_makes_the_classes_is_not_gated(classify: Forward) -> None:
    net = Net(lambda m, x: classify(m, F.relu(m.one(x))), one=conv(3, 8), cls=conv(8, 5), pool=nn.AdaptiveAvgPool2d(1))
    units = {unit.name: unit for unit in gated_net(net, linear=True).units}
    assert units["one"].gated
    assert not units["cls"].gated
    assert "classifier" in units["cls"].reason


def test_a_conv_that_is_called_twice_is_not_gated() -> None:
    net = Net(
        lambda m, x: m.logits(F.relu(m.twice(F.relu(m.twice(F.relu(m.one(x))))))),
        one=conv(3, 8),
        twice=conv(8, 8),
        fc=fc(8),
    )
    gated, x = gated_net(net), images()
    assert list(gated.gates) == ["one"]
    assert [unit.gated for unit in gated.units] == [True, False, False]
    assert all("more than once" in unit.reason for unit in gated.units[1:])
    assert len({unit.name for unit in gated.units}) == 3
    cost = gated.cost({"one": HALF})
    assert cost.dense_total == (3 * 8 + 8 * 8 + 8 * 8) * 9 * 64 + 8 * 5
    assert torch.equal(run(gated, x, "open"), net(x))


def test_a_transposed_conv_is_counted_but_not_gated() -> None:
    net = Net(
        lambda m, x: m.logits(F.relu(m.up(F.relu(m.one(x))))),
        one=conv(3, 8),
        up=nn.ConvTranspose2d(8, 8, 2, stride=2),
        fc=fc(8),
    )
    gated = gated_net(net)
    assert list(gated.gates) == ["one"]
    assert "ConvTranspose2d" in gated.units[1].reason
    assert gated.cost({}).dense["up"] == 8 * 8 * 4 * 64  # each input pixel meets every tap
    assert live_inputs(gated, "up", {"one": HALF}) == [4]


def test_a_conv_called_as_a_function_is_counted_but_not_gated() -> None:
    net = Net(
        lambda m, x: m.logits(F.relu(F.conv2d(F.relu(m.one(x)), m.two.weight))),
        one=conv(3, 8),
        two=conv(8, 8),
        fc=fc(8),
    )
    gated = gated_net(net)
    assert list(gated.gates) == ["one"]
    function = next(unit for unit in gated.units if unit.name != "one")
    assert "not an nn.Conv2d module" in function.reason
    assert function.macs == 8 * 8 * 9 * 36
    cost = gated.cost({"one": HALF})
    assert cost.executed[function.name].tolist() == [function.macs // 2]


def test_behind_an_unknown_call_every_channel_is_live_and_the_call_is_listed() -> None:
    net = chain(lambda m, x: torch.cumsum(x, 3))
    gated, x = gated_net(net), images()
    assert [op.what for op in gated.graph.opaque] == ["cumsum"]
    assert live_inputs(gated, "last", {"first": NONE}) == [8]
    assert torch.equal(run(gated, x, "open"), net(x))


@pytest.mark.parametrize(("pixels", "gated"), [(2, False), (4, True)])
def test_a_unit_whose_head_costs_as_much_as_the_unit_is_left_open(pixels: int, gated: bool) -> None:
    net = Net(
        lambda m, x: m.logits(F.relu(m.small(F.max_pool2d(F.relu(m.one(x)), (8, 8 // pixels))))),
        one=conv(3, 8),
        small=conv(8, 8, 1, groups=2),
        fc=fc(8),
    )
    # 8 x 4 MACs per pixel against a head of 8 x 8: it pays from three pixels on
    small = {unit.name: unit for unit in gated_net(net, always=False).units}["small"]
    assert (small.out_size, small.macs) == ((1, pixels), 32 * pixels)
    assert small.gated is gated
    assert ("head would cost" in small.reason) is not gated
    assert {unit.name: unit for unit in gated_net(net, always=True).units}["small"].gated


# What cannot be gated is said in words


def test_the_part_that_can_be_traced_can_be_gated_alone() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(conv(3, 8), nn.ReLU(), conv(8, 8), nn.ReLU(), conv(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.features(x)
            return y.mean((2, 3)) if y.sum() > 0 else y.amax((2, 3))

    whole, x = Whole().eval(), images()
    expected = whole(x)
    whole.features = gate(whole.features, FTWT(always=True), input_shape=SHAPE)
    with whole.features.force("open"):
        assert torch.equal(whole(x), expected)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 2, 2)])
def test_an_input_shape_the_model_does_not_run_on_is_a_trace_error(shape: tuple[int, int, int]) -> None:
    net = Net(lambda m, x: m.fc(torch.flatten(F.relu(m.one(x)), 1)), one=conv(3, 8), fc=fc(8 * 64))
    with pytest.raises(TraceError, match=r"does not run on images of shape .*[\s\S]*input_shape=\(C, H, W\)"):
        gated_net(net, shape)


def test_a_model_that_does_not_run_at_a_size_is_not_blamed_on_tracing() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.one(x)
        if y.shape[2] != 8:
            raise ValueError("eight rows are needed")
        return m.logits(F.relu(y))

    net = Net(forward, one=conv(3, 8), fc=fc(8)).train()
    with pytest.raises(TraceError, match=r"does not run on images of shape \(3, 6, 6\): eight rows are needed") as told:
        trace(net, (3, 6, 6))
    assert net.training
    assert "Ways out" not in str(told.value)


def test_what_torch_fx_adds_to_an_error_is_left_out() -> None:
    net = Net(lambda m, x: m.fc(torch.flatten(F.relu(m.one(x)), 1)), one=conv(3, 8), fc=fc(8 * 64))
    with pytest.raises(TraceError, match="mat1 and mat2 shapes cannot be multiplied") as told:
        trace(net, (3, 4, 4))
    assert len(str(told.value).splitlines()) == 2


@pytest.mark.parametrize("shape", [(3, 8), (3, 0, 8), (0, 8, 8)])
def test_an_input_shape_that_is_no_image_is_a_trace_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(TraceError, match=r"input_shape must be \(C, H, W\) with positive sizes, got"):
        trace(chain(lambda m, x: x), shape)


def test_two_inputs_are_a_trace_error() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    with pytest.raises(TraceError, match="must take one image batch, got 2 inputs: x, y"):
        trace(Two(), SHAPE)


def test_a_model_without_conv_has_no_unit() -> None:
    with pytest.raises(NoUnitError, match="the model has no conv"):
        gated_net(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)))


def test_a_filter_that_refuses_everything_leaves_no_unit() -> None:
    with pytest.raises(NoUnitError, match="filter_fn refused it: first, last"):
        gated_net(chain(lambda m, x: x), filter_fn=lambda unit: False)


def test_the_filter_sees_only_units_that_could_be_gated_and_decides_for_whole_groups() -> None:
    asked: list[str] = []

    def refuse_depth(unit: Any) -> bool:
        asked.append(unit.name)
        return unit.name != "depth"

    gated = gated_net(depthwise_net(), filter_fn=refuse_depth)
    assert asked == ["wide", "depth", "point"]
    assert list(gated.gates) == ["point"]
    units = {unit.name: unit for unit in gated.units}
    assert units["wide"].reason == units["depth"].reason == "filter_fn refused it"

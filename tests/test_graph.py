"""What a unit is, which units are gated and why not others, and how live channels flow: one small net per rule."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, bn, conv, fc, gated_net, images, live_inputs, random_masks, randomise, run
from torch import Tensor, nn

from cofire import FTWT, ConfigError, NoUnitError, TraceError, create_backbone, gate, trace

HALF = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0]], dtype=torch.bool)
NONE = torch.zeros(1, 8, dtype=torch.bool)


class FrozenNorm(nn.Module):
    """Norm with a batch norm's tensors as buffers, as in detection libraries."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean"):
            self.register_buffer(name, torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[None, :, None, None] + shift[None, :, None, None]


class NormAct(nn.BatchNorm2d):
    """Batch norm that applies an activation of its own, as timm's does."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


# Unit end

Forward = Callable[[Any, Tensor], Tensor]
ENDS: dict[str, tuple[dict[str, nn.Module], Forward]] = {
    "conv, relu": ({}, lambda m, x: F.relu(m.conv(x))),
    "norm, relu": ({"bn": bn(8)}, lambda m, x: F.relu(m.bn(m.conv(x)))),
    "module": ({"bn": bn(8), "act": nn.ReLU()}, lambda m, x: m.act(m.bn(m.conv(x)))),
    "module in place": ({"bn": bn(8), "act": nn.ReLU(inplace=True)}, lambda m, x: m.act(m.bn(m.conv(x)))),
    "method": ({"bn": bn(8)}, lambda m, x: m.bn(m.conv(x)).relu()),
    "method in place": ({"bn": bn(8)}, lambda m, x: m.bn(m.conv(x)).relu_()),
    "function in place": ({"bn": bn(8)}, lambda m, x: F.relu_(m.bn(m.conv(x)))),
    "torch function": ({"bn": bn(8)}, lambda m, x: torch.relu(m.bn(m.conv(x)))),
    "gelu": ({"bn": bn(8)}, lambda m, x: F.gelu(m.bn(m.conv(x)))),
    "hardswish": ({"act": nn.Hardswish()}, lambda m, x: m.act(m.conv(x))),
    "clamp": ({}, lambda m, x: m.conv(x).clamp(0, 6)),
    "prelu": ({"act": nn.PReLU(8)}, lambda m, x: m.act(m.conv(x))),
    "sigmoid": ({"bn": bn(8)}, lambda m, x: torch.sigmoid(m.bn(m.conv(x)))),
    "frozen norm": ({"bn": FrozenNorm(8)}, lambda m, x: F.relu(m.bn(m.conv(x)))),
    "group norm, a channel each": ({"bn": nn.GroupNorm(8, 8)}, lambda m, x: F.relu(m.bn(m.conv(x)))),
    "instance norm": ({"bn": nn.InstanceNorm2d(8, affine=True)}, lambda m, x: F.relu(m.bn(m.conv(x)))),
    "norm with activation": ({"bn": NormAct(8)}, lambda m, x: m.bn(m.conv(x))),
    "swish written out": ({"bn": bn(8)}, lambda m, x: (lambda y: y * torch.sigmoid(y))(m.bn(m.conv(x)))),
    "hardswish written out": ({}, lambda m, x: (lambda y: y * F.relu6(y + 3) / 6)(m.conv(x))),
    "dropout between": ({"bn": bn(8), "drop": nn.Dropout()}, lambda m, x: F.relu(m.bn(m.drop(m.conv(x))))),
    "identity between": ({"bn": bn(8), "id": nn.Identity()}, lambda m, x: F.relu(m.id(m.bn(m.conv(x))))),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ending", ENDS)
def test_a_filter_that_is_off_is_exactly_zero_for_its_readers(ending: str, bias: bool) -> None:
    modules, forward = ENDS[ending]
    net = Net(lambda m, x: m.logits(forward(m, x)), conv=conv(3, 8, bias=bias), **copy.deepcopy(modules), fc=fc(8))
    gated, x = gated_net(net), images()
    assert [unit.name for unit in gated.units if unit.gated] == ["conv"]
    assert torch.equal(run(gated, x, "open"), net(x))
    assert torch.equal(run(gated, x, {"conv": torch.zeros(8)}), net.fc.bias.expand(3, -1))
    seen: list[Tensor] = []
    gated.fc.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run(gated, x, {"conv": HALF})
    assert not seen[0][:, 4:].any()
    assert seen[0][:, :4].all()


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of a map, as in ConvNeXt."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


MIXING: dict[str, nn.Module] = {
    "GroupNorm": nn.GroupNorm(2, 8),
    "LayerNorm2d": LayerNorm2d(8),
    "LocalResponseNorm": nn.LocalResponseNorm(3),
}


@pytest.mark.parametrize("norm", MIXING)
def test_a_conv_behind_whose_norm_every_filter_is_needed_is_left_open(norm: str) -> None:
    net = Net(
        lambda m, x: m.logits(F.relu(m.norm(m.one(F.gelu(m.zero(x)))))),
        zero=conv(3, 8),
        one=conv(8, 8),
        norm=copy.deepcopy(MIXING[norm]),
        fc=fc(8),
    )
    gated = gated_net(net)
    assert [unit.name for unit in gated.units if unit.gated] == ["zero"]
    assert gated.units[1].reason.startswith(f"{norm} mixes its channels: a filter that is off would still be needed")
    assert gated.cost({"zero": NONE}).executed["one"].tolist() == [0]


@pytest.mark.parametrize("rescaled", [False, True])
def test_of_a_convnext_block_the_pointwise_conv_before_the_gelu_is_gated(rescaled: bool) -> None:
    """GELU(0) = 0: what is off is zero for the conv that reads it; the others are followed by no activation."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        y = m.shrink(F.gelu(m.widen(m.norm(m.depth(x)))))
        return m.logits(x + (y * m.scale.view(1, -1, 1, 1) if rescaled else y))

    net = Net(
        forward,
        stem=conv(3, 4),
        depth=conv(4, 4, 7, groups=4),
        norm=LayerNorm2d(4),
        widen=conv(4, 8, 1),
        shrink=conv(8, 4, 1),
        fc=fc(4),
    )
    net.scale = nn.Parameter(torch.rand(4))
    gated, x = gated_net(net), images()
    assert [unit.name for unit in gated.units if unit.gated] == ["widen"]
    assert torch.equal(run(gated, x, "open"), net(x))
    assert live_inputs(gated, "shrink", {"widen": HALF}) == [4]


def test_one_activation_module_used_twice_ends_two_units() -> None:
    net = Net(
        lambda m, x: m.logits(m.act(m.two(m.act(m.one(x))))),
        one=conv(3, 8),
        two=conv(8, 8),
        act=nn.ReLU(inplace=True),
        fc=fc(8),
    )
    gated, x = gated_net(net), images()
    assert list(gated.gates) == ["one", "two"]
    assert len({unit.out for unit in gated.units}) == 2
    assert torch.equal(run(gated, x, "open"), net(x))


def test_the_mask_reaches_every_reader_of_a_unit() -> None:
    def forward(m: Net, x: Tensor, mask: Tensor | float = 1.0) -> Tensor:
        y = F.relu(m.one(x)) * mask
        return m.logits(F.relu(m.two(y)) + y)

    net = Net(forward, one=conv(3, 8), two=conv(8, 8), fc=fc(8))
    gated, x = gated_net(net), images()
    assert gated.units[0].gated
    masks = {"one": HALF, "two": torch.ones(8)}
    assert torch.equal(run(gated, x, masks), forward(net, x, HALF[:, :, None, None].float()))
    assert live_inputs(gated, "two", {"one": HALF}) == [4]


def test_a_unit_ends_where_its_value_is_read_twice() -> None:
    def forward(m: Net, x: Tensor, mask: Tensor | float = 1.0) -> Tensor:
        y = m.bn(m.one(x)) * mask
        return m.logits(F.relu(y) + torch.sigmoid(y))

    net = Net(forward, one=conv(3, 8), bn=bn(8), fc=fc(8))
    with pytest.raises(NoUnitError, match="no activation comes after it"):
        gated_net(net)
    gated, x = gated_net(net, linear=True), images()
    (unit,) = gated.units
    assert (unit.role, gated.graph[unit.out].kind) == ("linear", "norm")
    assert torch.equal(run(gated, x, {"one": HALF}), forward(net, x, HALF[:, :, None, None].float()))


def test_a_conv_whose_bare_output_is_read_twice_ends_at_the_conv() -> None:
    net = Net(
        lambda m, x: (lambda y: m.logits(F.relu(m.bn(y)) + y))(m.one(x)),
        one=conv(3, 8),
        bn=bn(8),
        fc=fc(8),
    )
    (unit,) = gated_net(net, linear=True).units
    assert unit.out == unit.conv


def test_an_activation_in_place_whose_result_is_not_used_still_acts() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.bn(m.one(x))
        F.relu_(y)
        return m.logits(y)

    net = Net(forward, one=conv(3, 8), bn=bn(8), fc=fc(8))
    gated, x = gated_net(net, linear=True), images()
    assert torch.equal(run(gated, x, "open"), net(x))
    assert torch.equal(run(gated, x, {"one": NONE}), net.fc.bias.expand(3, -1))


# Residual blocks


def residual_net(activated: bool = True, in_place: bool = False) -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        y = m.bn2(m.two(F.relu(m.bn1(m.one(x)))))
        if in_place:
            y += x
        else:
            y = y + x
        return m.logits(F.relu(y) if activated else y)

    return Net(forward, stem=conv(3, 8), one=conv(8, 8), bn1=bn(8), two=conv(8, 8), bn2=bn(8), fc=fc(8))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("site", ["pre_add", "post_add"])
def test_the_last_conv_of_a_residual_block_is_masked_before_or_after_the_addition(site: str, in_place: bool) -> None:
    net = residual_net(in_place=in_place)
    gated, x = gated_net(net, site=site), images()
    unit = {unit.name: unit for unit in gated.units}["two"]
    assert (unit.role, unit.gated) == ("residual", True)
    mask = HALF[:, :, None, None].float()
    with torch.no_grad():
        stem = F.relu(net.stem(x))
        y = net.bn2(net.two(F.relu(net.bn1(net.one(stem)))))
        summed = F.relu(y * mask + stem) if site == "pre_add" else F.relu(y + stem) * mask
        expected = net.logits(summed)
    masks = {"stem": torch.ones(8), "one": torch.ones(8), "two": HALF}
    assert torch.equal(run(gated, x, masks), expected)
    assert live_inputs(gated, "fc", {"two": HALF}) == [8 if site == "pre_add" else 4]
    assert live_inputs(gated, "fc", {"two": HALF, "stem": ~HALF}) == [8 if site == "pre_add" else 4]
    assert live_inputs(gated, "fc", {"two": HALF, "stem": HALF}) == [4]


def test_a_shortcut_conv_is_not_gated() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        return m.logits(F.relu(m.bn0(m.down(x)) + m.bn2(m.two(F.relu(m.one(x))))))

    net = Net(
        forward, stem=conv(3, 8), down=conv(8, 8, 1), bn0=bn(8), one=conv(8, 8), two=conv(8, 8), bn2=bn(8), fc=fc(8)
    )
    gated = gated_net(net, linear=True)
    units = {unit.name: unit for unit in gated.units}
    assert (units["down"].role, units["down"].gated) == ("shortcut", False)
    assert "shortcut" in units["down"].reason
    assert (units["two"].role, units["two"].gated) == ("residual", True)


def test_a_linear_bottleneck_is_gated_only_on_request() -> None:
    net = residual_net(activated=False)
    units = {unit.name: unit for unit in gated_net(net).units}
    assert (units["two"].role, units["two"].gated) == ("linear", False)
    assert "no activation comes after the addition" in units["two"].reason
    units = {unit.name: unit for unit in gated_net(net, linear=True).units}
    assert (units["two"].role, units["two"].gated) == ("linear", True)


def test_in_a_pre_activation_block_only_the_inner_conv_is_gated() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x + m.two(F.relu(m.bn2(m.one(F.relu(m.bn1(x))))))
        return m.logits(F.relu(m.bn3(x)))

    net = Net(forward, stem=conv(3, 8), one=conv(8, 8), two=conv(8, 8), bn1=bn(8), bn2=bn(8), bn3=bn(8), fc=fc(8))
    gated, x = gated_net(net), images()
    assert list(gated.gates) == ["one"]
    assert torch.equal(run(gated, x, "open"), net(x))
    assert live_inputs(gated, "two", {"one": HALF}) == [4]


def test_a_residual_branch_that_ends_in_squeeze_and_excite_is_gated() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        y = m.bn2(m.two(F.relu(m.one(x))))
        return m.logits(F.relu(y * torch.sigmoid(m.excite(y.mean((2, 3), keepdim=True))) + x))

    net = Net(forward, stem=conv(3, 8), one=conv(8, 8), two=conv(8, 8), bn2=bn(8), excite=conv(8, 8, 1), fc=fc(8))
    gated = gated_net(net, linear=True)
    assert "excite" not in gated.gates
    assert live_inputs(gated, "excite", {"two": HALF}) == [4]
    assert live_inputs(gated, "fc", {"two": HALF, "stem": HALF}) == [4]


# Depthwise and grouped convs


def depthwise_net(between: Callable[[Any, Tensor], Tensor] = lambda m, x: x, **modules: nn.Module) -> Net:
    return Net(
        lambda m, x: m.logits(F.relu(m.point(F.relu(m.bn2(m.depth(between(m, F.relu(m.bn1(m.wide(x)))))))))),
        wide=conv(3, 8, 1),
        bn1=bn(8),
        depth=conv(8, 8, groups=8),
        bn2=bn(8),
        point=conv(8, 8, 1),
        **modules,
        fc=fc(8),
    )


def test_a_depthwise_conv_shares_the_mask_of_the_conv_that_feeds_it() -> None:
    net = depthwise_net()
    gated, x = gated_net(net), images()
    units = {unit.name: unit for unit in gated.units}
    assert units["depth"].role == "depthwise"
    assert {name: unit.group for name, unit in units.items()} == {"wide": "wide", "depth": "wide", "point": "point"}
    assert list(gated.gates) == ["wide", "point"]
    assert gated.gates.head_macs(gated.gates.sites["wide"]) == 3 * 8
    with torch.no_grad():
        y = F.relu(net.bn2(net.depth(F.relu(net.bn1(net.wide(x)))))) * HALF[:, :, None, None]
        expected = net.logits(F.relu(net.point(y)))
    assert torch.equal(run(gated, x, {"wide": HALF, "point": torch.ones(8)}), expected)


def test_the_target_of_a_depthwise_group_is_read_at_the_depthwise_output() -> None:
    net = depthwise_net()
    gated = gated_net(net)
    outputs: dict[str, Tensor] = {}
    with torch.no_grad(), gated.observe(lambda group, _, y_BOHW: outputs.update({group: y_BOHW})), gated.force("open"):
        gated(images())
        expected = F.relu(net.bn2(net.depth(F.relu(net.bn1(net.wide(images()))))))
    assert torch.equal(outputs["wide"], expected)


def test_depthwise_separate_gives_it_a_gate_of_its_own() -> None:
    gated = gated_net(depthwise_net(), depthwise="separate")
    assert list(gated.gates) == ["wide", "depth", "point"]
    assert live_inputs(gated, "point", {"depth": HALF}) == [4]
    assert live_inputs(gated, "depth", {"wide": HALF}) == [4]


def test_a_depthwise_conv_whose_feeder_has_other_readers_stands_alone() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = F.relu(m.wide(x))
        return m.logits(F.relu(m.depth(y)) + F.relu(m.other(y)))

    net = Net(forward, wide=conv(3, 8, 1), depth=conv(8, 8, groups=8), other=conv(8, 8), fc=fc(8))
    assert list(gated_net(net).gates) == ["wide", "depth", "other"]


def test_a_depthwise_conv_is_fed_through_pooling_and_padding() -> None:
    net = depthwise_net(lambda m, x: F.pad(m.pool(x), (0, 1, 0, 1)), pool=nn.MaxPool2d(2))
    gated, x = gated_net(net), images()
    assert list(gated.gates) == ["wide", "point"]
    assert torch.equal(run(gated, x, "open"), net(x))


def test_a_channel_shuffle_parts_a_depthwise_conv_from_its_feeder() -> None:
    gated = gated_net(depthwise_net(lambda m, x: m.shuffle(x), shuffle=nn.ChannelShuffle(2)))
    assert list(gated.gates) == ["wide", "depth", "point"]


def test_a_depthwise_conv_on_the_image_is_gated_by_itself() -> None:
    net = Net(lambda m, x: m.logits(F.relu(m.depth(x))), depth=conv(3, 3, groups=3), fc=fc(3))
    (unit,) = gated_net(net).units
    assert (unit.role, unit.group, unit.gated) == ("depthwise", "depth", True)


def test_a_depthwise_conv_without_activation_is_gated_only_with_its_feeder() -> None:
    fed = Net(
        lambda m, x: m.logits(F.relu(m.point(m.depth(F.relu(m.wide(x)))))),
        wide=conv(3, 8, 1),
        depth=conv(8, 8, groups=8),
        point=conv(8, 8, 1),
        fc=fc(8),
    )
    assert {u.name: u.group for u in gated_net(fed).units if u.gated}["depth"] == "wide"
    depth = next(u for u in gated_net(fed, depthwise="separate").units if u.name == "depth")
    assert not depth.gated
    assert "linear" in depth.reason


def test_a_grouped_conv_is_gated_by_itself_and_reads_its_own_groups() -> None:
    net = Net(
        lambda m, x: m.logits(F.relu(m.grouped(F.relu(m.one(x))))),
        one=conv(3, 8),
        grouped=conv(8, 8, groups=2),
        fc=fc(8),
    )
    gated = gated_net(net)
    unit = gated.units[1]
    assert (unit.role, unit.groups, unit.group, unit.gated) == ("plain", 2, "grouped", True)
    assert unit.macs == 8 * 8 // 2 * 9 * 64


# Live channels through calls that move, join or keep them: `last` reads what the middle of the net leaves live.


def chain(middle: Callable[[Any, Tensor], Tensor], width: int = 8, **modules: nn.Module) -> Net:
    return Net(
        lambda m, x: m.logits(F.relu(m.last(middle(m, F.relu(m.first(x)))))),
        first=conv(3, 8),
        **modules,
        last=conv(width, 8),
        fc=fc(8),
    )


KEPT: dict[str, tuple[Net, int]] = {  # with channels 0..3 of `first` on, `last` reads so many
    "max pool": (chain(lambda m, x: F.max_pool2d(x, 2)), 4),
    "average pool module": (chain(lambda m, x: m.pool(x), pool=nn.AvgPool2d(2)), 4),
    "interpolate": (chain(lambda m, x: F.interpolate(x, scale_factor=2)), 4),
    "dropout module": (chain(lambda m, x: m.drop(x), drop=nn.Dropout(0.3)), 4),
    "dropout function": (chain(lambda m, x: F.dropout(x, 0.3, m.training)), 4),
    "second activation": (chain(lambda m, x: F.gelu(x)), 4),
    "times a number": (chain(lambda m, x: x * 2), 4),
    "divided by a number": (chain(lambda m, x: x / 2), 4),
    "spatial padding": (chain(lambda m, x: F.pad(x, (1, 1, 1, 1))), 4),
    "flip": (chain(lambda m, x: x.flip(1)), 4),
    "sigmoid lifts": (chain(lambda m, x: torch.sigmoid(x)), 8),
    "softplus lifts": (chain(lambda m, x: F.softplus(x)), 8),
    "adding a number lifts": (chain(lambda m, x: x + 1), 8),
    "one minus lifts": (chain(lambda m, x: 1 - x), 8),
    "norm lifts": (chain(lambda m, x: m.bn(x), bn=bn(8)), 8),
    "custom norm lifts": (chain(lambda m, x: m.bn(x), bn=FrozenNorm(8)), 8),
    "padding with a number lifts": (chain(lambda m, x: F.pad(x, (1, 1, 1, 1), value=1.0)), 8),
    "channels of a number lift": (chain(lambda m, x: F.pad(x, (0, 0, 0, 0, 2, 2), value=6.0), width=12), 12),
    "concat with its negative": (chain(lambda m, x: torch.cat([x, x.neg()], 1), width=16), 8),
    "first half of a chunk": (chain(lambda m, x: x.chunk(2, 1)[0], width=4), 4),
    "second half of a chunk": (chain(lambda m, x: torch.chunk(x, 2, dim=1)[1], width=4), 0),
    "second part of a split": (chain(lambda m, x: x.split([3, 5], 1)[1], width=5), 1),
    "slice of channels": (chain(lambda m, x: x[:, 2:6], width=4), 2),
    "every other channel": (chain(lambda m, x: x[:, ::2], width=4), 2),
    "repeat": (chain(lambda m, x: x.repeat(1, 2, 1, 1), width=16), 8),
    "channel padding": (chain(lambda m, x: F.pad(x, (0, 0, 0, 0, 2, 2)), width=12), 4),
    "shuffle by view": (
        chain(lambda m, x: x.view(x.size(0), 2, 4, x.size(2), x.size(3)).transpose(1, 2).flatten(1, 2)[:, :4], width=4),
        2,
    ),
    "shuffle module": (chain(lambda m, x: m.mix(x)[:, :2], width=2, mix=nn.ChannelShuffle(2)), 1),
    "two halves swapped and added": (chain(lambda m, x: x + torch.cat([x[:, 4:], x[:, :4]], 1)), 8),
    "two halves swapped and multiplied": (chain(lambda m, x: x * torch.cat([x[:, 4:], x[:, :4]], 1)), 0),
    "squeeze and excite": (
        chain(lambda m, x: x * torch.sigmoid(m.se(x.mean((2, 3), keepdim=True))), se=conv(8, 8, 1)),
        4,
    ),
    "difference": (chain(lambda m, x: x - x.neg()), 4),
}


@pytest.mark.parametrize("middle", KEPT)
def test_live_channels_follow_the_structure(middle: str) -> None:
    net, expected = KEPT[middle]
    gated, x = gated_net(net), images()
    assert live_inputs(gated, "last", {"first": HALF}) == [expected]
    assert gated.graph.opaque == () or "number lift" in middle
    assert torch.equal(run(gated, x, "open"), net(x))


@pytest.mark.parametrize("middle", KEPT)
def test_channels_that_are_not_live_are_zero_in_fact(middle: str) -> None:
    net, expected = KEPT[middle]
    gated = gated_net(net)
    seen: list[Tensor] = []
    gated.last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run(gated, images(), {"first": HALF})
    assert int(seen[0].abs().amax((0, 2, 3)).count_nonzero()) <= expected


def test_the_option_a_shortcut_moves_live_channels_and_adds_dead_ones() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        y = m.two(F.relu(m.one(x)))
        return m.logits(F.relu(y + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))))

    net = Net(forward, stem=conv(3, 8), one=nn.Conv2d(8, 16, 3, 2, 1), two=conv(16, 16), fc=fc(16))
    gated = gated_net(net)
    two = torch.zeros(1, 16, dtype=torch.bool)
    assert live_inputs(gated, "fc", {"stem": HALF, "two": two}) == [4]  # channels 4..7 of the sum
    two[0, :6] = True
    assert live_inputs(gated, "fc", {"stem": HALF, "two": two}) == [8]  # 0..5 and 4..7
    assert live_inputs(gated, "fc", {"two": two}) == [12]  # 0..5 and 4..11


@pytest.mark.parametrize(
    "flat",
    [
        lambda x: torch.flatten(x, 1),
        lambda x: x.view(x.size(0), -1),
        lambda x: x.view_as(torch.flatten(x, 1)),
        lambda x: x.reshape(x.shape[0], -1),
    ],
    ids=["flatten", "view", "view_as", "reshape"],
)
def test_a_linear_layer_reads_every_pixel_of_a_flattened_live_channel(flat: Callable[[Tensor], Tensor]) -> None:
    net = Net(lambda m, x: m.fc(flat(F.relu(m.one(x)))), one=conv(3, 8), fc=fc(8 * 64))
    assert live_inputs(gated_net(net), "fc", {"one": HALF}) == [4 * 64]


def test_a_sum_of_a_tensor_with_itself_keeps_zero_at_zero() -> None:
    assert live_inputs(gated_net(chain(lambda m, x: x + x)), "last", {"first": HALF}) == [4]


def test_live_channels_survive_a_cast_to_half_precision() -> None:
    net = Net(
        lambda m, x: m.logits(F.relu(m.last(F.relu(m.first(F.relu(m.wide(x)))).to(torch.bfloat16).to(x.dtype)))),
        wide=conv(3, 300, 1),
        first=conv(300, 8),
        last=conv(8, 8),
        fc=fc(8),
    )
    gated = gated_net(net)
    read = [live_inputs(gated, "last", {"first": mask[None]})[0] for mask in torch.eye(8)]
    assert read == [1] * 8


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


# The model around the gates


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

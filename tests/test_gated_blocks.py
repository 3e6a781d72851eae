"""Which convs of residual, depthwise and grouped blocks are gated, and by whose mask. One small net per rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from nets import (
    HALF,
    Net,
    bn,
    conv,
    depthwise_net,
    fc,
    gated_net,
    images,
    live_inputs,
    residual_net,
    run,
)
from torch import Tensor, nn

# Residual blocks


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

"""Where a unit ends: a filter that is off is exactly zero for whoever reads it. One small net per rule."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from nets import (
    HALF,
    NONE,
    Forward,
    FrozenNorm,
    Net,
    NormAct,
    bn,
    conv,
    fc,
    gated_net,
    images,
    live_inputs,
    run,
)
from torch import Tensor, nn

from cofire import NoUnitError

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

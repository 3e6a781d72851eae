"""Forms in which published models write their sums, scalings and in-place updates: one small net each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from nets import Net, bn, conv, fc, gated_net, images, live_inputs, random_masks, run
from torch import Tensor

FIRST = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0]], dtype=torch.bool)
NONE = torch.zeros(1, 8, dtype=torch.bool)


def roles(net: Net, **options: str) -> dict[str, str]:
    return {unit.name: unit.role for unit in gated_net(net, **options).units if unit.gated}


def test_a_branch_that_is_rescaled_before_the_addition_is_still_residual() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        y = m.norm(m.two(F.relu(m.one(x))))
        return m.logits(F.relu(x + y * torch.sigmoid(m.scale(y.mean((2, 3), keepdim=True)))))

    net = Net(forward, stem=conv(3, 8), one=conv(8, 8), two=conv(8, 8), norm=bn(8), scale=conv(8, 8, 1), fc=fc(8))
    assert roles(net) == {"stem": "plain", "one": "plain", "two": "residual"}
    assert live_inputs(gated_net(net), "scale", {"two": FIRST}) == [4]


@pytest.mark.parametrize("inner", ["left", "right", "from zero"])
def test_all_operands_of_a_sum_are_compared_however_it_is_bracketed(inner: str) -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.stem(x))
        a, b = m.a(x), m.b(F.relu(m.deep(x)))
        sums = {"left": lambda: (x + a) + b, "right": lambda: a + (x + b), "from zero": lambda: 0 + a + x + b}
        return m.logits(F.relu(m.last(F.relu(sums[inner]()))))

    net = Net(
        forward, **{name: conv(3 if name == "stem" else 8, 8) for name in ("stem", "a", "deep", "b", "last")}, fc=fc(8)
    )
    assert roles(net) == {"stem": "plain", "deep": "plain", "b": "residual", "last": "plain"}  # a is the shorter way


def side_by_side() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.logits(F.relu(m.last(F.relu(m.small(x) + m.large(x)))))

    return Net(forward, small=conv(3, 8, 1), large=conv(3, 8), last=conv(8, 8), fc=fc(8))


def test_convs_side_by_side_each_have_a_mask() -> None:
    gated = gated_net(side_by_side())
    assert list(gated.gates) == ["small", "large", "last"]
    assert live_inputs(gated, "last", {"small": FIRST, "large": NONE}) == [4]


def test_convs_side_by_side_cannot_both_mask_their_activated_sum() -> None:
    gated, x = gated_net(side_by_side(), site="post_add"), images()
    assert list(gated.gates) == ["large", "last"]
    assert "large" in next(unit.reason for unit in gated.units if unit.name == "small")
    masks = random_masks(gated, len(x))
    read = live_inputs(gated, "last", masks | {"last": torch.ones(len(x), 8, dtype=torch.bool)})
    assert read == masks["large"].sum(1).tolist()


def test_who_reads_a_tensor_after_a_change_in_place_reads_the_change() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        a, b = F.relu(m.a(x)), F.relu(m.b(x))
        a.add_(b)  # the result is not used, a is
        return m.logits(F.relu(m.last(a)))

    net = Net(forward, a=conv(3, 8), b=conv(3, 8), last=conv(8, 8), fc=fc(8))
    assert live_inputs(gated_net(net), "last", {"a": FIRST, "b": NONE}) == [4]
    assert live_inputs(gated_net(net), "last", {"a": NONE, "b": ~FIRST}) == [4]
    assert live_inputs(gated_net(net), "last", {"a": FIRST, "b": ~FIRST}) == [8]


def test_pooling_one_side_of_a_map_after_the_other_keeps_channels_apart() -> None:
    net = Net(lambda m, x: m.fc(F.relu(m.one(x)).mean(3).mean(2)), one=conv(3, 8), fc=fc(8))
    assert live_inputs(gated_net(net), "fc", {"one": FIRST}) == [4]


def test_adding_a_parameter_makes_every_channel_live_though_it_is_zero_now() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.logits(F.relu(m.last(F.relu(m.one(x)) + m.shift.bias[:, None, None])))

    net = Net(forward, one=conv(3, 8), shift=bn(8), last=conv(8, 8), fc=fc(8))
    net.shift.bias.data.zero_()
    assert live_inputs(gated_net(net), "last", {"one": FIRST}) == [8]


def test_masks_act_the_same_in_a_model_that_works_in_place() -> None:
    def forward(m: Net, x: Tensor, inplace: bool) -> Tensor:
        x = F.relu(m.stem(x), inplace=inplace)
        y = m.two(F.relu(m.one(x), inplace=inplace))
        y = y.add_(x) if inplace else y + x
        return m.logits(F.relu(y, inplace=inplace))

    layers = {"stem": conv(3, 8), "one": conv(8, 8), "two": conv(8, 8), "fc": fc(8)}
    gated = [gated_net(Net(lambda m, x, i=i: forward(m, x, i), **layers)) for i in (False, True)]
    x, masks = images(), random_masks(gated[0], 3)
    assert torch.equal(run(gated[0], x, masks), run(gated[1], x, masks))
    assert gated[0].cost(masks).executed["fc"].tolist() == gated[1].cost(masks).executed["fc"].tolist()

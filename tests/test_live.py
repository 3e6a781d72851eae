"""How live channels flow through calls that move, join or keep them: `last` reads what is live behind the middle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from nets import (
    HALF,
    FrozenNorm,
    Net,
    bn,
    chain,
    conv,
    fc,
    gated_net,
    images,
    live_inputs,
    run,
)
from torch import Tensor, nn

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

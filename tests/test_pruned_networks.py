"""Static pruning of networks nobody here made: coupled channels, splits and shuffles, weights that are not plain."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo
from nets import SHAPE, Net, bn, conv, fc, images
from pruned import unheard
from small import digest
from torch import Tensor, nn

from cofire import L1, ConfigError, NoUnitError, TraceError, cost, load, prune, save, trace
from cofire.pruning.allocation import shares, within_budget
from cofire.pruning.apply import removable_for
from cofire.pruning.base import allocate, scores
from cofire.pruning.channels import Channels
from cofire.pruning.removal import removable
from cofire.pruning.surgery import cut

IMAGE = (3, 64, 64)
NETWORKS = [
    "timm/efficientnet_b0",
    "timm/mobilenetv3_small_100",
    "torchvision/mobilenet_v3_small",
    "timm/regnetx_002",
    "timm/regnety_002",
    "timm/resnext50_32x4d",
    "timm/ghostnet_100",
    "timm/densenet121",
    "torchvision/shufflenet_v2_x0_5",
    "timm/res2net50_26w_4s",
]
needs_zoo = pytest.mark.skipif(bool(zoo.why_not), reason=zoo.why_not or "torchvision and timm are needed")


def network(name: str) -> nn.Module:
    """With norms that shift and scale, so that a channel at the wrong place shows."""
    model = zoo.build(name, num_classes=10)
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.bias.normal_(0.0, 0.5, generator=generator)
    return model


def share(pruned: nn.Module, model: nn.Module, shape: tuple[int, int, int] = IMAGE) -> float:
    small, whole = (cost(trace(m, shape), {}).dense_total for m in (pruned, model))
    return small / whole


def planned(model: nn.Module, config: L1, shape: tuple[int, int, int] = IMAGE) -> tuple[Channels, dict[str, Tensor]]:
    channels = removable_for(model, config, shape)
    return channels, dict(allocate(model, channels, None, config, scores(model, channels, None, config)))


@needs_zoo
@pytest.mark.slow
@pytest.mark.parametrize("streams", ["auto", "cut"])
@pytest.mark.parametrize("name", NETWORKS)
def test_half_of_the_macs_leave_and_what_stays_equals_the_masked_network(name: str, streams: str) -> None:
    model = network(name)
    before = digest(model)
    channels, masks = planned(model, L1(macs=0.5, streams=streams))
    pruned = cut(model, channels, masks)
    assert digest(model) == before
    assert 0.49 <= share(pruned, model) <= 0.5
    x = images(2, IMAGE)
    expected = unheard(model.double(), channels, masks, x.double())
    with torch.no_grad():
        found = pruned.double()(x.double())
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.std())


@needs_zoo
def test_channels_that_pass_a_shuffle_leave_nowhere_unseen() -> None:
    """In 0.1 half of such budgets gave another network than the masked one, and only MACs were compared."""
    model = network("torchvision/shufflenet_v2_x0_5")
    x = images(2, IMAGE)
    channels = removable(model, IMAGE)
    ranks = shares(scores(model, channels, None, L1(macs=0.5)))
    for step in range(7):
        masks = within_budget(ranks, 0.3 + 0.1 * step, channels.remaining)
        expected = unheard(model, channels, masks, x)
        with torch.no_grad():
            found = cut(model, channels, masks)(x)
        assert float((found - expected).abs().max()) <= 1e-4 * float(expected.std())


@needs_zoo
def test_a_pruned_network_with_grouped_convs_comes_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = network("timm/regnety_002")
    pruned = prune(model, L1(macs=0.5, streams="cut"), input_shape=IMAGE)
    save(pruned, tmp_path)
    loaded = load(tmp_path, model=model)
    assert str(loaded) == str(pruned)
    with torch.no_grad():
        assert torch.equal(loaded(images(2, IMAGE)), pruned(images(2, IMAGE)))


# Coupled channels


def stream_net() -> Net:
    """Two convs write to a stream, two read it."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.bn0(m.stem(x)))
        x = F.relu(x + m.bn1(m.branch(x)))
        return m.logits(F.relu(m.last(x)))

    return Net(forward, stem=conv(3, 6), bn0=bn(6), branch=conv(6, 6), bn1=bn(6), last=conv(6, 4), fc=fc(4))


def test_a_channel_of_a_stream_leaves_all_convs_that_write_and_read_it() -> None:
    net = stream_net()
    channels = removable(net, SHAPE, streams=True)
    assert channels.sizes == {"stem": 6, "last": 4}
    stream = channels.groups["stem"]
    assert stream.stream
    assert set(stream.filters) == {"stem", "branch"}
    assert set(stream.inputs) == {"branch", "last"}
    smaller = cut(net, channels, {"stem": torch.arange(6) < 4, "last": torch.ones(4) > 0})
    shapes = {name: tuple(smaller.get_submodule(name).weight.shape[:2]) for name in ("stem", "branch", "last")}
    assert shapes == {"stem": (4, 3), "branch": (4, 4), "last": (4, 4)}
    assert smaller.bn0.num_features == smaller.bn1.num_features == 4
    # 64 positions x 9 taps: 3 x 6 + 6 x 6 + 6 x 4 pairs, and the linear layer's 4 x 5
    dense, left = 576 * (18 + 36 + 24) + 20, 576 * (12 + 16 + 16) + 20
    assert channels.remaining({"stem": torch.arange(6) < 4, "last": torch.ones(4) > 0}) == pytest.approx(left / dense)


def test_streams_are_cut_only_where_the_budget_asks_for_it() -> None:
    whole = removable_for(stream_net(), L1(macs=0.9), SHAPE)
    assert set(whole.sizes) == {"last"}
    cut_too = removable_for(stream_net(), L1(macs=0.3), SHAPE)
    assert set(cut_too.sizes) == {"stem", "last"}
    with pytest.raises(ConfigError, match=r"cannot be reached: one filter per group leaves 0.* an addition reads it"):
        removable_for(stream_net(), L1(macs=0.3, streams="whole"), SHAPE)


def test_groups_of_a_grouped_conv_leave_as_a_whole() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.logits(F.relu(m.last(F.relu(m.grouped(F.relu(m.first(x)))))))

    net = Net(forward, first=conv(3, 8), grouped=conv(8, 12, groups=4), last=conv(12, 5), fc=fc(5)).eval()
    channels = removable(net, SHAPE)
    group = channels.groups["first"]
    assert group.size == 4
    assert group.filters["first"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert group.filters["grouped"].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    smaller = cut(net, channels, {"first": torch.tensor([True, False, True, True]), "last": torch.ones(5) > 0})
    assert (smaller.grouped.groups, smaller.grouped.in_channels, smaller.grouped.out_channels) == (3, 6, 9)


def test_an_excited_conv_takes_its_squeeze_along() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        y = F.relu(m.first(x))
        y = y * torch.sigmoid(m.up(F.relu(m.down(y.mean((2, 3), keepdim=True)))))
        return m.logits(y)

    net = Net(forward, first=conv(3, 8), down=conv(8, 2, 1), up=conv(2, 8, 1), fc=fc(8))
    channels = removable(net, SHAPE)
    assert channels.sizes == {"first": 8}
    assert set(channels.groups["first"].filters) == {"first", "up"}
    assert set(channels.groups["first"].inputs) == {"down", "fc"}


def test_norms_behind_a_concatenation_lose_the_channels_too() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = torch.cat([x, m.grow(F.relu(m.bn0(x)))], 1)
        return m.logits(F.relu(m.bn1(x)))

    net = Net(forward, stem=conv(3, 6), bn0=bn(6), grow=conv(6, 3), bn1=bn(9), fc=fc(9)).eval()
    channels = removable(net, SHAPE)
    masks = {"stem": torch.arange(6) != 2, "grow": torch.arange(3) != 0}
    smaller = cut(net, channels, masks)
    torch.testing.assert_close(smaller.bn1.bias, net.bn1.bias[[0, 1, 3, 4, 5, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(smaller(images()), unheard(net, channels, masks, images()), rtol=1e-5, atol=1e-5)


# What cannot be pruned says so


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_weight_that_is_computed_is_named(norm) -> None:  # type: ignore[no-untyped-def]
    net = stream_net()
    net.branch = norm(net.branch)
    before = digest(net)
    with pytest.raises(TraceError, match=r"branch .*computes its weight from other tensors .*remove_parametrizations"):
        prune(net, L1(macs=0.5), input_shape=SHAPE)
    assert digest(net) == before


def test_a_conv_that_is_no_module_keeps_its_channels_and_is_named() -> None:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.logits(F.relu(F.conv2d(F.relu(m.first(x)), m.kernel.weight, padding=1)))

    net = Net(forward, first=conv(3, 6), kernel=conv(6, 4), fc=fc(4))
    with pytest.raises(NoUnitError, match=r"conv2d \(conv2d\) is a function, not a module"):
        prune(net, L1(macs=0.5), input_shape=SHAPE)


def test_a_conv_that_standardises_its_weights_keeps_its_channels_and_is_named() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return F.conv2d(x, weight / weight.std((1, 2, 3), keepdim=True), self.bias, padding=1)

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.logits(F.relu(m.second(F.relu(m.first(x)))))

    net = Net(forward, first=conv(3, 6), second=Standardised(6, 4, 3), fc=fc(4))
    with pytest.raises(NoUnitError, match=r"Standardised \(second\) changes its weights before"):
        prune(net, L1(macs=0.5), input_shape=SHAPE)


def test_a_forward_that_hides_what_it_does_with_channels_is_found_by_its_outputs() -> None:
    net = Net(lambda m, x: m.logits(F.relu(m.first(x))), first=conv(3, 8), fc=fc(8))
    net.first.register_forward_hook(lambda module, inputs, y: y.flip(1))  # inside of one call, where no rule looks
    with pytest.raises(TraceError, match="must compute what the masked one does, but has outputs that differ by"):
        prune(net, L1(macs=0.5), input_shape=SHAPE)

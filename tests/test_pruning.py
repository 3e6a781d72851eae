"""Static pruning: the smaller module computes what the masked one does, costs what was asked, and is like any other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, bn, conv, fc, images, inverted_net, mixed_net, option_a_net
from pruned import unheard
from small import ROOT, OwnNet, digest, tiny_gated, tiny_images, tiny_plain
from torch import Tensor, nn

import cofire
from cofire import (
    FTWT,
    ConfigError,
    DataError,
    FileError,
    NoUnitError,
    PruneConfig,
    Recipe,
    compile,
    cost,
    create_backbone,
    data,
    evaluate,
    fit,
    gate,
    list_backbones,
    load,
    prune,
    register_criterion,
    save,
    trace,
)
from cofire.gates.fixed import Fixed
from cofire.pruning import (
    FPGM,
    L1,
    Random,
    Taylor,
    allocations,
    base,
    prune_types,
    recoveries,
    register_allocation,
    register_recovery,
)
from cofire.pruning.allocation import shares, within_budget
from cofire.pruning.base import allocate, scores
from cofire.pruning.channels import Channels
from cofire.pruning.removal import removable
from cofire.pruning.surgery import cut
from cofire.pruning.taylor import taylor_scores

METHODS = ("L1", "Random", "Taylor")  # tests/laws has what holds for all


def concat_net() -> Net:
    """Branches of different ends that are concatenated, pooled and flattened into a linear layer."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.bn0(m.stem(x)))
        y = torch.cat([F.relu(m.bn1(m.left(x))), x, F.relu(m.right(x))], 1)
        y = torch.cat([F.max_pool2d(F.relu(m.bn2(m.join(y))), 4), F.avg_pool2d(y, 4)], 1)
        return m.fc(y.flatten(1))

    modules = {"stem": conv(3, 6), "left": conv(6, 5), "right": conv(6, 4, 1), "join": conv(15, 8)}
    return Net(forward, **modules, bn0=bn(6), bn1=bn(5), bn2=bn(8), fc=fc((8 + 15) * 4))


def beta_net() -> Net:
    """Norms with large shifts: a filter whose weights are zero still fires."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.bn0(m.stem(x)))
        return m.logits(F.relu(m.bn2(m.point(F.relu(m.bn1(m.depth(x)))))))

    modules = {"stem": conv(3, 12), "depth": conv(12, 12, groups=12), "point": conv(12, 14, 1)}
    net = Net(forward, **modules, bn0=bn(12), bn1=bn(12), bn2=bn(14), fc=fc(14))
    with torch.no_grad():
        for norm in (net.bn0, net.bn1, net.bn2):
            norm.bias.add_(3)
    return net


NETS = {"residual": option_a_net, "depthwise": inverted_net, "concat": concat_net, "beta": beta_net, "mixed": mixed_net}


def batches(shape: tuple[int, int, int] = SHAPE, classes: int = 5) -> list[Any]:
    return list(data.synthetic(12, shape, classes=classes).loader(6))


def share(pruned: nn.Module, model: nn.Module, shape: tuple[int, int, int] | None = None) -> float:
    macs = [cost(trace(m, shape), {}).dense_total for m in (pruned, model)]
    return macs[0] / macs[1]


def a_config(method: str, macs: float, **options: Any) -> PruneConfig:
    return prune_types()[method](macs=macs, **options)


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


@torch.no_grad()
def gated_off(model: nn.Module, masks: dict[str, Tensor], x: Tensor) -> Tensor:
    """Logits with the removed filters' outputs set to zero by gates, which know nothing of surgery."""
    gated = gate(model, Fixed(always=True), filter_fn=lambda unit: unit.group in masks, input_shape=tuple(x.shape[1:]))
    with gated.eval().force(masks):
        return gated(x)


# What a pruned module computes


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_a_pruned_module_computes_what_the_masked_one_does(net: str, streams: bool) -> None:
    model = NETS[net]().eval()
    channels = removable(model, SHAPE, streams=streams)
    for seed, keep in enumerate((0.3, 0.5, 0.7)):
        masks = some_masks(channels, keep, seed)
        assert not all(bool(mask.all()) for mask in masks.values())
        found = logits(cut(model, channels, masks), images())
        torch.testing.assert_close(found, unheard(model, channels, masks, images()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("net", ["residual", "beta"])
def test_a_pruned_module_computes_what_gates_leave_that_are_off(net: str) -> None:
    model = NETS[net]().eval()
    channels = removable(model, SHAPE)
    masks = some_masks(channels, 0.5, 0)
    found = logits(cut(model, channels, masks), images())
    torch.testing.assert_close(found, gated_off(model, masks, images()), rtol=1e-5, atol=1e-5)


def some_masks(channels: Channels, keep: float, seed: int) -> dict[str, Tensor]:
    """Random masks that leave each group at least one channel."""
    generator = torch.Generator().manual_seed(seed)
    ranks = {name: torch.rand(size, generator=generator) for name, size in channels.sizes.items()}
    return {name: (rank < keep) | (rank == rank.min()) for name, rank in ranks.items()}


SMALL = ("mobilenet_v2", "resnet8_digits", "vgg11_bn")
DEEPER = [f"vgg{depth}{norm}_imagenet" for depth in (13, 16, 19) for norm in ("", "_bn")]  # than 11
BACKBONES = [
    (name, method)
    for name in list_backbones()
    if name not in DEEPER
    for method in (METHODS if name in SMALL else ["L1"])
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), BACKBONES)
def test_every_backbone_is_pruned_to_its_budget_and_equals_its_masked_form(name: str, method: str) -> None:
    torch.manual_seed(0)
    model = create_backbone(name, num_classes=4).eval()
    channels, height, width = model.input_shape
    shape = (channels, min(height, 64), min(width, 64))
    few = list(data.synthetic(4, shape, classes=4).loader(2))
    config = a_config(method, 0.6)
    channels = removable(model, shape)
    masks = dict(allocate(model, channels, few, config, scores(model, channels, few, config)))
    pruned = cut(model, channels, masks)
    assert 0.59 <= share(pruned, model, shape) <= 0.6
    assert type(pruned) is type(model)
    expected = unheard(model, channels, masks, few[0][0])
    torch.testing.assert_close(logits(pruned, few[0][0]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("macs", [0.3, 0.82, 1.0])
@pytest.mark.parametrize("allocation", ["uniform", "global"])
@pytest.mark.parametrize("method", METHODS)
def test_the_budget_is_met_within_one_point(method: str, allocation: str, macs: float) -> None:
    model = create_backbone("resnet20")
    few = list(data.synthetic(4, (3, 32, 32)).loader(2))
    left = share(prune(model, a_config(method, macs, allocation=allocation), few), model)
    assert macs - 0.01 <= left <= macs


def test_pruning_leaves_the_model_alone_and_removes_nothing_where_all_may_remain() -> None:
    model = tiny_plain()
    before = digest(model)
    prune(model, L1(macs=0.5))
    assert digest(model) == before
    assert digest(prune(model, L1(macs=1.0))) == before


def test_modes_and_frozen_parameters_stay_as_they_were() -> None:
    model = tiny_plain().train()
    model.layer1.eval()
    model.conv1.weight.requires_grad_(False)
    pruned = prune(model, L1(macs=0.5))
    modes = {name: module.training for name, module in model.named_modules()}
    assert {name: module.training for name, module in pruned.named_modules()} == modes
    frozen = {name: p.requires_grad for name, p in model.named_parameters()}
    assert {name: p.requires_grad for name, p in pruned.named_parameters()} == frozen


# Parts


def test_l1_drops_the_filters_with_the_smallest_weights() -> None:
    net = OwnNet()
    with torch.no_grad():
        for filter_, size in enumerate([5, 1, 7, 3, 8, 2, 6, 4]):
            net.first.weight[filter_] = size * 0.01
        net.first.weight[3] = 0
        net.first.weight[3, 1, 2, 0] = -3 * 0.27  # as large a sum of magnitudes, in one place
        net.first.weight[4] *= -1
    graph = removable(net, (3, 8, 8))
    score = {**scores(net, graph, None, L1(macs=0.5)), "second": torch.full((8,), 9.0)}
    masks = within_budget(score, 0.6, graph.remaining)
    sizes = torch.tensor([5, 1, 7, 3, 8, 2, 6, 4])
    kept = int(masks["first"].sum())
    assert bool(masks["second"].all())
    assert torch.equal(masks["first"], sizes > 8 - kept)
    # 8 x 8 positions x 9 taps: 3 x 8 + 8 x 8 pairs, and the linear layer's 8 x 3
    dense, left = 576 * (24 + 64) + 24, 576 * (3 * kept + 8 * kept) + 24
    assert graph.remaining(masks) == pytest.approx(left / dense)
    assert left / dense <= 0.6 < (left + 576 * 11) / dense


def test_fpgm_drops_what_is_near_all_others() -> None:
    net = OwnNet()
    with torch.no_grad():
        for filter_, size in enumerate([0, 1, 2, 10, 20, 30, 40, 50]):
            net.first.weight[filter_] = 0
            net.first.weight[filter_, 0, 0, 0] = size  # points on a line
    found = scores(net, removable(net, (3, 8, 8)), None, FPGM(macs=0.5))["first"]
    # |0-1| + |0-2| + |0-10| + ... and so on
    assert found.tolist() == pytest.approx([153, 147, 143, 127, 127, 147, 187, 247])


@pytest.mark.parametrize("net", ["residual", "beta"])
def test_a_factor_where_channels_are_read_is_a_factor_on_gates(net: str) -> None:
    model = NETS[net]().eval()
    channels = removable(model, SHAPE)
    found = scores(model, channels, batches(), Taylor(macs=0.5))
    gated = gate(model, Fixed(always=True), filter_fn=lambda unit: unit.group in channels.groups, input_shape=SHAPE)
    expected = taylor_scores(gated, batches())
    assert found.keys() == expected.keys()
    for group in expected:
        torch.testing.assert_close(found[group], expected[group], rtol=1e-4, atol=1e-8)


def test_random_draws_by_seed_and_takes_the_same_share_everywhere() -> None:
    model = create_backbone("vgg11_bn")
    same, again, other = (prune(model, Random(macs=0.5, seed=seed)) for seed in (0, 0, 1))
    assert digest(same) == digest(again) != digest(other)
    shares_left = [m.out_channels / n.out_channels for m, n in zip(convs(same), convs(model), strict=True)]
    assert max(shares_left) - min(shares_left) < 0.05


def convs(model: nn.Module) -> list[nn.Conv2d]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)]


def test_ranks_of_a_group_are_shares_of_it() -> None:
    ranks = shares({"a": torch.tensor([3.0, 1.0, 2.0, 9.0]), "b": torch.tensor([5.0, 4.0])})
    assert ranks["a"].tolist() == [0.625, 0.125, 0.375, 0.875]
    assert ranks["b"].tolist() == [0.75, 0.25]


def test_measured_norms_are_those_of_the_images() -> None:
    images_ = tiny_images(40)
    pruned = prune(tiny_plain().eval(), L1(macs=0.6, recovery="norms"), images_.loader(40))
    x = next(iter(images_.loader(40)))[0]
    with torch.no_grad():
        y = pruned.conv1(x)
    torch.testing.assert_close(pruned.bn1.running_mean, y.mean((0, 2, 3)))
    torch.testing.assert_close(pruned.bn1.running_var, y.var((0, 2, 3)))
    assert pruned.bn1.momentum == 0.1
    assert not pruned.bn1.training
    with pytest.raises(DataError, match='recovery = "norms" needs images'):
        prune(tiny_plain(), L1(macs=0.6, recovery="norms"))


def test_convs_that_stay_whole_say_why() -> None:
    reasons = removable(option_a_net(), SHAPE).reasons
    assert "a1" not in reasons
    assert reasons["stem"] == reasons["a2"] == "an addition reads it"
    mixed = removable(mixed_net(), SHAPE).reasons
    assert mixed["stem"] == mixed["grouped"] == "its channels could only leave all at once"
    assert mixed["squeeze"] == "works on a 1x1 map (squeeze-and-excite or the like)"


# A module like any other


@pytest.fixture
def pruned() -> nn.Module:
    return prune(tiny_plain(), L1(macs=0.5)).eval()


def test_a_pruned_module_trains(pruned: nn.Module) -> None:
    before = digest(pruned)
    fit(pruned, tiny_images(32).loader(16, train=True), Recipe(epochs=1))
    assert digest(pruned) != before
    assert evaluate(pruned, tiny_images(20).loader(20)).n == 20


@pytest.mark.parametrize("name", ["resnet8_digits", "mobilenet_v1", "mobilenet_v2", "vgg11_bn"])
def test_a_pruned_backbone_comes_back_from_its_folder(tmp_path: Path, name: str) -> None:
    model = create_backbone(name, num_classes=3)
    pruned = prune(model, L1(macs=0.5)).eval()
    save(pruned, tmp_path)
    loaded = load(tmp_path)
    x = torch.randn(2, *model.input_shape)
    assert torch.equal(loaded(x), pruned(x))
    assert digest(loaded) == digest(pruned)
    assert str(loaded) == str(pruned)  # widths of all layers as well


def test_a_pruned_user_s_own_model_comes_back_into_the_whole_one(tmp_path: Path) -> None:
    model = OwnNet()
    pruned = prune(model, L1(macs=0.455), input_shape=(3, 8, 8)).eval()
    save(pruned, tmp_path)
    before = digest(model)
    assert digest(load(tmp_path, model=model)) == digest(load(tmp_path, model=pruned)) == digest(pruned)
    assert digest(model) == before
    save(model, tmp_path / "whole")
    with pytest.raises(FileError, match="has other shapes for"):
        load(tmp_path / "whole", model=pruned)


def test_a_pruned_module_can_be_gated_and_comes_back(tmp_path: Path, pruned: nn.Module) -> None:
    gated = gate(pruned, FTWT()).eval()
    gated.save(tmp_path)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(load(tmp_path)(x), gated(x))


def test_a_pruned_module_compiles(pruned: nn.Module) -> None:
    x = torch.randn(2, 1, 8, 8)
    engine = compile(pruned)
    torch.testing.assert_close(engine(x), pruned(x).detach(), rtol=1e-4, atol=1e-4)
    assert engine.last_macs is not None


# What a user can do wrong


def test_errors_say_what_must_be_how() -> None:
    with pytest.raises(ConfigError, match=r"L1.macs, the share that remains, must be in \(0, 1\], got 0"):
        L1(macs=0.0)
    with pytest.raises(
        ConfigError, match=r"macs=0.01 cannot be reached: one filter per group leaves 0\.0\d+; what stays"
    ):
        prune(tiny_plain(), L1(macs=0.01, streams="whole"))
    with pytest.raises(ConfigError, match=r"cannot be met within one point: the nearest below is 0\.\d+"):
        prune(OwnNet(), L1(macs=0.55), input_shape=(3, 8, 8))
    with pytest.raises(DataError, match=r"Taylor needs labelled images: prune\(model, Taylor"):
        prune(tiny_plain(), Taylor(macs=0.5))
    with pytest.raises(ConfigError, match="the model is gated; prune its plain form"):
        prune(tiny_gated(), L1(macs=0.5))


def test_a_model_of_which_nothing_can_leave_says_why() -> None:
    net = Net(lambda m, x: m.logits(x + F.relu(m.only(x))), only=conv(3, 3), fc=fc(3))
    with pytest.raises(NoUnitError, match="an addition reads it"):
        prune(net, L1(macs=0.5), input_shape=SHAPE)


def test_a_width_written_into_the_forward_is_found() -> None:
    net = Net(lambda m, x: m.fc(F.relu(m.only(x)).mean((2, 3)).view(-1, 16)), only=conv(3, 16), fc=fc(16))
    with pytest.raises(NoUnitError, match=r"Linear \(fc\) reads it through a split, shuffle or shape that"):
        prune(net, L1(macs=0.5), input_shape=SHAPE)


def test_every_method_has_a_row_in_the_docs() -> None:
    page = (ROOT / "docs" / "static-pruning.md").read_text()
    ours = [config for config in prune_types().values() if config.__module__.startswith("cofire.")]
    for name in {config.__name__ for config in ours}:
        assert page.count(f"\n| `{name}` | ") >= 1, name
    for part in (*allocations(), *recoveries()):
        assert f"`{part}`" in page, part


def test_the_old_name_of_random_is_known() -> None:
    assert cofire.Uniform is cofire.Random is prune_types()["Uniform"] is prune_types()["Random"]


def test_unknown_parts_are_named() -> None:
    with pytest.raises(ConfigError, match="unknown allocation 'globl'; did you mean 'global'"):
        L1(macs=0.5, allocation="globl")
    with pytest.raises(ConfigError, match="unknown recovery 'norm'; did you mean 'norms'"):
        L1(macs=0.5, recovery="norm")
    with pytest.raises(ConfigError, match="an allocation named 'uniform' is registered already"):
        register_allocation("uniform")
    with pytest.raises(ConfigError, match="a recovery named 'norms' is registered already"):
        register_recovery("norms")


def test_scores_are_checked() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Broken(PruneConfig):
        value: float = 0.0
        size: int = 8

    @register_criterion(Broken)
    def broken(model: nn.Module, channels: Channels, loader: Any, config: Broken) -> dict[str, Tensor]:
        return {name: torch.full((config.size,), config.value) for name in channels.groups}

    try:
        with pytest.raises(ConfigError, match="must score every filter"):
            prune(OwnNet(), Broken(macs=0.5, size=3), input_shape=(3, 8, 8))
        with pytest.raises(ConfigError, match="must give finite scores; group 'first' has not"):
            prune(OwnNet(), Broken(macs=0.5, value=float("nan")), input_shape=(3, 8, 8))
    finally:
        del base._criteria[Broken]


def test_a_method_of_one_s_own_is_one_function() -> None:
    with pytest.raises(ConfigError, match=r"unknown prune config 'PruneConfig'; known: .*L1,"):
        prune(tiny_plain(), PruneConfig(macs=0.5))
    with pytest.raises(ConfigError, match="'L1' is registered already"):
        register_criterion(L1)
    with pytest.raises(ConfigError, match="takes a dataclass derived from PruneConfig"):
        register_criterion(OwnNet)  # type: ignore[arg-type]

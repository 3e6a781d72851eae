"""What holds for every static method of the registry, on small networks and on digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, bn, channels_last_net, conv, fc, images, inverted_net, option_a_net
from pruned import unheard
from small import digest, tiny_images, tiny_plain
from torch import Tensor

from cofire import Recipe, compile, cost, data, evaluate, fit, load, prune, save, trace
from cofire.pruning import PruneConfig, allocations, prune_types, recoveries
from cofire.pruning.base import allocate, scores
from cofire.pruning.removal import removable
from cofire.pruning.surgery import cut

METHODS = sorted({config.__name__ for config in prune_types().values()})


def config_of(method: str, macs: float, **options: Any) -> PruneConfig:
    return prune_types()[method](macs=macs, **options)


def dense_net() -> Net:
    """Norms behind concatenations, with large shifts."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.relu(m.bn0(m.stem(x)))
        y = torch.cat([x, F.relu(m.left(x)), m.right(x)], 1)
        return m.logits(F.relu(m.bn1(y)))

    net = Net(forward, stem=conv(3, 6), bn0=bn(6), left=conv(6, 5), right=conv(6, 4, 1), bn1=bn(15), fc=fc(15))
    with torch.no_grad():
        net.bn1.bias.add_(2)
    return net


NETS = {"residual": option_a_net, "depthwise": inverted_net, "concat": dense_net, "channels last": channels_last_net}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("method", METHODS)
def test_pruned_equals_masked(method: str, net: str, streams: bool) -> None:
    model = NETS[net]().eval()
    before = digest(model)
    few = [(images(12, seed=seed), torch.arange(12) % 5) for seed in range(2)]
    channels = removable(model, SHAPE, streams=streams)
    config = config_of(method, 0.75)
    masks = dict(allocate(model, channels, few, config, scores(model, channels, few, config)))
    assert channels.remaining(masks) <= 0.75
    assert all(bool(mask.any()) for mask in masks.values())
    with torch.no_grad():
        found = cut(model, channels, masks)(images())
    torch.testing.assert_close(found, unheard(model, channels, masks, images()), rtol=1e-5, atol=1e-5)
    assert digest(model) == before


@pytest.mark.parametrize("method", METHODS)
def test_a_method_runs_end_to_end_on_digits(method: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is needed (extra demo)")
    train, test = data.digits()
    model = tiny_plain()
    few = [batch for batch, _ in zip(train.loader(64), range(4), strict=False)]
    before = digest(model)
    small = prune(model, config_of(method, 0.5), few)
    assert digest(model) == before
    left = cost(trace(small), {}).dense_total / cost(trace(model), {}).dense_total
    assert 0.49 <= left <= 0.5
    assert digest(prune(model, config_of(method, 0.5), few)) == digest(small)  # the same again
    fit(small, few, Recipe(epochs=1, lr=0.02))
    assert evaluate(small, test.loader(360)).n == 360
    save(small, tmp_path)
    x = next(iter(test.loader(8)))[0]
    with torch.no_grad():
        expected = small(x)
        assert torch.equal(load(tmp_path)(x), expected)
    torch.testing.assert_close(compile(small)(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("macs", [0.3, 0.82, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_the_budget_is_met_within_one_point(method: str, macs: float) -> None:
    model = tiny_plain()
    few = list(tiny_images(48).loader(24))
    small = prune(model, config_of(method, macs), few)
    left = cost(trace(small), {}).dense_total / cost(trace(model), {}).dense_total
    assert macs - 0.01 <= left <= macs


@pytest.mark.parametrize("allocation", allocations())
@pytest.mark.parametrize("recovery", recoveries())
def test_every_allocation_goes_with_every_recovery(allocation: str, recovery: str) -> None:
    model = tiny_plain()
    few = list(tiny_images(48).loader(24))
    small = prune(model, config_of("L1", 0.5, allocation=allocation, recovery=recovery), few)
    left = cost(trace(small), {}).dense_total / cost(trace(model), {}).dense_total
    assert 0.49 <= left <= 0.5
    assert bool(torch.isfinite(small.eval()(few[0][0])).all())

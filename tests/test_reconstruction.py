"""ThiNet and CP: what the next layer's sums say, against brute force, numpy and scikit-learn."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, bn, conv, fc, images
from torch import Tensor

from cofire import DataError, prune
from cofire.pruning import L1, ThiNet
from cofire.pruning.base import scores
from cofire.pruning.cp import fitted, lasso, parts_of
from cofire.pruning.removal import removable
from cofire.pruning.sampling import Sample, samples
from cofire.pruning.thinet import factors, removal_order


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain_net() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.logits(F.relu(m.bn2(m.second(F.relu(m.bn1(m.first(x)))))))

    return Net(forward, first=conv(3, 8), bn1=bn(8), second=conv(8, 6), bn2=bn(6), fc=fc(6)).eval()


def loader() -> list[Any]:
    return [(images(16, seed=seed), torch.arange(16) % 5) for seed in range(3)]


# Sampling


def test_a_sample_is_what_the_layer_reads_and_gives() -> None:
    net = plain_net()
    sample = samples(net, ["second", "fc"], loader(), "a test")
    assert sample["second"].patch_NIK.shape == (480, 8, 9)
    with torch.no_grad():
        x = F.relu(net.bn1(net.first(loader()[0][0])))
        every = (net.second(x) - net.second.bias[:, None, None]).double().movedim(1, 3).flatten(0, 2)
    distance = torch.cdist(sample["second"].output_NO[:160], every).min(1).values
    assert float(distance.max()) < 1e-4  # each sampled output is one of the layer's


def test_methods_that_sample_need_images() -> None:
    with pytest.raises(DataError, match=r"ThiNet needs images: prune\(model, config, loader\)"):
        prune(plain_net(), ThiNet(macs=0.5), input_shape=SHAPE)


# ThiNet


@pytest.mark.parametrize("seed", range(5))
def test_every_step_of_thinet_is_the_best_of_all_candidates(seed: int) -> None:
    x_NO = some(40, 6, seed=seed) + some(40, 1, seed=9)  # channels that do not cancel
    order = removal_order(x_NO).tolist()
    assert sorted(order) == list(range(6))
    for step in range(6):
        gone = order[:step]
        costs = {j: float(x_NO[:, [*gone, j]].sum(1).square().sum()) for j in range(6) if j not in gone}
        assert order[step] == min(costs, key=costs.__getitem__)


def test_thinet_finds_the_pair_that_brute_force_finds() -> None:
    x_NO = some(50, 6, seed=3)
    x_NO[:, 4] = -x_NO[:, 1] + 0.01 * some(50, seed=4)  # two that cancel, and are small
    x_NO[:, [1, 4]] *= 0.1
    pairs = itertools.combinations(range(6), 2)
    best = min(pairs, key=lambda pair: float(x_NO[:, list(pair)].sum(1).square().sum()))
    assert set(removal_order(x_NO)[:2].tolist()) == set(best) == {1, 4}


def test_thinet_s_factors_are_those_of_least_squares() -> None:
    x_NI = some(60, 7)
    kept_I = torch.tensor([True, False, True, True, False, True, True])
    expected = np.linalg.lstsq(x_NI[:, kept_I].numpy(), x_NI.sum(1).numpy(), rcond=None)[0]
    torch.testing.assert_close(factors(x_NI, kept_I), torch.from_numpy(expected))


def test_a_channel_nobody_listens_to_is_the_first_to_leave() -> None:
    net = plain_net()
    with torch.no_grad():
        net.second.weight[:, 5] = 0
    found = scores(net, removable(net, SHAPE), loader(), ThiNet(macs=0.5))
    assert int(found["first"].argmin()) == 5


# CP


def test_lasso_keeps_the_count_and_what_matters() -> None:
    linear = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is needed (extra prune)")
    size_O = torch.tensor([5.0, 0.1, 4.0, 0.2, 3.0, 0.3], dtype=torch.float64)
    x_MO = some(200, 6) * size_O
    for count in range(1, 7):
        kept = lasso(linear, x_MO, count)
        assert int(kept.sum()) == count
        assert kept.nonzero().flatten().tolist() == sorted(size_O.argsort(descending=True)[:count].tolist())


def test_what_channels_add_up_to_is_the_output() -> None:
    sample = Sample(some(9, 4, 3), some(5, 4, 3, seed=1))
    parts = parts_of(sample, torch.tensor([1, 0, 1, 2]), 3)
    torch.testing.assert_close(parts.sum(1), sample.output_NO.T.flatten())


def test_the_fit_is_numpy_s_least_squares() -> None:
    sample, target_NP = Sample(some(80, 3, 4), some(5, 3, 4, seed=1)), some(80, 5, seed=2)
    expected = np.linalg.lstsq(sample.patch_NIK.flatten(1).numpy(), target_NP.numpy(), rcond=None)[0]
    torch.testing.assert_close(fitted(sample, target_NP).flatten(1), torch.from_numpy(expected.T))


@pytest.mark.parametrize("recovery", ["rescale", "least-squares"])
def test_a_recovery_comes_nearer_to_the_whole_model(recovery: str) -> None:
    net = plain_net()
    bare, recovered = (
        prune(net, L1(macs=0.59, recovery=how), loader(), input_shape=SHAPE) for how in ("none", recovery)
    )
    x = torch.cat([x for x, _ in loader()])
    with torch.no_grad():
        bare_error, error = (float((small(x) - net(x)).square().mean()) for small in (bare, recovered))
    assert error < bare_error

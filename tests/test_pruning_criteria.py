"""EagleEye, PFP, SCOP, DCP: what makes each of them that method, by hand or by trying everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nets import SHAPE, Net, bn, conv, fc, images
from small import digest, tiny_images, tiny_plain
from torch import Tensor, nn

from cofire import ConfigError, DataError, prune
from cofire.pruning import DCP, PFP, SCOP, EagleEye, eagleeye, scop
from cofire.pruning.base import allocate, scores
from cofire.pruning.dcp import Task, chosen
from cofire.pruning.eagleeye import candidates, quality
from cofire.pruning.pfp import errors, sample_size, sensitivity
from cofire.pruning.probe import Probe
from cofire.pruning.removal import removable
from cofire.pruning.sampling import Sample


def plain_net() -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        return m.logits(F.relu(m.bn2(m.second(F.relu(m.bn1(m.first(x)))))))

    return Net(forward, first=conv(3, 8), bn1=bn(8), second=conv(8, 6), bn2=bn(6), fc=fc(6)).eval()


def loader() -> list[Any]:
    return [(images(16, seed=seed), torch.arange(16) % 5) for seed in range(3)]


@pytest.mark.parametrize("config", [EagleEye(macs=0.5), SCOP(macs=0.5), DCP(macs=0.5)], ids=lambda c: type(c).__name__)
def test_methods_that_need_labels_say_so(config: Any) -> None:
    with pytest.raises(DataError, match="needs labelled images: prune"):
        prune(tiny_plain(), config)
    with pytest.raises(DataError, match="needs labelled images, got unlabelled ones"):
        prune(tiny_plain(), config, tiny_images(16, labelled=False).loader(8))


# EagleEye


def test_eagleeye_takes_the_candidate_with_the_best_score(monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = tiny_plain(), EagleEye(macs=0.5, candidates=6)
    channels = removable(model)
    batches = list(tiny_images(64).loader(16))
    found = scores(model, channels, batches, config)
    tried = candidates(channels, found, config)
    assert all(0.49 <= channels.remaining(masks) <= 0.5 for masks in tried)
    signatures = {tuple(int(mask.sum()) for mask in masks.values()) for masks in tried}
    assert len(signatures) > 3
    results = [quality(model, channels, masks, batches[:-1], batches[-1:]) for masks in tried]
    best = tried[results.index(max(results))]
    taken = allocate(model, channels, batches, config, found)
    assert all(torch.equal(taken[name], best[name]) for name in best)
    for wanted in range(6):  # whatever the score is
        order = iter(range(6))
        monkeypatch.setattr(eagleeye, "quality", lambda *args, order=order, wanted=wanted: next(order) == wanted)
        taken = allocate(model, channels, batches, config, found)
        assert all(torch.equal(taken[name], tried[wanted][name]) for name in taken)


def test_a_group_of_eagleeye_keeps_its_largest_filters() -> None:
    model, config = tiny_plain(), EagleEye(macs=0.5, candidates=1)
    channels = removable(model)
    found = scores(model, channels, None, config)
    (masks,) = candidates(channels, found, config)
    for name, mask in masks.items():
        if not bool(mask.all()):
            assert float(found[name][mask].min()) >= float(found[name][~mask].max())


def test_options_of_eagleeye_are_checked() -> None:
    with pytest.raises(ConfigError, match="candidates must be at least 1, got 0"):
        EagleEye(macs=0.5, candidates=0)
    with pytest.raises(ConfigError, match=r"least must be in \(0, 1\], got 0"):
        EagleEye(macs=0.5, least=0.0)


# PFP


def test_sensitivities_are_the_largest_shares_in_a_sum() -> None:
    patch_NIK = torch.tensor([[1.0, 3.0], [4.0, 0.0]], dtype=torch.float64)[:, :, None]
    one = torch.tensor([[1.0, 1.0]], dtype=torch.float64)[:, :, None]
    both = torch.arange(2)
    # 1 : 3 and 4 : 0
    assert sensitivity(Sample(patch_NIK[:1], one), both, 2).tolist() == [0.25, 0.75]
    assert sensitivity(Sample(patch_NIK, one), both, 2).tolist() == [1.0, 0.75]
    # a second filter with negative weights: 1 : 9 at the first place
    two = torch.cat([one, torch.tensor([[-1.0, -3.0]], dtype=torch.float64)[:, :, None]])
    assert sensitivity(Sample(patch_NIK[:1], two), both, 2).tolist() == [0.25, 0.9]
    # opposite signs do not share a sum: each is alone in its own
    apart = torch.tensor([[1.0, -1.0]], dtype=torch.float64)[:, :, None]
    assert sensitivity(Sample(patch_NIK[:1], apart), both, 2).tolist() == [1.0, 1.0]


def test_sample_sizes_follow_the_bound() -> None:
    assert sample_size(1.0, 2.0) == 3 * (6 + 2) * 2
    assert sample_size(2.0, 0.5) == 3 * (6 + 4) / 4 * 0.5
    sensitivity_O = torch.tensor([0.2, 0.9, 0.5, 0.4], dtype=torch.float64)
    found = errors(sensitivity_O)
    for channel, better in ((2, 1), (3, 2), (0, 3)):  # how many are more sensitive
        assert sample_size(float(found[channel]), 2.0) == pytest.approx(better)
    assert int(found.argmax()) == 1


def test_pfp_spends_the_budget_with_one_error_for_all() -> None:
    net = plain_net()
    channels = removable(net, SHAPE)
    config = PFP(macs=0.59)
    found = scores(net, channels, loader(), config)
    masks = allocate(net, channels, loader(), config, found)
    limits = {name: errors(score) for name, score in found.items()}
    kept = min(float(limits[name][mask].min()) for name, mask in masks.items())
    gone = [float(limits[name][~mask].max()) for name, mask in masks.items() if not bool(mask.all())]
    assert kept >= min(gone)


# SCOP


def test_scop_s_score_is_gamma_times_what_beta_says(monkeypatch: pytest.MonkeyPatch) -> None:
    net = plain_net()
    channels = removable(net, SHAPE)
    beta_F = torch.linspace(0, 1, 14, dtype=torch.float64)
    monkeypatch.setattr(scop, "trained_betas", lambda *args: beta_F)
    found = scores(net, channels, loader(), SCOP(macs=0.5))
    torch.testing.assert_close(found["first"], net.bn1.weight.detach().double().abs() * (2 * beta_F[:8] - 1))
    torch.testing.assert_close(found["second"], net.bn2.weight.detach().double().abs() * (2 * beta_F[8:] - 1))


@torch.no_grad()
def test_betas_of_one_leave_the_image_and_of_zero_the_knockoff() -> None:
    net = plain_net()
    channels = removable(net, SHAPE)
    both = images(6)
    for beta, expected in ((1.0, net(both[:3])), (0.0, net(both[3:]))):
        found = Probe(net, channels, scop.mixed(channels, torch.full((14,), beta))).run(both)
        torch.testing.assert_close(found[:3], expected)


def test_a_beta_rises_where_the_image_says_more_than_its_knockoff() -> None:
    net = Net(lambda m, x: m.logits(F.relu(m.first(x))), first=nn.Conv2d(1, 2, 1), fc=fc(2, 2)).eval()
    with torch.no_grad():
        net.first.weight.fill_(1)
        net.first.bias.zero_()
        net.fc.weight.copy_(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))  # the second channel is not looked at
        net.fc.bias.copy_(torch.tensor([1.0, -1.0]))
    label_B = torch.arange(32) % 2
    x = label_B.view(-1, 1, 1, 1).float().mul(2).expand(-1, 1, 4, 4)
    channels = removable(net, (1, 4, 4))
    used, unused = scop.trained_betas(net, channels, [(x, label_B)] * 5, SCOP(macs=0.5)).tolist()
    assert used > 0.55
    assert unused == 0.5


def test_permuted_knockoffs_are_the_batch_in_another_order() -> None:
    x = images(8)
    found = scop.permuted(x, torch.Generator().manual_seed(0))
    order = [next(i for i in range(8) if torch.equal(x[i], image)) for image in found]
    assert sorted(order) == list(range(8))
    assert order != list(range(8))


def test_gaussian_knockoffs_have_the_mean_and_deviation_of_each_pixel() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 1, 2, 2, generator=generator) * torch.tensor([[0.5, 1.0], [2.0, 4.0]]) + 3
    found = scop.gaussian(x, generator)
    torch.testing.assert_close(found.mean(0), x.mean(0), atol=0.3, rtol=0)
    torch.testing.assert_close(found.std(0), x.std(0), atol=0, rtol=0.1)
    flat = torch.ones(4, 1, 2, 2)
    assert torch.equal(scop.gaussian(flat, generator), flat)  # no deviation, no noise


def test_a_generator_of_ones_own_makes_the_knockoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scop, "_knockoffs", dict(scop._knockoffs))
    generator = nn.Sequential(nn.Linear(3, 64), nn.Unflatten(1, (1, 8, 8)))
    made: list[Tensor] = []

    @scop.register_knockoff("generator")
    def generated(x_BCHW: Tensor, random: torch.Generator) -> Tensor:
        made.append(generator(torch.randn(len(x_BCHW), 3, generator=random)))
        return made[-1]

    model, few = tiny_plain(), list(tiny_images(48).loader(24))
    config = SCOP(macs=0.5, knockoff="generator", epochs=2)
    small = prune(model, config, few)
    assert [len(images) for images in made] == [24] * 4
    assert not any(images.requires_grad for images in made)
    assert digest(prune(model, config, few)) == digest(small)
    assert torch.equal(made[0], made[4])  # what is random is SCOP's


def test_a_knockoff_that_is_the_image_itself_teaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scop, "_knockoffs", {**scop._knockoffs, "same": lambda x_BCHW, random: x_BCHW})
    net = plain_net()
    beta_F = scop.trained_betas(net, removable(net, SHAPE), loader(), SCOP(macs=0.5, knockoff="same"))
    assert beta_F.unique().tolist() == [0.5]


def test_knockoffs_are_chosen_by_name_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown knock-off 'gan'; known: gaussian, permuted"):
        SCOP(macs=0.5, knockoff="gan")
    with pytest.raises(ConfigError, match="a knock-off named 'permuted' is registered already"):
        scop.register_knockoff("permuted")
    monkeypatch.setattr(scop, "_knockoffs", {**scop._knockoffs, "one": lambda x_BCHW, random: x_BCHW[:1]})
    with pytest.raises(
        DataError, match=r"knock-off 'one' must make images of shape \(24, 1, 8, 8\), got \(1, 1, 8, 8\)"
    ):
        prune(tiny_plain(), SCOP(macs=0.5, knockoff="one"), list(tiny_images(24).loader(24)))


# DCP


@pytest.mark.parametrize("seed", range(8))
def test_dcp_s_first_channel_is_that_of_an_exhaustive_search(seed: int) -> None:
    torch.manual_seed(seed)
    layer = nn.Conv2d(5, 4, 3, padding=1)
    x, label_B = images(12, (5, 6, 6)), torch.arange(12) % 3
    task = Task(layer, x, label_B)
    weight, bias = task.classifier
    strengths = []
    for channel in range(5):
        alone = torch.zeros(4, 1, 3, 3, requires_grad=True)  # only this channel's weights, all others are zero
        output = F.conv2d(x[:, [channel]], alone, layer.bias, padding=1)
        with torch.no_grad():
            whole = layer(x)
        logits = F.relu(output).mean((2, 3)) / F.relu(whole).mean((2, 3)).std() @ weight.T + bias
        loss = (output - whole).square().mean() / whole.var() + F.cross_entropy(logits, label_B)
        strengths.append(float(torch.autograd.grad(loss, alone)[0].norm()))
    kept = chosen({"layer": (task, torch.arange(5))}, 1, 5, DCP(macs=0.5))
    assert kept.nonzero().item() == max(range(5), key=strengths.__getitem__)


def test_dcp_takes_as_many_as_the_budget_allows() -> None:
    torch.manual_seed(0)
    task = Task(nn.Conv2d(6, 4, 1), images(12, (6, 4, 4)), torch.arange(12) % 3)
    for at_once in (1, 4):
        for count in (1, 3, 6):
            kept = chosen({"layer": (task, torch.arange(6))}, count, 6, DCP(macs=0.5, at_once=at_once))
            assert int(kept.sum()) == count


def test_a_classifier_of_dcp_reads_the_labels() -> None:
    label_B = torch.arange(20) % 4
    x = F.one_hot(label_B, 4).float().view(20, 4, 1, 1).expand(-1, -1, 3, 3)
    layer = nn.Conv2d(4, 4, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4).view(4, 4, 1, 1))
    task = Task(layer, x, label_B)
    with torch.no_grad():
        assert float(task.loss(layer.weight)) < 0.2
        assert float(task.loss(torch.zeros_like(layer.weight))) > 1

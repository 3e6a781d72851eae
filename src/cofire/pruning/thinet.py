"""ThiNet: channels leave that the next layer's sums miss least (Luo et al. 2017).

At random places the next layer's output is a sum of what its inputs add. Channels are taken away one by one, each time
the one with which the sum of all that is gone stays smallest; those that stay are scaled to make up for it.

Shapes: N places, I inputs, O channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader
from cofire.pruning.base import Masks, PruneConfig, register_criterion, register_recovery
from cofire.pruning.channels import Channels
from cofire.pruning.sampling import least_squares, listeners, of_channels, samples


@dataclass(frozen=True, kw_only=True)
class ThiNet(PruneConfig):
    """A channel's score is its place in the greedy order of removal. All groups are ranked on the whole network, in one
    go; the paper goes layer by layer and trains in between."""

    recovery: str = "rescale"


@register_criterion(ThiNet)
def thinet_scores(model: nn.Module, channels: Channels, loader: AnyLoader | None, config: ThiNet) -> dict[str, Tensor]:
    """Group -> (O,) float64."""
    readers = {layer for group in channels.groups.values() for layer in group.inputs}
    found = samples(model, sorted(readers), loader, "ThiNet")
    generator = torch.Generator().manual_seed(0)
    added = {layer: sample.contributions(generator) for layer, sample in found.items()}
    scores = {}
    for name, group in channels.groups.items():
        x_NO = torch.cat(
            [of_channels(channel_I, group.size, added[layer]) for layer, channel_I in group.inputs.items()]
        )
        scores[name] = removal_order(x_NO).argsort().double()
    return scores


def removal_order(x_NO: Tensor) -> Tensor:
    """Channels in the order in which they leave, int64 (O,).

    Next is always the one that gives the smallest sum over places of (what all that is gone added there) squared.
    """
    gram_OO = x_NO.T @ x_NO
    with_gone_O = torch.zeros(len(gram_OO), dtype=gram_OO.dtype)  # products with the sum of what is gone
    order: list[int] = []
    for _ in range(len(gram_OO)):
        growth_O = 2 * with_gone_O + gram_OO.diagonal()
        growth_O[order] = float("inf")
        order.append(int(growth_O.argmin()))
        with_gone_O += gram_OO[order[-1]]
    return torch.tensor(order)


@register_recovery("rescale")
def rescale(
    model: nn.Module,
    smaller: nn.Module,
    channels: Channels,
    masks: Masks,
    loader: AnyLoader | None,
    config: PruneConfig,
) -> None:
    """One factor for each input of the layers that lost some, by least squares against the whole model's sums."""
    lost = listeners(channels, masks)
    generator = torch.Generator().manual_seed(0)
    for layer, sample in samples(model, lost, loader, 'recovery = "rescale"').items():
        factor_I = factors(sample.contributions(generator), lost[layer])
        weight = smaller.get_submodule(layer).get_parameter("weight")
        with torch.no_grad():
            weight.mul_(factor_I.to(weight).view(1, -1, *[1] * (weight.ndim - 2)))


def factors(x_NI: Tensor, kept_I: Tensor) -> Tensor:
    """Factors on the inputs that are left, with which they come nearest to the sum of all; where many do, those next
    to 1."""
    left = x_NI[:, kept_I]
    return 1 + least_squares(left, (x_NI.sum(1) - left.sum(1))[:, None])[:, 0]

"""PFP: provable filter pruning (Liebenwein et al. 2020).

A channel's sensitivity is the largest share it ever has in one of the next layer's sums. A bound on the error says how
many channels, drawn by sensitivity, a group needs for a given error; one error for all groups follows from the budget.

Shapes: N places, I inputs, K taps, O channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader
from cofire.pruning.allocation import within_budget
from cofire.pruning.base import Masks, PruneConfig, Scores, register_allocation, register_criterion
from cofire.pruning.channels import Channels
from cofire.pruning.sampling import Sample, of_channels, samples

_PLACES = 400
_K = 3.0  # the bound's constant, as in the authors' code


@dataclass(frozen=True, kw_only=True)
class PFP(PruneConfig):
    """A channel's score is its sensitivity. The deterministic form: the most sensitive ones stay."""

    allocation: str = "samples"


@register_criterion(PFP)
def sensitivities(model: nn.Module, channels: Channels, loader: AnyLoader | None, config: PFP) -> dict[str, Tensor]:
    """Group -> (O,) float64 in [0, 1]: the largest over all layers that read a channel."""
    readers = {layer for group in channels.groups.values() for layer in group.inputs}
    found = samples(model, sorted(readers), loader, "PFP")
    return {
        name: torch.stack(
            [sensitivity(found[layer], channel_I, group.size) for layer, channel_I in group.inputs.items()]
        ).amax(0)
        for name, group in channels.groups.items()
    }


def sensitivity(sample: Sample, channel_I: Tensor, size: int) -> Tensor:
    """The largest share of a channel in the positive, or in the negative, part of any sum, float64 (O,)."""
    patch_NIK = sample.patch_NIK[:_PLACES]
    largest_O = torch.zeros(size, dtype=torch.float64)
    for weight_IK in sample.weight_OIK:
        for sign in (1, -1):
            part_NI = (sign * patch_NIK * weight_IK).clamp(min=0).sum(2)
            share_NI = part_NI / part_NI.sum(1, keepdim=True).clamp(min=1e-30)
            largest_O = torch.maximum(largest_O, of_channels(channel_I, size, share_NI).amax(0))
    return largest_O


@register_allocation("samples")
def samples_needed(
    model: nn.Module, channels: Channels, loader: AnyLoader | None, config: PruneConfig, scores: Scores
) -> Masks:
    """One error for all groups, as small as the budget allows."""
    return within_budget({name: errors(score_O) for name, score_O in scores.items()}, config.macs, channels.remaining)


def sample_size(error: float, total: float) -> float:
    """How many channels a group needs for ``error``, if its sensitivities sum up to ``total``."""
    return _K * (6 + 2 * error) / error**2 * total


def errors(sensitivity_O: Tensor) -> Tensor:
    """The error at which a group does without a channel, float64 (O,): the one for which all better ones suffice.

    With r better ones, it solves ``sample_size(error, total) = r``; the best never leaves.
    """
    total = float(sensitivity_O.double().sum())
    better_O = sensitivity_O.argsort(descending=True, stable=True).argsort().double().clamp(min=0.5)
    return (_K * total + (_K**2 * total**2 + 6 * _K * total * better_O).sqrt()) / better_O

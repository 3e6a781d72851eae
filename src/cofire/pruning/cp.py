"""CP: channels leave by LASSO and least squares (He et al. 2017, "Channel pruning for very deep networks").

The next layer's output is rebuilt from its input channels with one factor each. A growing penalty drives factors to
zero until as few channels are left as the budget allows; then the next layer's weights are fitted anew to what the
whole model gives.

Shapes: N places, I inputs, K taps, O channels, P filters.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader
from cofire.extras import require
from cofire.pruning.allocation import uniform_counts
from cofire.pruning.base import Masks, PruneConfig, register_criterion, register_recovery
from cofire.pruning.channels import Channels
from cofire.pruning.sampling import Sample, least_squares, listeners, of_channels, samples

_PLACES = 400  # of a layer that LASSO sees
_HALVINGS = 30


@dataclass(frozen=True, kw_only=True)
class CP(PruneConfig):
    """LASSO selects the channels; every group keeps the same share. The paper prunes deeper layers less."""

    recovery: str = "least-squares"


@register_criterion(CP)
def cp_selection(model: nn.Module, channels: Channels, loader: AnyLoader | None, config: CP) -> dict[str, Tensor]:
    """Group -> bool (O,)."""
    linear = require("sklearn.linear_model", package="scikit-learn", extra="prune")
    readers = {layer for group in channels.groups.values() for layer in group.inputs}
    found = samples(model, sorted(readers), loader, "CP")
    counts = uniform_counts(channels, config.macs)
    selection = {}
    for name, group in channels.groups.items():
        parts = [parts_of(found[layer], channel_I, group.size) for layer, channel_I in group.inputs.items()]
        selection[name] = lasso(linear, torch.cat(parts), counts[name])
    return selection


def parts_of(sample: Sample, channel_I: Tensor, size: int) -> Tensor:
    """What each channel adds to the outputs at some places, float64 (places x P, O)."""
    patch_NIK = sample.patch_NIK[: max(1, min(_PLACES, len(sample.patch_NIK)))]
    by_filter = [of_channels(channel_I, size, (patch_NIK * weight_IK).sum(2)) for weight_IK in sample.weight_OIK]
    return torch.cat(by_filter)


def lasso(linear: ModuleType, x_MO: Tensor, count: int) -> Tensor:
    """The ``count`` channels that LASSO keeps to rebuild the sum of all: bool (O,).

    The penalty is halved towards the smallest with at most ``count`` factors that are not zero. Where it jumps over
    the count, the strongest factors just below it fill up.
    """
    size = x_MO.shape[1]
    if count >= size:
        return torch.ones(size, dtype=torch.bool)
    x, y = x_MO.numpy(), x_MO.sum(1).numpy()
    low, high = 0.0, float((x_MO.T @ x_MO.sum(1)).abs().max()) / len(y)  # at the highest all factors are zero
    few = many = torch.zeros(size, dtype=torch.float64)
    for _ in range(_HALVINGS):
        alpha = (low + high) / 2
        if alpha <= 0:
            break
        model = linear.Lasso(alpha=alpha, fit_intercept=False, precompute=True, max_iter=2000, tol=1e-3)
        factor_O = torch.from_numpy(model.fit(x, y).coef_).abs().double()
        if int((factor_O > 0).sum()) <= count:
            high, few = alpha, factor_O
        else:
            low, many = alpha, factor_O
        if int((few > 0).sum()) == count:
            break
    scale = 1 + float(many.max())
    kept = torch.zeros(size, dtype=torch.bool)
    kept[(few.sign() * scale + many).topk(count).indices] = True
    return kept


@register_recovery("least-squares")
def refit(
    model: nn.Module,
    smaller: nn.Module,
    channels: Channels,
    masks: Masks,
    loader: AnyLoader | None,
    config: PruneConfig,
) -> None:
    """Layer by layer, weights of those that lost inputs are fitted to what the whole model gives there."""
    lost = listeners(channels, masks)
    why = 'recovery = "least-squares"'
    wanted = samples(model, lost, loader, why)
    filters = _kept_filters(channels, masks)
    for layer in lost:
        read = samples(smaller, [layer], loader, why)[layer]
        target_NP = wanted[layer].output_NO[:, filters[layer]]
        weight = smaller.get_submodule(layer).get_parameter("weight")
        with torch.no_grad():
            weight.copy_(fitted(read, target_NP).to(weight).view_as(weight))


def fitted(sample: Sample, target_NP: Tensor) -> Tensor:
    """Weights (P, I, K) with which the sampled inputs come nearest to the target; where many do, those next to the
    layer's own."""
    change = least_squares(sample.patch_NIK.flatten(1), target_NP - sample.output_NO)
    return sample.weight_OIK + change.T.view_as(sample.weight_OIK)


def _kept_filters(channels: Channels, masks: Masks) -> dict[str, Tensor]:
    """Layer -> which of its filters stay, bool (P,)."""
    kept = channels.kept_ids(masks)
    return {op.conv.module: kept[op.own] for op in channels.graph.ops if op.conv is not None}

"""fit_heads(model, images, macs): FTWT without training the network. Heads, their budget and batch norms from one look.

A filter's saliency for an image is how much the network's own decision hangs on it: the sum over its map of
|output * gradient of the margin between the two best classes|. No label is needed. Each group keeps the same number of
filters for every image, so the cost is known and met. That number comes from one price for all groups: a filter is
worth keeping where the saliency that the heads can find at its rank, divided by the MACs it costs, is above the price.

Shapes: N images, B of a batch, F pooled features, O filters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, first_images
from cofire.errors import ConfigError
from cofire.gates.base import Decision
from cofire.gates.fixed import Fixed, mask_row
from cofire.gates.ftwt import FTWT
from cofire.gates.gating import GatedModel, gate
from cofire.gates.heads import Head
from cofire.gates.lockstep import refit
from cofire.gates.targets import largest
from cofire.graph.cost import cost
from cofire.graph.graph import Graph
from cofire.graph.masks import FilterMask
from cofire.graph.tracing import evaluating
from cofire.graph.units import Site

_RIDGE = 1e-3  # of standardised features: enough to keep the least squares solvable
_LEAST = 8  # a group keeps at least one in so many filters
_TRIED = 64  # images on which a budget is counted
_PAYS = 0.2  # a head stays if it saves this share of the saliency that a fixed choice loses
_BATCH = 125  # images whose gradients are held at once


def fit_heads(
    model: nn.Module,
    loader: AnyLoader,
    *,
    macs: float,
    images: int = 10_000,
    input_shape: tuple[int, int, int] | None = None,
) -> GatedModel:
    """A gated copy of ``model`` that executes ``macs`` of its MACs for every image; nothing is trained by gradients.

    The heads read maxima and means of their inputs and are fitted by least squares, layer by layer, to what the dense
    network's decisions hang on; batch norms are fitted anew under the masks.

    Args:
        loader: batches of images, with or without labels; the more the better up to some thousands.
        macs: share of the MACs that remains, heads included, in (0, 1).
        images: how many to use at most.
        input_shape: (C, H, W); default: that of the images.

    Raises:
        ConfigError: the budget cannot be met; says what can.
    """
    if not 0.0 < macs < 1.0:
        raise ConfigError(f"macs is the share of MACs that remains and must be in (0, 1), got {macs}")
    batches = first_images(loader, images)
    channels, height, width = batches[0].shape[1:]
    probe = gate(model, Fixed(), input_shape=input_shape or (channels, height, width)).eval()
    seen = _look(probe, batches)
    kept = _kept_for(probe.graph, seen, macs)
    config = FTWT(signature=kept, select="top", pool="both", softmax=False, standardise=True, saliency="l2")
    shape = probe.graph.input_shape
    gated = gate(model, config, filter_fn=lambda unit: unit.group in kept, input_shape=shape).eval()

    def choose(site: Site, inputs: list[Tensor]) -> Tensor:
        head: Head = gated.gates[site.name].head
        features_NF = torch.cat([head.pooled(x) for x in inputs])
        saliency_NO, k = seen[site.name].saliency_NO, kept[site.name]
        _fit(head, features_NF, _relative(saliency_NO))
        mask_NO = largest(_logits(head, features_NF), k)
        if _gain(saliency_NO, mask_NO, k) < _PAYS:
            nn.init.zeros_(head.linear.weight)  # the filters that count most on average, for every image
            mask_NO = largest(_logits(head, features_NF), k)
        return mask_NO.to(features_NF.dtype)

    refit(gated.graph, copy.deepcopy(model).eval(), batches, choose, "fitting heads")
    return gated


def static_twin(model: nn.Module, gated: GatedModel, loader: AnyLoader, *, images: int = 10_000) -> GatedModel:
    """The same number of filters per group as ``gated``, those most often on, for every image: what it must beat.

    Batch norms are fitted anew under the fixed masks, as they were for ``gated``. It executes the same MACs, no heads.

    Args:
        model: the dense network both come from.
        loader: the images that the filters' rates are counted on.
    """
    batches = first_images(loader, images)
    rates = {name: torch.zeros(site.filters, dtype=torch.float64) for name, site in gated.gates.sites.items()}
    counts = dict.fromkeys(rates, 0)
    with torch.no_grad(), evaluating(gated):
        for batch in batches:
            gated(batch)
            for name, mask_BO in gated.masks.items():
                rates[name] += mask_BO.double().sum(0).cpu()
                counts[name] += int(mask_BO.sum())
    total = sum(len(batch) for batch in batches)
    chosen: dict[str, tuple[int, ...]] = {}
    for name, rate_O in rates.items():
        most_often_first = rate_O.argsort(descending=True, stable=True).tolist()
        chosen[name] = tuple(sorted(most_often_first[: max(1, round(counts[name] / total))]))
    config, shape = Fixed(kept=chosen, always=True), gated.graph.input_shape
    twin = gate(model, config, filter_fn=lambda unit: unit.group in chosen, input_shape=shape).eval()
    rows = {name: mask_row(config, site) for name, site in twin.gates.sites.items()}
    refit(twin.graph, copy.deepcopy(model).eval(), batches, lambda site, _: rows[site.name], "fitting the twin")
    return twin


@dataclass(frozen=True)
class _Seen:
    """What one pass over images told about a group."""

    saliency_NO: Tensor
    features_NF: Tensor


def _look(probe: GatedModel, batches: list[Tensor]) -> dict[str, _Seen]:
    """Saliencies and pooled inputs of every group, from the dense network and one backward pass per batch."""
    saliency: dict[str, list[Tensor]] = {name: [] for name in probe.gates}
    features: dict[str, list[Tensor]] = {name: [] for name in probe.gates}
    outputs: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str, decision: Decision, y_BOHW: Tensor) -> None:
        y_BOHW.retain_grad()
        outputs[name] = y_BOHW, y_BOHW.detach().clone()

    probe.requires_grad_(False)
    with probe.force("open"), probe.observe(watch), _watched_inputs(probe, features):
        for batch in (part for whole in batches for part in whole.split(_BATCH)):
            logits_BK = probe(batch.clone().requires_grad_())
            best_B2 = logits_BK.topk(2, dim=1).values
            (best_B2[:, 0] - best_B2[:, 1]).sum().backward()
            for name, (y_BOHW, value_BOHW) in outputs.items():
                assert y_BOHW.grad is not None
                saliency[name].append((value_BOHW * y_BOHW.grad).abs().flatten(2).sum(2))
            outputs.clear()
    return {name: _Seen(torch.cat(saliency[name]), torch.cat(features[name])) for name in saliency}


@contextmanager
def _watched_inputs(probe: GatedModel, features: Mapping[str, list[Tensor]]) -> Iterator[None]:
    """Inside the block what heads would see of each group's input is kept."""
    pooled = Head(1, 1, pool="both", softmax=False, bias=False).pooled

    def keep(name: str, conv: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        features[name].append(pooled(inputs[0].detach()))

    modules = {name: probe.backbone.get_submodule(site.units[0].name) for name, site in probe.gates.sites.items()}
    hooks = [module.register_forward_pre_hook(partial(keep, name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _kept_for(graph: Graph, seen: Mapping[str, _Seen], macs: float) -> dict[str, int]:
    """Filters per group for a budget; groups that keep all are left out.

    Raises:
        ConfigError: the budget cannot be met.
    """
    sites = {site.name: site for site in graph.sites}
    worth = {name: _found_at_rank(one) / _macs_per_filter(graph, sites[name]) for name, one in seen.items()}
    prices = torch.cat(list(worth.values())).sort().values

    def at(price: Tensor) -> dict[str, int]:
        kept = {name: int((worth_O >= price).sum()) for name, worth_O in worth.items()}
        kept = {name: max(k, -(-sites[name].filters // _LEAST)) for name, k in kept.items()}
        return {name: k for name, k in kept.items() if k < sites[name].filters}

    low, high = 0, len(prices) - 1
    while low < high:  # the lowest price whose filters fit
        middle = (low + high) // 2
        low, high = (low, middle) if _share(graph, sites, seen, at(prices[middle])) <= macs else (middle + 1, high)
    found = at(prices[low])
    if (least := _share(graph, sites, seen, found)) > macs + 0.005:
        raise ConfigError(f"macs={macs} cannot be met: with one filter in {_LEAST}, {least:.3f} of the MACs are left")
    return found


def _found_at_rank(seen: _Seen) -> Tensor:
    """Mean saliency of the filter that a head puts at each rank, falling, (O,)."""
    saliency_NO, features_NF = seen.saliency_NO, seen.features_NF
    head = Head(
        features_NF.shape[1] // 2, saliency_NO.shape[1], pool="both", softmax=False, bias=True, standardise=True
    )
    _fit(head, features_NF, _relative(saliency_NO))
    order_NO = _logits(head, features_NF).argsort(dim=1, descending=True)
    return saliency_NO.gather(1, order_NO).double().mean(0).flip(0).cummax(0).values.flip(0)


def _macs_per_filter(graph: Graph, site: Site) -> float:
    """What switching off one filter of a group saves, in its own convs and in those that read it."""
    half = torch.arange(site.filters)[None] % 2 == 0
    found = cost(graph, {site.name: FilterMask(half)})
    return max(1.0, (found.dense_total - int(found.total("executed"))) / (site.filters - int(half.sum())))


def _share(graph: Graph, sites: Mapping[str, Site], seen: Mapping[str, _Seen], kept: Mapping[str, int]) -> float:
    """Share of the MACs that so many filters leave, heads included, on some images."""
    masks = {name: FilterMask(largest(seen[name].saliency_NO[:_TRIED], k)) for name, k in kept.items()}
    heads = {name: 2 * sites[name].units[0].in_channels * sites[name].filters for name in kept}
    return 1 - float(cost(graph, masks, heads=heads).reduction("executed+heads").mean())


def _relative(saliency_NO: Tensor) -> Tensor:
    """Saliency in units of the image's mean, so that images count alike."""
    return saliency_NO / saliency_NO.mean(1, keepdim=True).clamp_min(1e-12)


def _gain(saliency_NO: Tensor, mask_NO: Tensor, k: int) -> float:
    """Of the saliency that the best fixed k filters lose, the share that the masks save."""
    fixed_1O = largest(saliency_NO.mean(0, keepdim=True), k)
    return 1 - float((saliency_NO * ~mask_NO).sum() / (saliency_NO * ~fixed_1O).sum().clamp_min(1e-12))


@torch.no_grad()
def _fit(head: Head, features_NF: Tensor, target_NO: Tensor) -> None:
    """The head's statistics and linear map by ridge regression, in closed form; in place."""
    assert head.norm is not None
    assert head.norm.running_mean is not None
    assert head.norm.running_var is not None
    head.norm.running_mean.copy_(features_NF.mean(0))
    head.norm.running_var.copy_(features_NF.var(0, unbiased=False))
    x_NF = head.norm.eval()(features_NF).double()
    wanted_NO = target_NO.double()
    gram_FF = x_NF.T @ x_NF / len(x_NF) + _RIDGE * torch.eye(x_NF.shape[1], dtype=torch.float64)
    both_FO = x_NF.T @ (wanted_NO - wanted_NO.mean(0)) / len(x_NF)
    head.linear.weight.copy_(torch.linalg.solve(gram_FF, both_FO).T)
    head.linear.bias.copy_(wanted_NO.mean(0))


@torch.no_grad()
def _logits(head: Head, features_NF: Tensor) -> Tensor:
    assert head.norm is not None
    logits_NO: Tensor = head.linear(head.norm.eval()(features_NF))
    return logits_NO

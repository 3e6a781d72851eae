"""fit_heads(model, images, macs): FTWT without training the network. Heads, their budget and batch norms from one look.

A filter's saliency for an image is how much the network's own decision hangs on it: the sum over its map of
|output * gradient of the margin between the two best classes|. No label is needed. Each group keeps the same number of
filters for every image, so the cost is known and met. That number comes from one price for all groups: a filter is
worth keeping where the saliency that the heads can find at its rank, divided by the MACs it costs, is above the price.

Shapes: N images, B of a batch, F pooled features, O filters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from cofire.data.feeding import AnyLoader, first_images
from cofire.errors import ConfigError
from cofire.gates.base import Decision
from cofire.gates.fixed import Fixed, mask_row
from cofire.gates.ftwt import FTWT
from cofire.gates.gating import GatedModel, gate
from cofire.gates.heads import PoolingHead
from cofire.gates.lockstep import chunks, refit
from cofire.gates.targets import largest
from cofire.graph.cost import cost
from cofire.graph.graph import Graph
from cofire.graph.masks import FilterMask
from cofire.graph.tracing import evaluating
from cofire.graph.units import Site
from cofire.progress import progress

_RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # of standardised features; the one with the least error on images left out
_LEAST = 8  # a group keeps at least one in so many filters
_TRIED = 64  # images on which a budget is counted
_PAYS = 0.2  # a head stays if it saves this share of the saliency that a fixed choice at its cost loses
_BATCH = 125  # images whose gradients are held at once at most


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
    return Look(model, first_images(loader, images), input_shape).fitted(macs)


def static_twin(model: nn.Module, gated: GatedModel, loader: AnyLoader, *, images: int = 10_000) -> GatedModel:
    """The same number of filters per group as ``gated``, those most often on, for every image: what it must beat.

    Batch norms are fitted anew under the fixed masks, as they were for ``gated``. It executes the same MACs, no heads.

    Args:
        model: the dense network both come from.
        loader: the images that the filters' rates are counted on.
    """
    batches = first_images(loader, images)
    chosen = most_often_on(gated, batches)
    config, shape = Fixed(kept=chosen, always=True), gated.graph.input_shape
    twin = gate(model, config, filter_fn=lambda unit: unit.group in chosen, input_shape=shape).eval()
    rows = {name: mask_row(chosen, site) for name, site in twin.gates.sites.items()}
    refit(twin.graph, copy.deepcopy(model).eval(), batches, lambda site, _: rows[site.name], "fitting the twin")
    return twin


def most_often_on(gated: GatedModel, batches: Sequence[Tensor]) -> dict[str, tuple[int, ...]]:
    """Group -> as many filters as run in the mean over images, those that run most often, by their index."""
    chosen: dict[str, tuple[int, ...]] = {}
    for name, rate_O in keep_rates(gated, batches).items():
        most_often_first = rate_O.argsort(descending=True, stable=True).tolist()
        chosen[name] = tuple(sorted(most_often_first[: max(1, round(float(rate_O.sum())))]))
    return chosen


def keep_rates(gated: GatedModel, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Group -> the share of images that each filter runs for, float64 (O,)."""
    rates = {name: torch.zeros(site.filters, dtype=torch.float64) for name, site in gated.gates.sites.items()}
    with torch.no_grad(), evaluating(gated):
        for batch in chunks(batches):
            gated(batch)
            for name, mask_BO in gated.masks.items():
                rates[name] += mask_BO.double().sum(0).cpu()
    total = sum(len(batch) for batch in batches)
    return {name: rate_O / total for name, rate_O in rates.items()}


@dataclass(frozen=True)
class _Seen:
    """What one pass over images told about a group."""

    saliency_NO: Tensor
    features_NF: Tensor

    def strongest(self, k: int) -> tuple[int, ...]:
        """The filters that count most on average."""
        return tuple(largest(self.saliency_NO.mean(0, keepdim=True), k)[0].nonzero().flatten().tolist())


@dataclass(frozen=True)
class _Plan:
    """Filters per group, and the groups in which they are the same for every image."""

    kept: dict[str, int]
    fixed: frozenset[str]


@final
class Look:
    """What one pass over images told about a network: enough to make heads for any budget.

    Args:
        batches: of images, which are held on to.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Tensor], input_shape: tuple[int, int, int] | None = None
    ) -> None:
        channels, height, width = batches[0].shape[1:]
        probe = gate(model, Fixed(), input_shape=input_shape or (channels, height, width)).eval()
        self._model, self._batches, self._graph = model, batches, probe.graph
        self._seen = _look(probe, batches)
        self._groups = {site.name: _Group(probe.graph, site, self._seen[site.name]) for site in probe.graph.sites}

    def unfitted(self, macs: float) -> GatedModel:
        """The gated model of a budget with heads of chance: it costs what the fitted one will."""
        plan = _plan_for(self._graph, self._groups, macs)
        config = FTWT(
            signature=plan.kept,
            fixed={name: self._seen[name].strongest(plan.kept[name]) for name in plan.fixed},
            select="top",
            pool="both",
            softmax=False,
            standardise=True,
            saliency="l2",
        )
        shape = self._graph.input_shape
        return gate(self._model, config, filter_fn=lambda unit: unit.group in plan.kept, input_shape=shape).eval()

    def fitted(self, macs: float) -> GatedModel:
        """The same with heads and batch norms fitted."""
        gated = self.unfitted(macs)
        self.refit(gated)
        return gated

    def refit(self, gated: GatedModel) -> None:
        """Fit heads and batch norms of a model that `unfitted` gave, whatever its weights are now; in place."""

        def choose(site: Site, inputs: Iterable[Tensor]) -> Tensor:
            one = gated.gates[site.name]
            if one.fixed:
                return mask_row(gated.gates.config.fixed, site)
            features_NF = torch.cat([one.head.pooled(x) for x in inputs])
            return largest(_fit(one.head, features_NF, _relative(self._seen[site.name].saliency_NO)), one.k)

        refit(gated.graph, copy.deepcopy(self._model).eval(), self._batches, choose, "fitting heads")


def _look(probe: GatedModel, batches: Sequence[Tensor]) -> dict[str, _Seen]:
    """Saliencies and pooled inputs of every group, from the dense network and one backward pass per batch."""
    saliency: dict[str, list[Tensor]] = {name: [] for name in probe.gates}
    features: dict[str, list[Tensor]] = {name: [] for name in probe.gates}
    outputs: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str, decision: Decision, y_BOHW: Tensor) -> None:
        y_BOHW.retain_grad()
        outputs[name] = y_BOHW, y_BOHW.detach().clone()

    probe.requires_grad_(False)
    with probe.force("open"), probe.observe(watch), _watched_inputs(probe, features), progress("looking") as bar:
        for batch in bar.track(list(chunks(batches, _BATCH)), description="looking"):
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
    pooled = PoolingHead(1, 1, pool="both", softmax=False, bias=False).pooled

    def keep(site: Site, conv: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        features[site.name].append(pooled(x.movedim(-1, 1) if probe.graph[site.first].last else x))

    hooks = [
        probe.backbone.get_submodule(site.units[0].name).register_forward_pre_hook(partial(keep, site))
        for site in probe.graph.sites
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _plan_for(graph: Graph, groups: Mapping[str, _Group], macs: float) -> _Plan:
    """Filters per group for a budget; groups that keep all are left out.

    Raises:
        ConfigError: the budget cannot be met.
    """
    prices = torch.cat([group.worth_O for group in groups.values()]).sort().values

    def planned(kept: Mapping[str, int]) -> _Plan:
        fewer = {name: k for name, k in kept.items() if k < groups[name].filters}
        return _Plan(fewer, frozenset(name for name, k in fewer.items() if not groups[name].pays(k)))

    def at(price: Tensor) -> _Plan:
        return planned({name: group.kept(price) for name, group in groups.items()})

    def share(plan: _Plan) -> float:
        """Of the MACs that the plan leaves, heads included, on some images."""
        masks = {name: groups[name].mask(k, name in plan.fixed) for name, k in plan.kept.items()}
        heads = {name: 0 if name in plan.fixed else groups[name].head_macs for name in plan.kept}
        return 1 - float(cost(graph, masks, heads=heads).reduction("executed+heads").mean())

    low, high = 0, len(prices) - 1
    while low < high:  # the lowest price whose filters fit
        middle = (low + high) // 2
        low, high = (low, middle) if share(at(prices[middle])) <= macs else (middle + 1, high)
    found = at(prices[low])
    if (least := share(found)) > macs + 0.005:
        raise ConfigError(f"macs={macs} cannot be met: with one filter in {_LEAST}, {least:.3f} of the MACs are left")
    for name in sorted(groups, key=lambda name: groups[name].next_worth(found.kept.get(name)), reverse=True):
        while name in found.kept:  # what one price for all leaves of the budget
            more = planned({**found.kept, name: found.kept[name] + 1})
            if share(more) > macs:
                break
            found = more
    return found


@final
class _Group:
    """What each filter more is worth in a group, chosen per image and fixed."""

    def __init__(self, graph: Graph, site: Site, seen: _Seen) -> None:
        self.filters = site.filters
        self.head_macs = seen.features_NF.shape[1] * site.filters
        each = _macs_per_filter(graph, site)
        logits_NO = _logits(seen)
        found_O = _found_at_rank(seen.saliency_NO, logits_NO)
        self._mean_1O, self._logits_NO = seen.saliency_NO.mean(0, keepdim=True), logits_NO[:_TRIED]
        self.worth_O = found_O / each
        self._lost_O = _lost(found_O)
        self._lost_fixed_O = _lost(seen.saliency_NO.double().mean(0).sort(descending=True).values)
        self._as_many = round(self.head_macs / each)  # filters that a fixed choice could keep in place of the head

    def kept(self, price: Tensor) -> int:
        return max(int((self.worth_O >= price).sum()), -(-self.filters // _LEAST))

    def next_worth(self, k: int | None) -> float:
        """Of one filter more than k; 0 where all are kept."""
        return 0.0 if k is None else float(self.worth_O[k])

    def mask(self, k: int, fixed: bool) -> FilterMask:
        """Of some images."""
        mask = largest(self._mean_1O if fixed else self._logits_NO, k)
        return FilterMask(mask.expand(len(self._logits_NO), -1))

    def pays(self, k: int) -> bool:
        """Whether k filters chosen by a head lose clearly less than fixed ones at the same cost."""
        fixed = float(self._lost_fixed_O[min(k + self._as_many, self.filters)])
        return float(self._lost_O[k]) < (1 - _PAYS) * fixed


def _lost(worth_O: Tensor) -> Tensor:
    """Saliency that is lost where the first k filters are kept, for k = 0..O, (O + 1,)."""
    return torch.cat([worth_O.flip(0).cumsum(0).flip(0), worth_O.new_zeros(1)])


def _logits(seen: _Seen) -> Tensor:
    """What a head would say of each image, (N, O)."""
    inputs, filters = seen.features_NF.shape[1] // 2, seen.saliency_NO.shape[1]
    head = PoolingHead(inputs, filters, pool="both", softmax=False, bias=True, standardise=True)
    return _fit(head, seen.features_NF, _relative(seen.saliency_NO))


def _found_at_rank(saliency_NO: Tensor, logits_NO: Tensor) -> Tensor:
    """Mean saliency of the filter that logits put at each rank, falling, (O,)."""
    order_NO = logits_NO.argsort(dim=1, descending=True)
    return saliency_NO.gather(1, order_NO).double().mean(0).flip(0).cummax(0).values.flip(0)


def _macs_per_filter(graph: Graph, site: Site) -> float:
    """What switching off one filter of a group saves, in its own convs and in those that read it."""
    half = torch.arange(site.filters)[None] % 2 == 0
    found = cost(graph, {site.name: FilterMask(half)})
    return max(1.0, (found.dense_total - int(found.total("executed"))) / (site.filters - int(half.sum())))


def _relative(saliency_NO: Tensor) -> Tensor:
    """Saliency in units of the image's mean, so that images count alike."""
    return saliency_NO / saliency_NO.mean(1, keepdim=True).clamp_min(1e-12)


@torch.no_grad()
def _fit(head: PoolingHead, features_NF: Tensor, target_NO: Tensor) -> Tensor:
    """The head's statistics and linear map by ridge regression, in closed form, in place.

    Returns:
        Logits (N, O), each image's by the head that would have been fitted without it: what new images will get. The
        ridge is the one whose logits of this kind are nearest to the target.
    """
    assert head.norm is not None
    assert head.norm.running_mean is not None
    assert head.norm.running_var is not None
    head.norm.running_mean.copy_(features_NF.mean(0))
    head.norm.running_var.copy_(features_NF.var(0, unbiased=False))
    x_NF, wanted_NO = head.norm.eval()(features_NF).double(), target_NO.double()
    mean_O, n = wanted_NO.mean(0), len(x_NF)
    left_NK, size_K, right_KF = torch.linalg.svd(x_NF, full_matrices=False)
    found_KO = left_NK.T @ (wanted_NO - mean_O)

    def without_itself(ridge: float) -> Tensor:
        kept_K = size_K.square() / (size_K.square() + n * ridge)
        pull_N = 1 / n + left_NK.square() @ kept_K  # of an image's target on its own logit
        error_NO: Tensor = (wanted_NO - mean_O - left_NK @ (kept_K[:, None] * found_KO)) / (1 - pull_N).clamp_min(1e-9)[
            :, None
        ]
        return wanted_NO - error_NO

    tried = {ridge: without_itself(ridge) for ridge in _RIDGES}
    ridge = min(tried, key=lambda ridge: float((tried[ridge] - wanted_NO).square().mean()))
    weight_FO = right_KF.T @ (found_KO * (size_K / (size_K.square() + n * ridge))[:, None])
    head.linear.weight.copy_(weight_FO.T)
    head.linear.bias.copy_(mean_O)
    return tried[ridge].to(features_NF.dtype)

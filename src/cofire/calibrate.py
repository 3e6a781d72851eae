"""calibrate(gated, images, macs | latency_ms): thresholds at which a gated model executes what was asked for.

Shapes: N images, O filters.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from cofire.data.feeding import AnyLoader, first_images
from cofire.errors import ConfigError
from cofire.gates.base import Shifting
from cofire.gates.gating import GatedModel
from cofire.graph.tracing import evaluating
from cofire.runtime.engine import compile
from cofire.runtime.latency import mean_over_images

Per = Literal["model", "group", "filter"]
_NEAR = 0.002  # of the dense MACs: near enough
_ROUNDS = 4  # in which groups find their thresholds: each sees the inputs that the masks of the round before leave
_STEPS = 6  # of the search for a latency
_TIMED = 16  # images


def calibrate(
    gated: GatedModel,
    loader: AnyLoader,
    *,
    macs: float | None = None,
    latency_ms: float | None = None,
    per: Per = "model",
    images: int = 512,
) -> float:
    """Set the gates' thresholds so that a budget is what is executed, heads included, in the mean over images.

    Args:
        loader: batches of images, with or without labels.
        macs: share of the dense MACs that remains, in (0, 1).
        latency_ms: or milliseconds per image in the native engine on this machine, one thread.
        per: ``model`` moves ``gated.threshold``. ``group`` and ``filter`` move the biases of the heads instead, so that
            the odds of a group's (a filter's) being on change by one factor for all of them, however large its logits
            are; the rest is done by the threshold.
        images: how many to use at most.

    Returns:
        The share of the MACs that is reached.

    Raises:
        ConfigError: the method has no threshold, or no threshold reaches the budget; says what can be reached.
    """
    if (macs is None) == (latency_ms is None):
        raise ConfigError(f"calibrate takes one budget, macs or latency_ms, got macs={macs}, latency_ms={latency_ms}")
    if gated.threshold is None:
        raise ConfigError(f"calibrate sets a threshold, and {gated.config.label} does not decide by one")
    if macs is not None and not 0.0 < macs < 1.0:
        raise ConfigError(f"macs is the share of MACs that remains and must be in (0, 1), got {macs}")
    if per != "model" and not isinstance(gated.gates, Shifting):
        raise ConfigError(f"calibrate per {per} moves biases of heads, which {gated.config.label} does not have")
    batches = first_images(loader, images)
    with torch.no_grad(), evaluating(gated):
        if latency_ms is not None:
            macs = _share_for(gated, batches, latency_ms, per)
        assert macs is not None
        return _reached(gated, batches, macs, per)


def _reached(gated: GatedModel, batches: Sequence[Tensor], macs: float, per: Per) -> float:
    if per == "model":
        return _by_threshold(gated, batches, macs)
    before = copy.deepcopy(gated.gates.state_dict()), gated.threshold
    try:
        for _ in range(_ROUNDS):
            _by_odds(gated, batches, macs, per)
        return _by_threshold(gated, batches, macs)
    except ConfigError:
        gated.gates.load_state_dict(before[0])
        gated.threshold = before[1]
        raise


def _by_threshold(gated: GatedModel, batches: Sequence[Tensor], macs: float) -> float:
    """One threshold for all; halved until near, or until no float lies between."""
    before = gated.threshold
    low, high = _range(gated, batches[0])
    share = _share_alone(gated, batches) if len(gated.gates) == 1 else partial(_share, gated, batches)
    most, least = share(low), share(high)
    if not least - _NEAR <= macs <= most + _NEAR:
        gated.threshold = before
        raise ConfigError(f"macs={macs} cannot be reached by a threshold: between {least:.3f} and {most:.3f} can")
    found = share(float(before or 0.0))
    for _ in range(30):
        if abs(found - macs) <= _NEAR:
            break
        middle = (low + high) / 2
        found = share(middle)
        low, high = (middle, high) if found > macs else (low, middle)
    return found


def _range(gated: GatedModel, batch: Tensor) -> tuple[float, float]:
    """Thresholds at which all filters run, and none."""
    gated.threshold = float("-inf")
    gated(batch)
    logits = [d.logits_BO for d in gated.decisions.values() if d.logits_BO is not None]
    margin = 1.0 + max(float(part.abs().max()) for part in logits)
    return -margin, margin


def _share(gated: GatedModel, batches: Sequence[Tensor], threshold: float) -> float:
    """Share of the dense MACs at a threshold, which is set."""
    gated.threshold = threshold
    shares = []
    for batch in batches:
        gated(batch)
        shares.append(1 - gated.cost(input_shape=gated.last_shape).reduction("executed+heads"))
    return float(torch.cat(shares).mean())


def _share_alone(gated: GatedModel, batches: Sequence[Tensor]) -> Callable[[float], float]:
    """The same for a model with one site, whose logits no mask changes: one look at the images tells all."""
    ((name, logits_NO),) = _logits(gated, batches).items()
    flat = gated.gates.sites[name].kind == "block"

    def share(threshold: float) -> float:
        gated.threshold = threshold
        on = logits_NO[:, 0] > threshold if flat else logits_NO > threshold
        return 1 - float(gated.cost({name: on}, gated.last_shape).reduction("executed+heads").mean())

    return share


def _by_odds(gated: GatedModel, batches: Sequence[Tensor], macs: float, per: Per) -> None:
    """Move biases such that all odds change by the factor that would bring the masks of now to the budget."""
    logits = _logits(gated, batches)
    threshold = float(gated.threshold or 0.0)

    def shifts(log_factor: float) -> dict[str, Tensor]:
        return {name: _shift(logits_NO, threshold, log_factor, per) for name, logits_NO in logits.items()}

    def share(log_factor: float) -> float:
        masks = {name: logits[name] + by_O > threshold for name, by_O in shifts(log_factor).items()}
        return 1 - float(gated.cost(masks, gated.last_shape).reduction("executed+heads").mean())

    low, high = -20.0, 20.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if share(middle) > macs else (middle, high)
    method = gated.gates
    assert isinstance(method, Shifting)
    for name, by_O in shifts((low + high) / 2).items():
        method.shift(method.sites[name], by_O)


def _logits(gated: GatedModel, batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """Of every group that decides, (N, O)."""
    found: dict[str, list[Tensor]] = {}
    for batch in batches:
        gated(batch)
        for name, decision in gated.decisions.items():
            if decision.logits_BO is not None:
                found.setdefault(name, []).append(decision.logits_BO)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _shift(logits_NO: Tensor, threshold: float, log_factor: float, per: Per) -> Tensor:
    """What brings the odds of a group, or of each filter, to ``exp(log_factor)`` times what they are, (O,)."""
    values = logits_NO.flatten()[:, None] if per == "group" else logits_NO
    n = len(values)
    # By how much they are above or below counts as one image more, so that what is always on has an order too.
    near = torch.sigmoid((values - threshold).double() / logits_NO.double().std().clamp_min(1e-12)).mean(0)
    rate = ((values > threshold).double().sum(0) + near.clamp(1e-6, 1 - 1e-6)) / (n + 1)
    wanted = torch.sigmoid(torch.logit(rate) + log_factor)
    ordered = values.sort(0, descending=True).values
    edges = torch.cat([ordered[:1] + 1, (ordered[1:] + ordered[:-1]) / 2, ordered[-1:] - 1])  # the first k lie above k
    count = (wanted * n).round().long()
    return (threshold - edges.gather(0, count[None])[0]).expand(logits_NO.shape[1])


def _share_for(gated: GatedModel, batches: Sequence[Tensor], latency_ms: float, per: Per) -> float:
    """The share of MACs at which the engine takes so long, by trying some.

    Raises:
        ConfigError: it takes longer at any share.
    """
    low, high, found = 0.0, 1.0, None
    for _ in range(_STEPS):
        middle = (low + high) / 2
        tried = copy.deepcopy(gated)
        try:
            _reached(tried, batches, middle, per)
        except ConfigError:  # so few MACs that no threshold gives them
            low = middle
            continue
        fits = _milliseconds(tried, batches[0][:_TIMED]) <= latency_ms
        found, low, high = (middle, middle, high) if fits else (found, low, middle)
    if found is None:
        raise ConfigError(f"latency_ms={latency_ms} cannot be reached: at {high:.0%} of the MACs it takes longer still")
    return found


def _milliseconds(gated: GatedModel, images: Tensor) -> float:
    """The mean over some images in the engine, one thread."""
    engine, seconds = compile(gated, gated.last_shape), []
    for _ in range(5):
        for image in images.float().cpu().split(1):
            began = time.perf_counter()
            engine(image)
            seconds.append(time.perf_counter() - began)
    return 1e3 * mean_over_images(seconds, len(images))

"""speedup(model, images, macs | latency_ms): look, plan, fit, trim, compile, measure."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cofire.calibrate import calibrate
from cofire.data.feeding import AnyLoader, first_images
from cofire.errors import CofireError, ConfigError, DataError
from cofire.gates.ftwt_offline import Look
from cofire.gates.gating import GatedModel
from cofire.graph.cost import cost
from cofire.graph.graph import trace
from cofire.runtime.engine import Engine, compile
from cofire.speedup.distilling import distilled, second_look, twin, with_network_of
from cofire.speedup.measure import Speedup, answers, bits, executed, spread_by_cost, timed
from cofire.trim import Trimming, trim

_EVERY = 5  # one image in so many is held out
_LEAST = 10  # images
_TIMED = 8  # images, in the search for a latency
_STEPS = 6  # of the search for a latency: 1/64 of the MACs
DENSE, GATED = "engine, dense", "engine, gated"


def speedup(
    model: nn.Module,
    images: AnyLoader,
    *,
    macs: float | None = None,
    latency_ms: float | None = None,
    distill: int = 0,
    most: int = 2000,
) -> Speedup:
    """A gated copy of ``model`` for a budget, compiled and measured; ``model`` is left alone.

    Heads are fitted by `fit_heads` on four images in five; what never runs is cut by `trim`; agreement with ``model``
    is counted on the others.

    Args:
        model: trained, plain.
        images: batches of images as the model takes them, with or without labels, all of one size.
        macs: share of the MACs that remains, in (0, 1), heads included.
        latency_ms: or milliseconds per image in the native engine on this machine, one thread.
        distill: epochs in which something then follows ``model``'s answers, without labels: the gated network, whose
            heads stay as they are or are fitted again; or a pruned copy that looks first (`SecondLook`). Of these and
            what was there before, the one that agrees best on the images held out is kept. These also set a second
            look's threshold, without anyone's answers.
        most: images to use at most.

    Raises:
        ConfigError: the budget cannot be met; says what can.
        CompileError: the engine has nothing like some call; before any work.
    """
    if (macs is None) == (latency_ms is None):
        raise ConfigError(f"speedup takes one budget, macs or latency_ms, got macs={macs}, latency_ms={latency_ms}")
    if macs is not None and not 0.0 < macs < 1.0:
        raise ConfigError(f"macs is the share of MACs that remains and must be in (0, 1), got {macs}")
    used, held_out = _split(first_images(images, most))
    model = copy.deepcopy(model).eval()
    channels, height, width = used[0].shape[1:]
    dense = compile(model, (channels, height, width))
    look = Look(model, used)
    share = macs if macs is not None else _share_for(look, model, dense, latency_ms or 0.0, used)
    wanted = answers(model, held_out)

    def agreement(candidate: nn.Module) -> float:
        return float((answers(candidate, held_out) == wanted).double().mean())

    candidates: dict[str, GatedModel] = {"gates fitted": look.fitted(share)}
    why_not: dict[str, str] = {}
    if distill:
        candidates |= _distilled(look, candidates["gates fitted"], model, used, distill)
        try:
            looking = second_look(model, used, share, distill)
            # On images that the first look has not learned from: of those it is less sure.
            calibrate(looking, held_out, macs=macs, latency_ms=latency_ms, images=len(wanted))
            candidates["a second look"] = looking
        except CofireError as error:
            why_not["a second look"] = str(error)
    tried = {name: agreement(candidate) for name, candidate in candidates.items()}
    gated = candidates[max(tried, key=tried.__getitem__)]
    smaller = trim(gated, used) if isinstance(gated.gates, Trimming) else gated
    engine = compile(smaller, (channels, height, width))
    dense_macs = cost(trace(model, (channels, height, width)), {}).dense_total
    reached = float(executed(gated, held_out).mean()) / dense_macs
    compared = twin(model, gated, reached, used, distill)
    return Speedup(
        model=smaller,
        gated=gated,
        twin=compared,
        engine=engine,
        fitted_on=sum(map(len, used)),
        held_out=len(wanted),
        agreement=agreement(smaller),
        twin_agreement=agreement(compared),
        tried={**tried, **why_not} if distill else {},
        dense_macs=dense_macs,
        macs=reached,
        bits=bits(gated, held_out),
        milliseconds=timed({DENSE: dense, GATED: engine}, model, spread_by_cost(gated, held_out)),
    )


def _split(batches: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Images to fit on, and every fifth one apart."""
    total = sum(map(len, batches))
    if total < _LEAST:
        raise DataError(f"speedup needs at least {_LEAST} images, better a thousand, got {total}")
    used, held_out, first = [], [], 0
    for batch in batches:
        apart_B = (torch.arange(first, first + len(batch)) % _EVERY) == _EVERY - 1
        used.append(batch[~apart_B])
        held_out.append(batch[apart_B])
        first += len(batch)
    return [part for part in used if len(part)], [part for part in held_out if len(part)]


def _share_for(look: Look, model: nn.Module, dense: Engine, latency_ms: float, images: Sequence[Tensor]) -> float:
    """The share of MACs that takes so many milliseconds, by timing models whose heads are not fitted yet.

    Raises:
        ConfigError: it takes longer at any share, or less without any gate.
    """
    low, high = 0.0, 1.0
    best: float | None = None
    for _ in range(_STEPS):
        middle = (low + high) / 2
        try:
            engine = compile(look.unfitted(middle), dense.input_shape)
            times = timed({DENSE: dense, GATED: engine}, model, images[0][:_TIMED])
        except ConfigError:  # so few MACs that no plan has them
            low = middle
            continue
        if times[DENSE] <= latency_ms:
            raise ConfigError(f"latency_ms={latency_ms}: the dense network takes {times[DENSE]:.3f} ms already")
        best, low, high = (middle, middle, high) if times[GATED] <= latency_ms else (best, low, middle)
    if best is None:
        raise ConfigError(f"latency_ms={latency_ms} cannot be reached: at {high:.0%} of the MACs it takes longer still")
    return best


def _distilled(
    look: Look, gated: GatedModel, teacher: nn.Module, images: Sequence[Tensor], epochs: int
) -> dict[str, GatedModel]:
    """The gated network trained, and the same with heads and norms fitted again."""
    student = distilled(gated, teacher, images, epochs)
    again = with_network_of(gated, student)
    look.refit(again)
    return {"gates, network distilled": student, "gates fitted again": again}

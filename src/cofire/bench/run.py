"""bench(): one network, every engine there is, the same weights and inputs, interleaved rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cofire.bench import ours
from cofire.bench.masks import MaskPool
from cofire.bench.peers import PEERS, PYTORCH, Array, Infer, Peer, PeerError, torch_threads
from cofire.bench.plan import SETS, Plan
from cofire.bench.results import OWN_MASKS, MeasuredCost, Result, Timed
from cofire.bench.rounds import Contestant, interleaved, pinned
from cofire.bench.sliced import Sliced
from cofire.errors import CofireError, ConfigError
from cofire.experiments.provenance import version
from cofire.gates.gating import GatedModel
from cofire.progress import progress
from cofire.runtime.engine import Precision
from cofire.runtime.interpreter import trace
from cofire.runtime.quantized import Quantized, quantize

SLICED = "PyTorch sliced"
LARGEST_ERROR: dict[Precision, float] = {"float32": 1e-3, "int8": 1.0}  # of the logits' standard deviation


def bench(
    plan: Plan,
    *,
    threads: int = 1,
    rounds: int = 100,
    warm_up: int = 10,
    peers: Sequence[Peer] = PEERS,
    precisions: Sequence[Precision] = get_args(Precision),
    compile: ours.Compile = ours.compile_engine,
    text: str = "timing",
) -> Result:
    """One run of `bench_runs`."""
    (found,) = bench_runs(plan, 1, threads, rounds, warm_up, peers, precisions, compile, text)
    return found


def bench_runs(
    plan: Plan,
    runs: int,
    threads: int = 1,
    rounds: int = 100,
    warm_up: int = 10,
    peers: Sequence[Peer] = PEERS,
    precisions: Sequence[Precision] = get_args(Precision),
    compile: ours.Compile = ours.compile_engine,
    text: str = "timing",
) -> list[Result]:
    """Time every engine on ``plan``, ``runs`` times: dense ones on the plain model; ours and sliced ones on each point.

    The process stays on as many cores as ``threads``. Each engine must first give PyTorch's logits, in int8 roughly.
    One that is not installed, fails or gives others is named in ``left_out``, and the bench goes on. All that run in
    int8 fit their ranges to the same images.
    """
    if threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}")
    with torch_threads(threads), pinned(threads):
        lineup = _Lineup(plan, threads)
        for peer in peers:
            if peer.precision in precisions:
                lineup.try_dense(Who(peer.name, peer.version, peer.precision), peer.missing, peer.build)
        for precision in precisions:
            who = Who(ours.NAME, version(), precision)
            lineup.try_dense(who, [], partial(_ours, compile, precision))
            lineup.try_gated(who, partial(_ours_gated, compile, plan, precision))
        if "float32" in precisions and any(peer.name == PYTORCH for peer in peers):
            lineup.try_gated(Who(SLICED, torch.__version__, "float32"), partial(_sliced_gated, plan))
        return [lineup.time(rounds, warm_up, text) for _ in range(runs)]


Setting = Callable[[int], AbstractContextManager[object]]
Force = Callable[[Mapping[str, Tensor]], AbstractContextManager[object]]


class Gated(NamedTuple):
    """An engine that masks can be forced on."""

    infer: Infer
    force: Force
    expected: Callable[[Array, Mapping[str, Tensor]], Array]
    """What PyTorch says of an image under masks, in the precision of the engine."""


class Who(NamedTuple):
    """An engine in one precision."""

    engine: str
    version: str | None
    precision: Precision

    @property
    def label(self) -> str:
        """Its name in `Result.left_out`."""
        return self.engine if self.precision == "float32" else f"{self.engine}, {self.precision}"


@dataclass(frozen=True)
class _Entry:
    timed: Timed
    """Without its seconds."""
    contestant: Contestant


class _Lineup:
    """The engines that passed the check, and why the others did not."""

    def __init__(self, plan: Plan, threads: int) -> None:
        self.plan, self.threads = plan, threads
        self.entries: list[_Entry] = []
        self.left_out: dict[str, str] = {}
        self.x: Array = plan.image(0)  # of the round

    def try_dense(self, who: Who, missing: list[str], build: Callable[[nn.Module, Array, int], Infer]) -> None:
        if missing:
            self.left_out[who.label] = f"not installed: {' '.join(missing)}; pip install 'cofire[peers]'"
            return
        with self._trying(who.label):
            plan = self.plan
            infer = build(
                plan.gated.backbone, plan.image(0) if who.precision == "float32" else plan.shown, self.threads
            )
            probes = [plan.image(n) for n in range(2)]
            errors = [_error(infer(x), _logits(plan.gated.backbone, x)) for x in probes]
            self._add(who, None, errors, infer, lambda n: nullcontext())

    def try_gated(self, who: Who, build: Callable[[int], Gated]) -> None:
        if not self.plan.pools or who.label in self.left_out:
            return
        with self._trying(f"{who.label}, gated"):
            engine = build(self.threads)
            for point, pool in enumerate(self.plan.pools):
                errors = [self._gated_error(engine, pool, n) for n in range(2)]
                self._add(who, point, errors, engine.infer, partial(_forced, pool, engine.force))

    def _gated_error(self, engine: Gated, pool: MaskPool | None, n: int) -> float:
        """Under forced masks, the gates' own where they are free: a tie of a head would be no error of an engine."""
        x = self.plan.image(n)
        masks = _own_masks(self.plan.gated, x) if pool is None else pool.number(n)
        with engine.force(masks):
            return _error(engine.infer(x), engine.expected(x, masks))

    def _add(self, who: Who, point: int | None, errors: list[float], infer: Infer, setting: Setting) -> None:
        error, most = float(np.max(errors)), LARGEST_ERROR[who.precision]  # NaN if one of them is
        if not error <= most:
            wanted = f"within {most:g} standard deviations of PyTorch's"
            raise PeerError(f"refused: its logits must be {wanted}, got {error:.1e}")

        def with_image(n: int) -> AbstractContextManager[object]:
            self.x = self.plan.image(n)
            return setting(n)

        random_masks = point is not None and self.plan.pools[point] is not None
        agreement, accuracy = (None, None) if random_masks else self._quality(infer)
        timed = Timed(**who._asdict(), point=point, error=error, agreement=agreement, accuracy=accuracy, seconds=[])
        self.entries.append(_Entry(timed, Contestant(lambda: infer(self.x), with_image)))

    def _quality(self, infer: Infer) -> tuple[float, float | None]:
        """Shares of the images on which an engine agrees with the dense model, and with the labels."""
        said = _said(infer, self.plan)
        labels = self.plan.labels
        return float((said == self._dense).mean()), None if labels is None else float((said == labels).mean())

    @cached_property
    def _dense(self) -> NDArray[np.int64]:
        """What the dense model says in float32 of each image."""
        return _said(partial(_logits, self.plan.gated.backbone), self.plan)

    def time(self, rounds: int, warm_up: int, text: str) -> Result:
        """One run of all engines."""
        contestants = {str(number): entry.contestant for number, entry in enumerate(self.entries)}
        with progress(text) as bar:
            task = bar.add_task(text, total=warm_up + rounds)
            seconds = interleaved(contestants, rounds, warm_up, told=lambda done: bar.update(task, completed=done))
        plan = self.plan
        return Result(
            network=plan.network,
            input_shape=plan.gated.graph.input_shape,
            inputs=plan.inputs,
            masks=OWN_MASKS if None in plan.pools else f"random, uniform keep rate, {SETS} sets",
            threads=self.threads,
            rounds=rounds,
            warm_up=warm_up,
            seed=plan.seed,
            dense_macs=plan.gated.cost({}).dense_total,
            units=plan.gated.units,
            points=_points(plan),
            timed=tuple(
                dataclasses.replace(entry.timed, seconds=seconds[str(number)])
                for number, entry in enumerate(self.entries)
            ),
            left_out=self.left_out,
        )

    @contextmanager
    def _trying(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever goes wrong inside a foreign engine, the others can still run
            reason = str(error).strip().partition("\n")[0]
            self.left_out[name] = reason if isinstance(error, CofireError) else f"{type(error).__name__}: {reason}"


def _forced(pool: MaskPool | None, force: Force, n: int) -> AbstractContextManager[object]:
    return nullcontext() if pool is None else force(pool.number(n))


def _ours(compile: ours.Compile, precision: Precision, model: nn.Module, x: Array, threads: int) -> Infer:
    chosen = model if precision == "float32" else quantize(model, torch.from_numpy(x))
    _, channels, height, width = x.shape
    engine = compile(chosen, (channels, height, width))
    return lambda x: np.asarray(engine(x, threads=threads))


def _ours_gated(compile: ours.Compile, plan: Plan, precision: Precision, threads: int) -> Gated:
    model: nn.Module = plan.gated
    expected = partial(_logits_under, plan.gated)
    if precision == "int8":
        model = quantized = quantize(plan.gated, torch.from_numpy(plan.shown))
        expected = partial(_simulated, quantized)
    engine = compile(model, plan.gated.graph.input_shape)

    def force(masks: Mapping[str, Tensor]) -> AbstractContextManager[object]:
        """To the engine a branch that rests is filters that rest."""
        filters = {name: site.filters for name, site in plan.gated.gates.sites.items()}
        wide = {name: on if on.ndim > 1 else on[:, None].expand(-1, filters[name]) for name, on in masks.items()}
        return engine.force(wide, heads=True)

    return Gated(lambda x: np.asarray(engine(x, threads=threads)), force, expected)


def _sliced_gated(plan: Plan, threads: int) -> Gated:
    sliced = Sliced(plan.gated)
    infer = partial(_logits, sliced)
    return Gated(infer, sliced.force, partial(_logits_under, plan.gated))


def _logits(model: Callable[[Tensor], Tensor], x: Array) -> Array:
    with torch.no_grad():
        logits: Array = model(torch.from_numpy(x)).numpy()
    return logits


def _logits_under(gated: GatedModel, x: Array, masks: Mapping[str, Tensor]) -> Array:
    with gated.force(masks):
        return _logits(gated, x)


def _simulated(quantized: Quantized, x: Array, masks: Mapping[str, Tensor]) -> Array:
    return _logits(lambda x: trace(quantized.program, x, forced=masks).out, x)


def _said(infer: Infer, plan: Plan) -> NDArray[np.int64]:
    """The likeliest class of each image, (N,)."""
    return np.array([int(infer(plan.image(n)).argmax()) for n in range(len(plan.images))])


def _error(got: Array, expected: Array) -> float:
    """Largest difference in standard deviations of the expected logits."""
    if got.shape != expected.shape:
        raise PeerError(f"refused: its logits must have shape {expected.shape}, got {got.shape}")
    return float(np.abs(got - expected).max() / expected.std())


def _own_masks(gated: GatedModel, x: Array) -> dict[str, Tensor]:
    """Of filters (1, O), of branches (1,)."""
    _logits(gated, x)
    return {name: decision.mask.bits for name, decision in gated.decisions.items()}


def _points(plan: Plan) -> tuple[MeasuredCost, ...]:
    found = []
    for pool, asked in zip(plan.pools, plan.asked, strict=True):
        if pool is None:
            found.append(_own_point(plan))
            continue
        saved = 1 - pool.macs
        found.append(MeasuredCost(asked=asked, keep=pool.keep, executed_macs_reduction=saved, heads=pool.heads))
    return tuple(found)


def _own_point(plan: Plan) -> MeasuredCost:
    """Means over the images."""
    saved, keep, heads = [], [], []
    for n in range(len(plan.images)):
        masks = _own_masks(plan.gated, plan.image(n))
        cost = plan.gated.cost(masks)
        saved.append(float(cost.reduction("executed")))
        heads.append(saved[-1] - float(cost.reduction("executed+heads")))
        keep.append(float(torch.cat([mask.double().flatten() for mask in masks.values()]).mean()))
    mean = [sum(values) / len(values) for values in (keep, saved, heads)]
    return MeasuredCost(asked=None, keep=mean[0], executed_macs_reduction=mean[1], heads=mean[2])

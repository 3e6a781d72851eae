"""bench(): one network, every engine there is, the same weights and inputs, interleaved rounds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from cofire.backbones import create_backbone
from cofire.bench import ours
from cofire.bench.masks import MaskPool, pool_for_keep, pool_for_macs
from cofire.bench.peers import PEERS, Array, Infer, Peer, PeerError, torch_threads
from cofire.bench.results import MeasuredCost, Result, Timed
from cofire.bench.rounds import Contestant, interleaved, pinned
from cofire.bench.sliced import Sliced
from cofire.errors import CofireError, ConfigError
from cofire.experiments.provenance import version
from cofire.gates import DEFAULT
from cofire.gates.gating import GatedModel, gate
from cofire.graph.graph import default_input_shape
from cofire.progress import progress

SLICED = "PyTorch sliced"
LARGEST_ERROR = 1e-3  # of the logits' standard deviation
SETS = 16  # different masks, and different random images


@dataclass(frozen=True)
class Plan:
    """What a bench runs on: a gated model, images (N, C, H, W), and masks to force; None: its gates decide."""

    network: str
    gated: GatedModel
    images: Array
    inputs: str
    pools: tuple[MaskPool | None, ...]
    asked: tuple[float | None, ...]
    seed: int = 0

    def image(self, n: int) -> Array:
        """Image of round ``n``, (1, C, H, W)."""
        n %= len(self.images)
        return self.images[n : n + 1]


def random_plan(
    backbone: str | nn.Module,
    *,
    input_shape: tuple[int, int, int] | None = None,
    macs: Iterable[float] = (),
    keep: Iterable[float] = (),
    seed: int = 0,
) -> Plan:
    """A network with random weights, images and masks; the default method's gates in their places.

    Args:
        backbone: a name of the registry, or a plain model, whose weights are taken as they are.
        input_shape: (C, H, W). Default: what the backbone was made for.
        macs: shares of the dense MACs that REMAIN, one point each.
        keep: keep rates, one more point each.
        seed: of all that is random.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain = create_backbone(backbone) if isinstance(backbone, str) else copy.deepcopy(backbone)
        shape = input_shape or default_input_shape(plain)
        if isinstance(backbone, str):
            randomise_norms(plain)
        gated = gate(plain.eval(), DEFAULT(), input_shape=shape)
        images = torch.randn(SETS, *shape).numpy()
    shares = tuple(macs)
    pools = [pool_for_macs(gated, share, sets=SETS, seed=seed) for share in shares]
    more = [pool_for_keep(gated, rate, sets=SETS, seed=seed) for rate in keep]
    name = backbone if isinstance(backbone, str) else type(backbone).__name__
    asked = (*shares, *[None] * len(more))
    return Plan(name, gated, images, "random", (*pools, *more), asked, seed)


def own_plan(network: str, gated: GatedModel, images: Tensor, inputs: str) -> Plan:
    """A trained model on real images, whose own gates decide."""
    return Plan(network, gated, images.numpy(), inputs, (None,), (None,))


def randomise_norms(model: nn.Module) -> None:
    """Give fresh batch norms something to fold, in place.

    Not the statistics of random images: those are so much alike that norms which tell them apart make the logits a
    hundred times as sensitive to rounding, and engines that are right would fail the check.
    """
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
            if module.running_mean is not None and module.running_var is not None:
                nn.init.normal_(module.running_mean, std=0.1)
                nn.init.uniform_(module.running_var, 0.5, 1.5)


def bench(
    plan: Plan,
    *,
    threads: int = 1,
    rounds: int = 100,
    warm_up: int = 10,
    peers: Sequence[Peer] = PEERS,
    compile: ours.Compile = ours.compile_engine,
    text: str = "timing",
) -> Result:
    """Time every engine on ``plan``: dense ones on the plain model; ours and sliced PyTorch on each point as well.

    The process stays on as many cores as ``threads``. Each engine must first give PyTorch's logits. One that is not
    installed, fails or gives others is named in ``left_out``, and the bench goes on.
    """
    if threads < 1:
        raise ConfigError(f"threads must be at least 1, got {threads}")
    with torch_threads(threads), pinned(threads):
        lineup = _Lineup(plan, threads)
        for peer in peers:
            lineup.try_dense(peer.name, peer.version, peer.missing, partial(peer.build, plan.gated.backbone))
        build = partial(_ours, compile, plan.gated.backbone)
        lineup.try_dense(ours.NAME, version(), [], build)
        lineup.try_gated(ours.NAME, version(), partial(_ours_gated, compile, plan))
        lineup.try_gated(SLICED, torch.__version__, partial(_sliced_gated, plan))
        contestants = {str(number): entry.contestant for number, entry in enumerate(lineup.entries)}
        with progress(text) as bar:
            task = bar.add_task(text, total=warm_up + rounds)
            seconds = interleaved(contestants, rounds, warm_up, told=lambda done: bar.update(task, completed=done))
    return Result(
        network=plan.network,
        input_shape=plan.gated.graph.input_shape,
        inputs=plan.inputs,
        masks="the gates' own" if None in plan.pools else f"random, uniform keep rate, {SETS} sets",
        threads=threads,
        rounds=rounds,
        warm_up=warm_up,
        seed=plan.seed,
        dense_macs=plan.gated.cost({}).dense_total,
        units=plan.gated.units,
        points=_points(plan),
        timed=tuple(
            Timed(engine=e.engine, version=e.version, point=e.point, error=e.error, seconds=seconds[str(number)])
            for number, e in enumerate(lineup.entries)
        ),
        left_out=lineup.left_out,
    )


Setting = Callable[[int], AbstractContextManager[object]]
Force = Callable[[Mapping[str, Tensor]], AbstractContextManager[object]]
Gated = tuple[Infer, Force]
"""A call, and how masks are forced on it."""


@dataclass(frozen=True)
class _Entry:
    engine: str
    version: str | None
    point: int | None
    error: float
    contestant: Contestant


class _Lineup:
    """The engines that passed the check, and why the others did not."""

    def __init__(self, plan: Plan, threads: int) -> None:
        self.plan, self.threads = plan, threads
        self.entries: list[_Entry] = []
        self.left_out: dict[str, str] = {}
        self.x: Array = plan.image(0)  # of the round

    def try_dense(
        self, name: str, version: str | None, missing: list[str], build: Callable[[Array, int], Infer]
    ) -> None:
        if missing:
            self.left_out[name] = f"not installed: pip install {' '.join(missing)}"
            return
        with self._trying(name):
            infer = build(self.plan.image(0), self.threads)
            probes = [self.plan.image(n) for n in range(2)]
            errors = [_error(infer(x), _logits(self.plan.gated.backbone, x)) for x in probes]
            self._add(name, version, None, errors, infer, lambda n: nullcontext())

    def try_gated(self, name: str, version: str | None, build: Callable[[int], Gated]) -> None:
        if not self.plan.pools or name in self.left_out:
            return
        with self._trying(f"{name}, gated"):
            infer, force = build(self.threads)
            for point, pool in enumerate(self.plan.pools):
                errors = [self._gated_error(infer, force, pool, n) for n in range(2)]
                self._add(name, version, point, errors, infer, partial(_forced, pool, force))

    def _gated_error(self, infer: Infer, force: Force, pool: MaskPool | None, n: int) -> float:
        """Under forced masks, the gates' own where they are free: a tie of a head would be no error of an engine."""
        x, gated = self.plan.image(n), self.plan.gated
        masks = _own_masks(gated, x) if pool is None else pool.number(n)
        with gated.force(masks):
            expected = _logits(gated, x)
        with force(masks):
            return _error(infer(x), expected)

    def _add(
        self, engine: str, version: str | None, point: int | None, errors: list[float], infer: Infer, setting: Setting
    ) -> None:
        error = float(np.max(errors))  # NaN if one of them is
        if not error <= LARGEST_ERROR:
            wanted = f"within {LARGEST_ERROR:g} standard deviations of PyTorch's"
            raise PeerError(f"refused: its logits must be {wanted}, got {error:.1e}")

        def with_image(n: int) -> AbstractContextManager[object]:
            self.x = self.plan.image(n)
            return setting(n)

        self.entries.append(_Entry(engine, version, point, error, Contestant(lambda: infer(self.x), with_image)))

    @contextmanager
    def _trying(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever goes wrong inside a foreign engine, the others can still run
            reason = str(error).strip().partition("\n")[0]
            self.left_out[name] = reason if isinstance(error, CofireError) else f"{type(error).__name__}: {reason}"


def _forced(pool: MaskPool | None, force: Force, n: int) -> AbstractContextManager[object]:
    return nullcontext() if pool is None else force(pool.number(n))


def _ours(compile: ours.Compile, model: nn.Module, x: Array, threads: int) -> Infer:
    engine = compile(model, tuple(x.shape[1:]))
    return lambda x: np.asarray(engine(x, threads=threads))


def _ours_gated(compile: ours.Compile, plan: Plan, threads: int) -> Gated:
    engine = compile(plan.gated, plan.gated.graph.input_shape)
    return lambda x: np.asarray(engine(x, threads=threads)), partial(engine.force, heads=True)


def _sliced_gated(plan: Plan, threads: int) -> Gated:
    sliced = Sliced(plan.gated)
    return lambda x: sliced(torch.from_numpy(x)).numpy(), sliced.force


def _logits(model: nn.Module, x: Array) -> Array:
    with torch.no_grad():
        logits: Array = model(torch.from_numpy(x)).numpy()
    return logits


def _error(got: Array, expected: Array) -> float:
    """Largest difference in standard deviations of the expected logits."""
    if got.shape != expected.shape:
        raise PeerError(f"refused: its logits must have shape {expected.shape}, got {got.shape}")
    return float(np.abs(got - expected).max() / expected.std())


def _own_masks(gated: GatedModel, x: Array) -> dict[str, Tensor]:
    _logits(gated, x)
    return gated.masks


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
        keep.append(float(torch.cat([mask.double() for mask in masks.values()], dim=1).mean()))
    mean = [sum(values) / len(values) for values in (keep, saved, heads)]
    return MeasuredCost(asked=None, keep=mean[0], executed_macs_reduction=mean[1], heads=mean[2])

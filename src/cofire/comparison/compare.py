"""compare(recipes, methods, macs): several methods at one budget from one baseline, each under the same recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from cofire import plugins
from cofire.analysis.drawing import write_figure
from cofire.comparison.cluster import on_ray
from cofire.comparison.contenders import Contender, chosen, contenders
from cofire.comparison.jobs import Job, Outcome, carry_out, read_outcome
from cofire.comparison.known import Known, read_known
from cofire.comparison.plot import plot
from cofire.comparison.table import Comparison, Network, Row
from cofire.comparison.timing import DENSE, timed
from cofire.errors import BusyError, ConfigError, DataError
from cofire.experiments.recipes import Experiment, read_experiment
from cofire.experiments.runs import read_sets
from cofire.files.atomic import write_json
from cofire.files.lock import alone_in
from cofire.text import percent

Where = Literal["here", "ray"]
Say = Callable[[str], None]


def compare(
    recipes: Sequence[str | Path],
    *,
    methods: str = "all",
    macs: float = 0.5,
    seeds: int = 1,
    epochs: int | None = None,
    out: str | Path = "runs/compare",
    overrides: Sequence[str] = (),
    on: Where = "here",
    twins: bool = False,
    rounds: int = 150,
    known: str | Path | None = None,
    say: Say = lambda text: None,
) -> Comparison:
    """Run, or go on with, one ordinary run per method and seed, and put what they found side by side.

    A method that cannot handle the model is a row with the reason. Other processes may work on the same comparison in
    the same folder; what they have finished counts. ``out/NAME/MACS`` then holds a folder per run, ``comparison.json``
    and ``comparison.svg``; NAME is the recipe's.

    Args:
        recipes: each names data with validation images, a backbone and how methods are trained, but no method. Without
            ``[backbone] weights`` the backbone is first trained by the recipe.
        methods: ``all``, ``static``, ``dynamic``, or names of `contenders` with commas between them.
        macs: share of the MACs that remains, column ``executed+heads``, in (0, 1).
        seeds: runs per method, at least 1.
        epochs: of each method, in place of the recipe's.
        overrides: ``section.key=value`` on top of every recipe.
        on: this process, or ``ray``: a task per run on the Ray cluster of $RAY_ADDRESS; ``out`` must be on storage that
            its nodes share.
        twins: also train the static twin of each method that chooses filters, under the same recipe.
        rounds: of timing in the native engine; 0 times nothing.
        known: a ``comparison.json``, e.g. of another machine: a method and seed that it has a result of is not run
            again, and its row goes into the new table as it is.
        say: told what is being done.

    Raises:
        ConfigError: a recipe or an argument is not as it must be.
        FileError: ``out`` or ``known`` holds another comparison, or a file cannot be read or written.
    """
    if not 0.0 < macs < 1.0:
        raise ConfigError(f"macs is the share of MACs that remains and must be in (0, 1), got {macs}")
    if seeds < 1 or rounds < 0:
        raise ConfigError(f"seeds must be at least 1 and rounds at least 0, got {seeds} and {rounds}")
    bases = [_base(recipe, overrides) for recipe in recipes]
    if not bases or len({base.name for base in bases}) < len(bases):
        raise ConfigError(f"compare needs recipes with different names, got {[base.name for base in bases]}")
    selected = chosen(methods)
    found = [
        _Comparing(base, selected, macs, seeds, epochs, Path(out).resolve(), on, twins, rounds, known, say).go()
        for base in bases
    ]
    return Comparison(networks=found)


def _base(recipe: str | Path, overrides: Sequence[str]) -> Experiment:
    base = read_experiment(recipe, overrides)
    named = [part for part in ("gate", "prune", "signature", "budget") if getattr(base, part) is not None]
    if named:
        raise ConfigError(f"{recipe}: compare chooses the method: the recipe must not have [{named[0]}]")
    if not isinstance(base.data.val, int) or base.data.val < 1 or base.train.select != "best":
        raise ConfigError(
            f"{recipe}: methods are compared at their best epoch on validation images: [data] val must be above 0 "
            f'and [train] select "best", got {base.data.val!r} and {base.train.select!r}'
        )
    return base


class _Comparing:
    """One recipe's methods."""

    def __init__(
        self,
        base: Experiment,
        selected: Sequence[Contender],
        macs: float,
        seeds: int,
        epochs: int | None,
        out: Path,
        on: Where,
        twins: bool,
        rounds: int,
        known: str | Path | None,
        say: Say,
    ) -> None:
        self.selected, self.macs, self.on, self.rounds, self.say = selected, macs, on, rounds, say
        self.twins = twins
        self.folder = out / base.name / f"{macs:g}"
        self.dense = self._baseline(base, out / base.name / DENSE)
        weights = base.backbone.weights or str(self.dense.run)
        train = base.train if epochs is None else dataclasses.replace(base.train, epochs=epochs)
        self.base = dataclasses.replace(base, backbone=dataclasses.replace(base.backbone, weights=weights), train=train)
        self.seeds = range(base.train.seed, base.train.seed + seeds)
        self.known = Known() if known is None else read_known(known, self.base, macs)
        self.outcomes: dict[Path, Outcome] = {}

    def _baseline(self, base: Experiment, folder: Path) -> Job:
        """Trains the recipe as it is; where it has weights, they are only tested."""
        if base.backbone.weights is not None:
            base = dataclasses.replace(base, train=dataclasses.replace(base.train, epochs=0, distill=0.0))
        return self._job(None, base, folder)

    def _job(self, contender: str | None, base: Experiment, folder: Path) -> Job:
        known = tuple(plugins.loaded)
        return Job(contender=contender, base=base, macs=self.macs, folder=folder, twin=self.twins, plugins=known)

    def job(self, contender: Contender, seed: int) -> Job:
        """A method under one seed."""
        seeded = dataclasses.replace(self.base, train=dataclasses.replace(self.base.train, seed=seed))
        return self._job(contender.name, seeded, self.folder / f"{contender.name}-s{seed}")

    def go(self) -> Network:
        self.say(f"{self.base.name}: the dense network, in {self.dense.folder}")
        for _, dense in self._carried_out([self.dense]):
            if dense.result is None:
                raise ConfigError(f"the baseline of {self.base.name} cannot be had: {dense.refused}")
            self.result: dict[str, Any] = dense.result
        asked = [(contender, seed) for seed in self.seeds for contender in self.selected]
        jobs = [self.job(contender, seed) for contender, seed in asked if not self.known.has(contender.name, seed)]
        if len(jobs) < len(asked):
            self.say(f"{self.base.name}: {len(asked) - len(jobs)} of {len(asked)} runs are known")
        self.say(f"{self.base.name}: {len(jobs)} runs in {self.folder}")
        for number, (job, outcome) in enumerate(self._carried_out(jobs), 1):
            self.outcomes[job.folder] = outcome
            self.say(f"[{number}/{len(jobs)}] {job.folder.name}: {_said(outcome)}")
            self._write(self._network(timing=None))
        return self._finished()

    def _carried_out(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
        return on_ray(jobs, torch.get_num_threads()) if self.on == "ray" else _one_by_one(jobs, self.say)

    def _network(self, timing: Mapping[str, Any] | None) -> Network:
        """What is known by now, also of methods that another process was asked for."""
        rows = []
        for contender in contenders().values():
            outcomes = self._outcomes(contender)
            if outcomes or contender in self.selected:
                rows.append(self._row(contender, outcomes, timing))
        timing = timing or self.known.timing
        return Network(base=self.base, macs=self.macs, dense=self.result, rows=rows, timing=timing)

    def _outcomes(self, contender: Contender) -> dict[int, Outcome]:
        """By seed; what was run here goes before what a file says."""
        found = dict(self.known.outcomes.get(contender.name, {}))
        for seed in self.seeds:
            job = self.job(contender, seed)
            own = self.outcomes.get(job.folder) or (read_outcome(job) if job.done else None)
            if own is not None:
                found[seed] = own
        return dict(sorted(found.items()))

    def _row(self, contender: Contender, outcomes: dict[int, Outcome], timing: Mapping[str, Any] | None) -> Row:
        name = contender.name
        told = self.known.rows.get(name, {})
        own = timing is not None and (name in timing["ms"] or name in timing["refused"])
        return Row(
            method=name,
            sort=contender.sort,
            outcomes=outcomes,
            time=timing["ms"].get(name) if timing and own else told.get("time"),
            not_timed=timing["refused"].get(name) if timing and own else told.get("not_timed"),
            timed_on=timing["provenance"] if timing and own else self.known.timed_on(name),
        )

    def _finished(self) -> Network:
        """With times, if they are wanted; as files, too."""
        network = self._network(timing=None)
        if self.rounds:
            done = {row.method: row for row in network.rows if row.results}
            first = {name: self.job(contender, self.seeds[0]) for name, contender in contenders().items()}
            runs = {DENSE: self.dense.run, **{name: first[name].run for name in done if first[name].done}}
            with alone_in(self.folder / "timing", wait=True):
                self.say(f"{self.base.name}: timing in {self.rounds} rounds")
                path = self.folder / "timing" / "timing.json"
                network = self._network(timed(path, runs, read_sets(self.base).test, self.rounds))
        self._write(network)
        try:
            write_figure(plot(network), self.folder / "comparison.svg")
        except DataError as error:
            self.say(f"{self.base.name}: no figure: {error}")
        return network

    def _write(self, network: Network) -> None:
        with alone_in(self.folder, wait=True):  # another process may be about to write the same
            write_json(self.folder / "comparison.json", Comparison(networks=[network]).to_json())


def _one_by_one(jobs: Sequence[Job], say: Say) -> Iterator[tuple[Job, Outcome]]:
    """In this process; jobs that another process has are waited for in the end."""
    elsewhere = []
    for job in jobs:
        try:
            outcome = carry_out(job)
        except BusyError:
            elsewhere.append(job)
        else:
            yield job, outcome
    for job in elsewhere:
        say(f"{job.folder.name}: another process has it; waiting")
        yield job, carry_out(job, wait=True)


def _said(outcome: Outcome) -> str:
    if outcome.result is None:
        return f"refused: {outcome.refused}"
    test = outcome.result["test"]
    return f"top-1 {percent(test['top1'], 2)}, {percent(1 - test['reduction']['executed+heads'])} of the MACs"

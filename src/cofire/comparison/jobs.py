"""One job of a comparison: a method at a budget, one seed, in a folder of its own.

``plan.json`` holds the experiment that the budget led to, ``run/`` is an ordinary run, and ``row.json`` what was
measured on its model afterwards. A job that is killed goes on, and a folder belongs to one process at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cofire.calibrate import calibrate
from cofire.comparison.contenders import at_budget, contenders
from cofire.data.feeding import first_images
from cofire.errors import CofireError, FileError
from cofire.evaluation import evaluate
from cofire.experiments.recipes import Experiment, as_table, differing, parse_experiment, read_run
from cofire.experiments.runs import Sets, read_result, read_sets, train_experiment
from cofire.experiments.twin import train_twin, untrained_twin
from cofire.files.atomic import read_json, write_json
from cofire.files.lock import alone_in
from cofire.gates.gating import GatedModel
from cofire.gates.persistence import load
from cofire.plugins import load_plugin

POINT = 0.01  # of the dense MACs: a budget is met if it is no further away
_CALIBRATED_ON = 2000  # images


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be done, and where.

    Args:
        contender: name of a method in one of its forms; None trains, or only tests, ``base`` as it is.
        base: the experiment without a method, its seed set.
        macs: share of the MACs that is to remain.
        folder: of this job alone.
        twin: whether the static twin of a method that chooses filters is trained too.
        plugins: files with methods that ``contender`` may be one of.
    """

    contender: str | None
    base: Experiment
    macs: float
    folder: Path
    twin: bool = False
    plugins: tuple[Path, ...] = ()

    @property
    def run(self) -> Path:
        """The folder of its run."""
        return self.folder / "run"

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do."""
        return (self.folder / "row.json").exists()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended: with a result and what else was measured, or with the reason why there is none."""

    result: dict[str, Any] | None = None
    row: Mapping[str, Any] | None = None
    refused: str | None = None


def carry_out(job: Job, *, wait: bool = False) -> Outcome:
    """Do a job, or what is left of it.

    Args:
        wait: until another process has left the folder; else that raises.

    Raises:
        BusyError: another process is at it.
        FileError: the folder holds another job, or cannot be read or written.
    """
    for plugin in job.plugins:
        load_plugin(plugin)
    with alone_in(job.folder, wait=wait):
        return _done(job)


def _done(job: Job) -> Outcome:
    try:
        experiment = _planned(job)
        result = train_experiment(experiment, job.run)
        path = job.folder / "row.json"
        if not path.exists():
            write_json(path, _measured(job, experiment, result))
        if job.twin and _has_twin(job.run):
            train_twin(job.run)
        return read_outcome(job)
    except FileError:
        raise
    except CofireError as error:  # the method cannot do it, or training diverged: the others go on
        return Outcome(refused=str(error))


def _has_twin(run: Path) -> bool:
    model = load(run)
    if not isinstance(model, GatedModel):
        return False
    chooses_filters = {site.kind for site in model.gates.sites.values()} == {"filters"}
    return chooses_filters or model.config.twin(0.5, read_run(run).train) is not None


def read_outcome(job: Job) -> Outcome:
    """Of a job that is done."""
    return Outcome(result=read_result(job.run), row=read_json(job.folder / "row.json"))


def _planned(job: Job) -> Experiment:
    """The experiment of a job; found once, since finding it again may end otherwise on another machine."""
    if job.contender is None:
        return job.base
    path = job.folder / "plan.json"
    asked = {"method": job.contender, "macs": job.macs}
    if not path.exists():
        experiment = at_budget(contenders()[job.contender], job.base, job.macs)
        write_json(path, {**asked, "base": as_table(job.base), "experiment": as_table(experiment)})
    plan = read_json(path)
    try:
        other = {key for key, value in asked.items() if plan[key] != value} | set(differing(job.base, plan["base"]))
        experiment = parse_experiment(plan["experiment"])
    except (KeyError, TypeError) as error:
        raise FileError(f"{path} must be the plan of a comparison: {error!r}") from error
    if other:
        what = ", ".join(sorted(other))
        raise FileError(
            f"{job.folder} holds another comparison (it differs in {what}); choose another folder or remove it"
        )
    return experiment


def _measured(job: Job, experiment: Experiment, result: Mapping[str, Any]) -> dict[str, Any]:
    """What `cofire train` does not measure: the model at the budget, if it missed it, and its static twin."""
    gated = load(job.run)
    if not isinstance(gated, GatedModel):
        return {"twin": None, "calibrated": None}
    sets = read_sets(experiment)
    twin = _twin(gated, experiment, sets)
    reached = 1 - result["test"]["reduction"]["executed+heads"]
    met = abs(reached - job.macs) <= POINT
    return {"twin": twin, "calibrated": None if met else _calibrated(gated, experiment, sets, job.macs)}


def _twin(gated: GatedModel, experiment: Experiment, sets: Sets) -> dict[str, Any]:
    """The trained network with one choice of filters for all images; a reason where there is none."""
    kinds = {site.kind for site in gated.gates.sites.values()}
    if kinds != {"filters"}:
        return {"refused": f"a twin keeps filters; this method decides on {' and '.join(sorted(kinds))}"}
    gated.eval()(first_images(sets.train.take(slice(0, 1)).loader(1), 1)[0])
    if any(decision.scale_BO is not None for decision in gated.decisions.values()):
        return {"refused": "what the method scales has no dense form that a twin could be fitted to"}
    try:
        twin = untrained_twin(gated, experiment, sets)
    except CofireError as error:
        return {"refused": str(error)}
    return _tested(twin, experiment, sets)


def _calibrated(gated: GatedModel, experiment: Experiment, sets: Sets, macs: float) -> dict[str, Any]:
    """The model with its threshold moved to the budget, heads included, on validation images; or why not."""
    images = (sets.val or sets.train).take(slice(0, _CALIBRATED_ON)).loader(experiment.data.eval_batch_size)
    try:
        calibrate(gated, images, macs=macs, images=_CALIBRATED_ON)
    except CofireError as error:
        return {"refused": str(error)}
    return {"threshold": gated.threshold, **_tested(gated, experiment, sets)}


def _tested(model: GatedModel, experiment: Experiment, sets: Sets) -> dict[str, Any]:
    report = evaluate(model, sets.test.loader(experiment.data.eval_batch_size), text="testing")
    return {"top1": report.top1, "executed": 1 - report.reduction["executed+heads"]}

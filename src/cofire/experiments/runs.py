"""Runs: the verbs that carry out an experiment, and the folders they leave."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cofire import data, signatures, zoo
from cofire.backbones import Backbone, create_backbone, load_weights
from cofire.backbones.published import PREFIX, published_file
from cofire.data.images import AbstractImages, Loader
from cofire.errors import ConfigError, FileError
from cofire.estimate import RATIOS, Estimate, Solution, estimate, solve_ratio
from cofire.evaluation import Report, evaluate
from cofire.experiments.budgets import check_budget, meet_budget
from cofire.experiments.provenance import provenance
from cofire.experiments.recipes import Experiment, as_table, differing, read_run
from cofire.files.atomic import read_json, read_table, write_json
from cofire.files.card import Card
from cofire.files.lock import alone_in
from cofire.gates.base import GateConfig
from cofire.gates.gating import GatedModel, describe_backbone, gate, num_filters
from cofire.gates.persistence import load, read_card, save
from cofire.graph.cost import cost
from cofire.graph.graph import trace
from cofire.pruning import SoftPruning, prune
from cofire.runtime.engine import Engine, Precision
from cofire.runtime.observed import Observed, observe, write_observed
from cofire.runtime.of_pixels import of_pixels
from cofire.training.freed_memory import keep_freed_memory
from cofire.training.loop import FitResult, fit
from cofire.training.processes import processes, together
from cofire.training.tracking import Track

TWIN = "twin"
"""Where in a run's folder its static twin lies."""


@dataclass(frozen=True)
class Sets:
    """The images of an experiment."""

    train: AbstractImages
    val: AbstractImages | None
    test: AbstractImages


def read_sets(experiment: Experiment) -> Sets:
    """Training, validation and test images."""
    part = experiment.data
    train, test = data.source(part.name, **part.args)
    if part.val == "test":
        return Sets(train, test, test)
    if part.val == 0:
        return Sets(train, None, test)
    rest, held_out = train.split(part.val, seed=0)  # one split for all seeds, so that their figures compare
    return Sets(rest, held_out, test)


def build_model(experiment: Experiment, sets: Sets) -> nn.Module:
    """The plain backbone with its weights, fresh ones drawn from the seed; pruned if the experiment says so."""
    model = _whole_model(experiment, sets)
    if experiment.prune is None or _soft(experiment):
        return model
    return prune(model, experiment.prune, _ranking_images(experiment, sets), input_shape=sets.train.shape)


def _soft(experiment: Experiment) -> bool:
    """Whether channels leave while the run trains, so that the model it begins with is the whole one."""
    return experiment.prune is not None and experiment.prune.soft and experiment.train.epochs > 0


def runs_root() -> Path:
    """Where runs live that are known by name: $COFIRE_RUNS, else ~/.cache/cofire/runs."""
    return Path(os.environ.get("COFIRE_RUNS") or Path.home() / ".cache" / "cofire" / "runs")


def short_names(folders: Sequence[str | Path]) -> dict[str, Path]:
    """Run folders, each once, by their last part, or by as many of the last parts as it takes to tell them apart."""
    given = {Path(folder).resolve(): Path(folder) for folder in folders}
    names: dict[str, Path] = {}
    length = 1
    while len(names) < len(given):
        names = {"/".join(whole.parts[-length:]): folder for whole, folder in given.items()}
        length += 1
    return names


def weights_path(weights: str) -> Path:
    """Where ``[backbone] weights`` of a recipe lie."""
    kind, _, name = weights.partition(":")
    if kind == "zoo":
        return zoo.folder(name)
    if weights.startswith(PREFIX):
        return published_file(name)
    if kind != "run":
        return Path(weights)
    if not (runs_root() / name / "config.json").exists():
        raise FileError(
            f"[backbone] weights = {weights!r}: there is no such run; make it by `cofire train recipes/{name}.toml "
            f"--out {runs_root() / name}`, or name a file by --set backbone.weights=..."
        )
    return runs_root() / name


def _whole_model(experiment: Experiment, sets: Sets) -> nn.Module:
    part = experiment.backbone
    torch.manual_seed(experiment.train.seed)
    weights = weights_path(part.weights) if part.weights else None
    args = {"num_classes": len(sets.test.classes), **part.args}
    model: nn.Module
    if weights is not None and weights.is_dir() and part.new_head:
        model = create_backbone(part.name, **args)
        load_weights(model, weights / "model.safetensors", new_head=True)
    elif weights is not None and weights.is_dir():
        fresh = create_backbone(part.name, **args)
        wanted, model = describe_backbone(fresh), load(weights)
        pruned = num_filters(model) != num_filters(fresh)
        if isinstance(model, GatedModel) or pruned or describe_backbone(model) != wanted:
            kind = "a gated model" if isinstance(model, GatedModel) else describe_backbone(model)
            found = "a pruned one" if describe_backbone(model) == wanted else kind
            raise ConfigError(
                f"[backbone] weights = {part.weights!r} must hold a dense {wanted}, got {found}; if only the classes "
                "are others, new_head = true keeps the rest"
            )
    else:
        published = part.weights is not None and part.weights.startswith(PREFIX)
        model = create_backbone(
            part.name, weights=part.weights if published else weights, new_head=part.new_head, **args
        )
    if isinstance(model, Backbone):
        model.input_shape = sets.train.shape
    trace(model, sets.train.shape)  # raises if the images do not fit
    return model


def build_gated(experiment: Experiment, sets: Sets) -> nn.Module:
    """The model that a run trains: gated if the experiment says so."""
    model = build_model(experiment, sets)
    if experiment.gate is None:
        return model
    return gate(model, gate_config(experiment, model, sets), input_shape=sets.train.shape)


def gate_config(experiment: Experiment, model: nn.Module, sets: Sets) -> GateConfig:
    """The experiment's gate config, its signature worked out."""
    config, part = experiment.gate, experiment.signature
    if config is None:
        raise ConfigError("this needs a [gate] section in the recipe")
    if part is None:
        return config
    if part.kind == "uniform":
        signature = signatures.uniform(model, config, part.keep, sets.train.shape, macs=part.macs)
    elif part.kind == "taylor":
        assert part.macs is not None
        images = _ranking_images(experiment, sets)
        signature = signatures.taylor(model, config, images, macs=part.macs, input_shape=sets.train.shape)
    elif part.kind == "mass":
        assert part.macs is not None
        images = _ranking_images(experiment, sets)
        signature = signatures.mass(model, config, images, macs=part.macs, input_shape=sets.train.shape)
    else:
        assert part.path is not None
        signature = signatures.read(part.path)
    chosen: dict[str, Any] = {"signature": signature}  # a field that the recipe's check has found
    return dataclasses.replace(config, **chosen)


def _foretold_config(experiment: Experiment, model: nn.Module, sets: Sets) -> Any:
    """The same for methods that `estimate` takes: a config with a ``ratio``."""
    if experiment.gate is None or not experiment.gate.foretold:
        got = type(experiment.gate).__name__ if experiment.gate else "no [gate] section"
        raise ConfigError(
            f"this needs a [gate] section in the recipe, of a method whose cost is known before training, got {got}"
        )
    return gate_config(experiment, model, sets)


def _ranking_images(experiment: Experiment, sets: Sets) -> Loader:
    """What filters are ranked on."""
    return sets.train.take(slice(0, 2000)).loader(experiment.data.batch_size)


def whole_macs(experiment: Experiment, sets: Sets) -> int | None:
    """MACs of the backbone before pruning; None where nothing is pruned."""
    if experiment.prune is None:
        return None
    args = {"num_classes": len(sets.test.classes), **experiment.backbone.args}
    return cost(trace(create_backbone(experiment.backbone.name, **args), sets.train.shape), {}).dense_total


def _training_images(experiment: Experiment, sets: Sets, images: int) -> Loader:
    return sets.train.take(slice(0, images)).loader(experiment.data.eval_batch_size)


def estimate_experiment(
    experiment: Experiment, *, images: int = 2000, ratios: Sequence[float] = RATIOS, cascade: bool = False
) -> Estimate:
    """The cost table of an experiment's model on its first training images."""
    sets = read_sets(experiment)
    model = build_model(experiment, sets)
    config = _foretold_config(experiment, model, sets)
    return estimate(model, config, _training_images(experiment, sets, images), ratios, cascade=cascade)


def solve_experiment(
    experiment: Experiment, *, images: int = 2000, precision: Precision = "float32", **budget: float | None
) -> Solution:
    """The ratio for a budget on an experiment's model: ``macs`` or ``latency_ms``, as `solve_ratio` takes them."""
    sets = read_sets(experiment)
    model = build_model(experiment, sets)
    config = _foretold_config(experiment, model, sets)
    loader = _training_images(experiment, sets, images)
    return solve_ratio(model, config, loader, precision=precision, **budget)


def train_experiment(experiment: Experiment, out: str | Path, *, track: Track | None = None) -> dict[str, Any]:
    """Train, evaluate on the test set once, save model and ``result.json`` into ``out``; returns the result.

    Killed at any point and called again, it goes on from the last checkpoint. ``track`` as in `fit`.

    Raises:
        FileError: another run or another process is in ``out``, or a file cannot be read or written.
    """
    with alone_in(Path(out)) if processes().is_main_process else nullcontext():
        return _trained(experiment, Path(out), track)


def _trained(experiment: Experiment, out: Path, track: Track | None) -> dict[str, Any]:
    table_path, result_path = out / "experiment.json", out / "result.json"
    table = as_table(experiment)
    if table_path.exists():
        if changed := differing(experiment, read_json(table_path)):
            what = ", ".join(changed)
            raise FileError(f"{out} holds another run (it differs in {what}); choose another folder or remove it")
        if result_path.exists():
            finished: dict[str, Any] = read_json(result_path)
            return finished
    origin = provenance()  # of the code that is loaded now, not of what the tree holds when the run ends
    keep_freed_memory()
    sets = read_sets(experiment)
    model = build_gated(experiment, sets)
    part, recipe = experiment.data, experiment.train
    check_budget(model, experiment)
    loader = sets.train.loader(part.batch_size, train=True, augment=part.augment, pad=part.pad, seed=recipe.seed)
    val = sets.val.loader(part.eval_batch_size) if sets.val else None
    main = processes().is_main_process
    if main:
        write_json(table_path, table)
        estimated = _estimated(experiment, sets, out / "estimate.json")
    teacher = _whole_model(experiment, sets) if recipe.distill else None
    soft = []
    if _soft(experiment):
        assert experiment.prune is not None
        soft = [SoftPruning(model, experiment.prune, input_shape=sets.train.shape)]
    fitted = fit(model, loader, recipe, val=val, teacher=teacher, out=out, track=track, callbacks=soft)
    for pruning in soft:
        model = pruning.cut(model, _ranking_images(experiment, sets))
    if main:
        model = meet_budget(model, experiment, sets.train, sets.val)
        report = _tested(model, experiment, sets, "testing")
        save(model, out, _card(sets, report))
        write_json(result_path, _result(table, origin, estimated, fitted, report, sets))
    with together():
        processes().wait_for_everyone()
    result: dict[str, Any] = read_json(result_path)
    return result


def _estimated(experiment: Experiment, sets: Sets, path: Path) -> dict[str, Any] | None:
    """What the gates should save, known before training; read from ``path`` if an earlier start has written it."""
    if experiment.gate is None or not experiment.gate.foretold:
        return None
    if not path.exists():
        model = build_model(experiment, sets)
        config = _foretold_config(experiment, model, sets)
        loader = _training_images(experiment, sets, 2000)
        found: dict[str, Any] = {"images": len(loader.images)}
        for way, cascade in (("independent", False), ("cascade", True)):
            saved = estimate(model, config, loader, [config.ratio], cascade=cascade).reduction
            found[way] = {column: at_ratio[0] for column, at_ratio in saved.items()}
        write_json(path, found)
    estimated: dict[str, Any] = read_json(path)
    return estimated


def read_result(run: str | Path) -> dict[str, Any]:
    """What ``result.json`` of a finished run says; what its static twin did on the test set is the entry ``twin``."""
    folder = Path(run)
    if not (folder / "experiment.json").exists():
        raise FileError(
            f"{folder} holds no run: it has no experiment.json; `cofire train RECIPE --out {folder}` makes one. "
            "A model saved from Python is analysed from Python: cofire.analysis"
        )
    if not (folder / "result.json").exists():
        raise FileError(f"the run in {folder} is not finished: it has no result.json; call its `cofire train` again")
    result = read_table(folder / "result.json", "test")
    if (folder / TWIN / "result.json").exists():
        result["twin"] = read_table(folder / TWIN / "result.json", "test")["test"]
    return result


def eval_run(run: str | Path, *, threshold: float | None = None) -> Report:
    """A finished run's model on its test set, at another threshold if given."""
    experiment = read_run(run)
    sets = read_sets(experiment)
    model = load(run)
    if threshold is not None:
        if not isinstance(model, GatedModel):
            raise ConfigError("threshold: this run has no gates")
        model.threshold = threshold
    twin = load(Path(run) / TWIN) if (Path(run) / TWIN / "result.json").exists() else None
    return _tested(model, experiment, sets, "evaluating", twin)


def _tested(model: nn.Module, experiment: Experiment, sets: Sets, text: str, twin: nn.Module | None = None) -> Report:
    loader = sets.test.loader(experiment.data.eval_batch_size)
    return evaluate(model, loader, text=text, dense_macs=whole_macs(experiment, sets), twin=twin)


def compile_run(run: str | Path, int8: Path | None = None) -> Engine:
    """A model folder as an engine that takes pixels in [0, 1]; in int8 if there are pictures to fit that to."""
    return of_pixels(load(run), run_card(run), int8)


def observe_run(run: str | Path, engine: Engine, program: Path, count: int) -> Observed:
    """Put beside a run's program what it does on ``count`` images of the run's training set."""
    images = read_sets(read_run(run)).train
    pixels_NCHW = images.pixels(torch.arange(min(count, len(images))))
    observed = observe(engine, (pixels_NCHW.float() / 255).numpy())
    write_observed(observed, program)
    return observed


def run_card(run: str | Path) -> Card:
    """The card of the model in a folder; a run of cofire 0.1 has none, so that its data set is read."""
    return read_card(run) or _card(read_sets(read_run(run)))


def _card(sets: Sets, report: Report | None = None) -> Card:
    test = sets.test
    known = Card(input_shape=test.shape, mean=test.mean, std=test.std, classes=test.classes, data=sets.train.name)
    if report is None:
        return known
    executed = report.dense_macs * (1 - report.reduction["executed+heads"])
    return dataclasses.replace(known, n=report.n, top1=report.top1, macs=round(executed))


def _result(
    table: dict[str, Any],
    origin: dict[str, Any],
    estimated: dict[str, Any] | None,
    fitted: FitResult,
    report: Report,
    sets: Sets,
) -> dict[str, Any]:
    return {
        "experiment": table,
        "provenance": origin,
        "n": {"train": len(sets.train), "val": len(sets.val) if sets.val else 0, "test": len(sets.test)},
        "estimated": estimated,
        "epochs": [dataclasses.asdict(record) for record in fitted.epochs],
        "selected_epoch": fitted.selected,
        "test": report.to_json(),
    }

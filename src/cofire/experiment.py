"""A recipe file: data, backbone, method and training of one run in one TOML table; and the verbs that carry it out."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from cofire import data, signatures
from cofire.backbones import create_backbone
from cofire.cost import cost
from cofire.data.images import Augment, Images, Loader
from cofire.errors import ConfigError, FileError, unknown
from cofire.estimate import RATIOS, Estimate, Solution, estimate, solve_ratio
from cofire.evaluation import Report, evaluate
from cofire.files import read_json, write_json
from cofire.gates.base import GateConfig, gate_types
from cofire.gates.ftwt import FTWT
from cofire.gating import GatedModel, describe_backbone, gate, num_filters
from cofire.graph import trace
from cofire.persistence import load, save
from cofire.provenance import provenance
from cofire.pruning import PruneConfig, prune, prune_types
from cofire.recipe import Recipe
from cofire.runtime.engine import Engine, normalised
from cofire.runtime.lowering import lower
from cofire.strict import differences, override, structure, unstructure
from cofire.training import FitResult, fit, processes


@dataclass(frozen=True, kw_only=True)
class DataPart:
    """``[data]``: which set, and how it is fed.

    Args:
        name: of a source, see ``cofire data``.
        val: images held out of the training set for choosing the epoch; ``"test"`` watches the test set
            instead, which is allowed only with ``select = "last"``.
        args: further arguments of the source.
    """

    name: str
    batch_size: int = 128
    augment: Augment = "none"
    pad: int = 4
    val: int | Literal["test"] = 0
    eval_batch_size: int = 250
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BackbonePart:
    """``[backbone]``: a network of the registry, and where its weights come from.

    Args:
        weights: a .safetensors or .pth file, or the folder of an earlier dense run.
        args: further arguments, e.g. ``width``.
    """

    name: str
    weights: str | None = None
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SignaturePart:
    """``[signature]``: a fixed number of filters per group in place of the mass.

    Args:
        kind: ``uniform`` (needs ``keep``), ``taylor`` (needs ``macs``) or ``file`` (needs ``path``).
    """

    kind: Literal["uniform", "taylor", "file"]
    keep: float | None = None
    macs: float | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        needed = {"uniform": "keep", "taylor": "macs", "file": "path"}[self.kind]
        if getattr(self, needed) is None:
            raise ConfigError(f"[signature] kind {self.kind!r} needs the key {needed!r}")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything a run needs. ``prune`` takes filters out first, then ``gate`` adds gates; without both the plain
    backbone is trained.
    """

    name: str
    data: DataPart
    backbone: BackbonePart
    gate: GateConfig | None
    train: Recipe
    prune: PruneConfig | None = None
    signature: SignaturePart | None = None

    def __post_init__(self) -> None:
        if self.data.val == "test" and self.train.select == "best":
            raise ConfigError('[data] val = "test" would select on the test set; use it with [train] select = "last"')
        if self.signature is not None and not isinstance(self.gate, FTWT):
            raise ConfigError("[signature] needs a [gate] of type FTWT")
        if self.train.distill and self.backbone.weights is None:
            raise ConfigError("[train] distill learns from the dense model: it needs [backbone] weights")


@dataclass(frozen=True)
class Sets:
    """The images of an experiment."""

    train: Images
    val: Images | None
    test: Images


def read_experiment(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment in a TOML file, with ``section.key=value`` assignments on top."""
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"recipe {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise FileError(f"recipe {path} is not readable as TOML: {error}") from error
    for assignment in overrides:
        override(table, assignment)
    return parse_experiment({"name": path.stem, **table})


def parse_experiment(table: Mapping[str, Any]) -> Experiment:
    """The experiment in nested tables; unknown keys are errors."""
    parts: dict[str, Any] = dict(table)
    known = [f.name for f in dataclasses.fields(Experiment)]
    for key in parts:
        if key not in known:
            raise unknown("section or key in the recipe:", key, known)
    for key in ("data", "backbone"):
        if key not in parts:
            raise ConfigError(f"the recipe must have a section [{key}]")
    signature = parts.get("signature")
    return Experiment(
        name=str(parts.get("name", "run")),
        data=structure(DataPart, parts["data"], "[data]"),
        backbone=structure(BackbonePart, parts["backbone"], "[backbone]"),
        gate=_gate_config(parts["gate"]) if parts.get("gate") is not None else None,
        prune=_prune_config(parts["prune"]) if parts.get("prune") is not None else None,
        train=structure(Recipe, parts.get("train", {}), "[train]"),
        signature=structure(SignaturePart, signature, "[signature]") if signature is not None else None,
    )


def as_table(experiment: Experiment) -> dict[str, Any]:
    """The experiment in full, as ``parse_experiment`` reads it."""
    table: dict[str, Any] = unstructure(experiment)
    for part, config in (("gate", experiment.gate), ("prune", experiment.prune)):
        if config is not None:
            table[part] = {"type": type(config).__name__, **table[part]}
    return table


def _gate_config(table: Any) -> GateConfig:
    if not isinstance(table, Mapping):
        raise ConfigError(f"[gate] must be a table, got {table!r}")
    fields = dict(table)
    types, kind, preset = gate_types(), fields.pop("type", "FTWT"), fields.pop("preset", "default")
    if kind not in types:
        raise unknown("gate type", str(kind), types)
    if preset not in types[kind].presets:
        raise unknown(f"{kind} preset", str(preset), types[kind].presets)
    return structure(types[kind], {**types[kind].presets[preset], **fields}, "[gate]")


def _prune_config(table: Any) -> PruneConfig:
    if not isinstance(table, Mapping) or "type" not in table:
        raise ConfigError(f"[prune] must be a table with the key 'type', one of {sorted(prune_types())}, got {table!r}")
    fields, types = dict(table), prune_types()
    if (kind := fields.pop("type")) not in types:
        raise unknown("prune type", str(kind), types)
    return structure(types[kind], fields, "[prune]")


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
    if experiment.prune is None:
        return model
    return prune(model, experiment.prune, _ranking_images(experiment, sets), input_shape=_shape(sets))


def _whole_model(experiment: Experiment, sets: Sets) -> nn.Module:
    part = experiment.backbone
    torch.manual_seed(experiment.train.seed)
    weights = Path(part.weights) if part.weights else None
    args = {"num_classes": len(sets.test.classes), **part.args}
    if weights is not None and weights.is_dir():
        fresh = create_backbone(part.name, **args)
        wanted, model = describe_backbone(fresh), load(weights)
        pruned = num_filters(model) != num_filters(fresh)
        if isinstance(model, GatedModel) or pruned or describe_backbone(model) != wanted:
            kind = "a gated model" if isinstance(model, GatedModel) else describe_backbone(model)
            found = "a pruned one" if describe_backbone(model) == wanted else kind
            raise ConfigError(f"[backbone] weights = {part.weights!r} must hold a dense {wanted}, got {found}")
    else:
        model = create_backbone(part.name, weights=weights, **args)
    trace(model, _shape(sets))  # raises if the images do not fit
    return model


def build_gated(experiment: Experiment, sets: Sets) -> nn.Module:
    """The model that a run trains: gated if the experiment says so."""
    model = build_model(experiment, sets)
    if experiment.gate is None:
        return model
    config = gate_config(experiment, model, sets) if isinstance(experiment.gate, FTWT) else experiment.gate
    return gate(model, config, input_shape=_shape(sets))


def gate_config(experiment: Experiment, model: nn.Module, sets: Sets) -> FTWT:
    """The experiment's FTWT config, its signature worked out."""
    config = experiment.gate
    if not isinstance(config, FTWT):
        raise ConfigError("this needs a [gate] section of type FTWT in the recipe")
    part = experiment.signature
    if part is None:
        return config
    if part.kind == "uniform":
        assert part.keep is not None
        signature = signatures.uniform(model, config, part.keep, _shape(sets))
    elif part.kind == "taylor":
        assert part.macs is not None
        images = _ranking_images(experiment, sets)
        signature = signatures.taylor(model, config, images, macs=part.macs, input_shape=_shape(sets))
    else:
        assert part.path is not None
        signature = signatures.read(part.path)
    return dataclasses.replace(config, signature=signature)


def _ranking_images(experiment: Experiment, sets: Sets) -> Loader:
    """What filters are ranked on."""
    return sets.train.take(slice(0, 2000)).loader(experiment.data.batch_size)


def _whole_macs(experiment: Experiment, sets: Sets) -> int | None:
    """MACs of the backbone before pruning; None where nothing is pruned."""
    if experiment.prune is None:
        return None
    args = {"num_classes": len(sets.test.classes), **experiment.backbone.args}
    return cost(trace(create_backbone(experiment.backbone.name, **args), _shape(sets)), {}).dense_total


def _training_images(experiment: Experiment, sets: Sets, images: int) -> Loader:
    return sets.train.take(slice(0, images)).loader(experiment.data.eval_batch_size)


def estimate_experiment(
    experiment: Experiment, *, images: int = 2000, ratios: Sequence[float] = RATIOS, cascade: bool = False
) -> Estimate:
    """The cost table of an experiment's model on its first training images."""
    sets = read_sets(experiment)
    model = build_model(experiment, sets)
    config = gate_config(experiment, model, sets)
    return estimate(model, config, _training_images(experiment, sets, images), ratios, cascade=cascade)


def solve_experiment(
    experiment: Experiment, *, macs: float | None = None, latency_ms: float | None = None, images: int = 2000
) -> Solution:
    """The ratio for a budget on an experiment's model."""
    sets = read_sets(experiment)
    model = build_model(experiment, sets)
    config = gate_config(experiment, model, sets)
    loader = _training_images(experiment, sets, images)
    return solve_ratio(model, config, loader, macs=macs, latency_ms=latency_ms)


def train_experiment(experiment: Experiment, out: str | Path) -> dict[str, Any]:
    """Train, evaluate on the test set once, save model and ``result.json`` into ``out``; returns the result.

    Killed at any point and called again, it goes on from the last checkpoint.
    """
    out = Path(out)
    table_path, result_path = out / "experiment.json", out / "result.json"
    table = as_table(experiment)
    if table_path.exists():
        if changed := differences(table, read_json(table_path)):
            what = ", ".join(changed)
            raise FileError(f"{out} holds another run (it differs in {what}); choose another folder or remove it")
        if result_path.exists():
            finished: dict[str, Any] = read_json(result_path)
            return finished
    origin = provenance()  # of the code that is loaded now, not of what the tree holds when the run ends
    sets = read_sets(experiment)
    model = build_gated(experiment, sets)
    part, recipe = experiment.data, experiment.train
    loader = sets.train.loader(part.batch_size, train=True, augment=part.augment, pad=part.pad, seed=recipe.seed)
    val = sets.val.loader(part.eval_batch_size) if sets.val else None
    main = processes().is_main_process
    if main:
        write_json(table_path, table)
    teacher = _whole_model(experiment, sets) if recipe.distill else None
    fitted = fit(model, loader, recipe, val=val, teacher=teacher, out=out)
    if main:
        report = _tested(model, experiment, sets, "testing")
        save(model, out)
        write_json(result_path, _result(table, origin, fitted, report, sets))
    processes().wait_for_everyone()
    result: dict[str, Any] = read_json(result_path)
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
    return _tested(model, experiment, sets, "evaluating")


def _tested(model: nn.Module, experiment: Experiment, sets: Sets, text: str) -> Report:
    loader = sets.test.loader(experiment.data.eval_batch_size)
    return evaluate(model, loader, text=text, dense_macs=_whole_macs(experiment, sets))


def compile_run(run: str | Path) -> Engine:
    """A finished run's model as an engine that takes pixels in [0, 1]: the run's normalisation is its first op."""
    test = read_sets(read_run(run)).test
    return Engine(normalised(lower(load(run)), test.mean, test.std))


def read_run(run: str | Path) -> Experiment:
    """The experiment a run folder was made by."""
    table = read_json(Path(run) / "experiment.json")
    if not isinstance(table, Mapping):
        raise FileError(f"{Path(run) / 'experiment.json'} must hold a table")
    return parse_experiment(table)


def _shape(sets: Sets) -> tuple[int, int, int]:
    _, channels, height, width = sets.train.pixels_NCHW.shape
    return channels, height, width


def _result(
    table: dict[str, Any], origin: dict[str, Any], fitted: FitResult, report: Report, sets: Sets
) -> dict[str, Any]:
    return {
        "experiment": table,
        "provenance": origin,
        "n": {"train": len(sets.train), "val": len(sets.val) if sets.val else 0, "test": len(sets.test)},
        "epochs": [dataclasses.asdict(record) for record in fitted.epochs],
        "selected_epoch": fitted.selected,
        "test": report.to_json(),
    }

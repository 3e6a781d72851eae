"""A recipe file: data, backbone, method and training of one run in one TOML table."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cofire import second_look  # noqa: F401  registered when it is imported; it stands below gates/ and pruning/
from cofire.data.augmenting import Augment
from cofire.errors import ConfigError, FileError, unknown
from cofire.files.atomic import read_json
from cofire.files.strict import differences, override, structure, unstructure
from cofire.gates import DEFAULT
from cofire.gates.base import GateConfig, gate_types
from cofire.plugins import lookup
from cofire.pruning import PruneConfig, prune_types
from cofire.training.recipe import Recipe


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
    """``[backbone]``: a network, and where its weights come from.

    Args:
        name: of the registry, or ``timm:NAME`` or ``torchvision:NAME`` where those packages are installed.
        weights: a .safetensors or .pth file, or the folder of an earlier dense run; ``run:NAME`` is the folder NAME
            below $COFIRE_RUNS (default: ~/.cache/cofire/runs), ``zoo:NAME`` a model that ships with cofire,
            ``published:NAME`` one of `cofire.backbones.published`.
        new_head: the weights are of a network with other classes; the last layer begins with random weights.
        args: further arguments, e.g. ``width``.
    """

    name: str
    weights: str | None = None
    new_head: bool = False
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SignaturePart:
    """``[signature]``: a fixed number of filters per group in place of the mass.

    Args:
        kind: ``uniform`` (needs ``keep`` or ``macs``), ``taylor`` or ``mass`` (need ``macs``) or ``file`` (needs
            ``path``); see `cofire.signatures`.
    """

    kind: Literal["uniform", "taylor", "mass", "file"]
    keep: float | None = None
    macs: float | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        needed = {"uniform": ("keep", "macs"), "taylor": ("macs",), "mass": ("macs",), "file": ("path",)}[self.kind]
        if sum(getattr(self, key) is not None for key in needed) != 1:
            keys = " or ".join(repr(key) for key in needed)
            raise ConfigError(f"[signature] kind {self.kind!r} needs the key {keys}")


@dataclass(frozen=True, kw_only=True)
class BudgetPart:
    """``[budget]``: what the trained gates may execute; their thresholds are set for it on training images.

    Args:
        macs: share of the MACs that remains, heads included, in (0, 1).
        per: what has a threshold of its own; see `cofire.calibrate`.
    """

    macs: float
    per: Literal["model", "group", "filter"] = "model"

    def __post_init__(self) -> None:
        if not 0.0 < self.macs < 1.0:
            raise ConfigError(f"[budget] macs is the share of MACs that remains and must be in (0, 1), got {self.macs}")


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
    budget: BudgetPart | None = None

    def __post_init__(self) -> None:
        if self.data.val == "test" and self.train.select == "best":
            raise ConfigError('[data] val = "test" would select on the test set; use it with [train] select = "last"')
        if self.signature is not None and not _takes_signature(self.gate):
            got = type(self.gate).__name__ if self.gate else "none"
            raise ConfigError(f"[signature] needs a [gate] of a method that takes a signature, got {got}")
        if self.prune is not None and self.prune.soft and self.gate is not None:
            raise ConfigError("[prune] soft = true prunes while the run trains; with a [gate], set soft = false")
        if self.budget is not None and self.gate is None:
            raise ConfigError("[budget] sets thresholds of gates: it needs a section [gate]; [prune] has its own macs")
        if self.train.distill and self.backbone.weights is None:
            raise ConfigError("[train] distill learns from the dense model: it needs [backbone] weights")


def _takes_signature(config: GateConfig | None) -> bool:
    return config is not None and any(field.name == "signature" for field in dataclasses.fields(config))


def read_experiment(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment in a TOML file, with ``section.key=value`` assignments on top.

    A file may begin with ``extends = "other.toml"``, a path from its own folder: then it only says what differs.
    """
    path = Path(path)
    table = _read_table(path, ())
    for assignment in overrides:
        override(table, assignment)
    return parse_experiment({"name": path.stem, **table})


def _read_table(path: Path, extending: tuple[Path, ...]) -> dict[str, Any]:
    """The table in a file, on top of the one it extends; ``extending`` are the files that led here."""
    named = f"recipe {path}" + (f", which {extending[-1]} extends," if extending else "")
    if path in extending:
        raise FileError(f"{named} extends itself through {' and '.join(map(str, extending))}")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{named} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{named} is not readable as TOML: {error}") from error
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise ConfigError(f"{named}: extends must be the path of another recipe, got {base!r}")
    return _merged(_read_table(path.parent / base, (*extending, path)), table)


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key; anything else in ``top`` takes the place of what ``base`` has."""
    merged = dict(base)
    for key, value in top.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


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
    signature, budget = parts.get("signature"), parts.get("budget")
    return Experiment(
        name=str(parts.get("name", "run")),
        data=structure(DataPart, parts["data"], "[data]"),
        backbone=structure(BackbonePart, parts["backbone"], "[backbone]"),
        gate=_gate_config(parts["gate"]) if parts.get("gate") is not None else None,
        prune=_prune_config(parts["prune"]) if parts.get("prune") is not None else None,
        train=structure(Recipe, parts.get("train", {}), "[train]"),
        signature=structure(SignaturePart, signature, "[signature]") if signature is not None else None,
        budget=structure(BudgetPart, budget, "[budget]") if budget is not None else None,
    )


def as_table(experiment: Experiment) -> dict[str, Any]:
    """The experiment in full, as ``parse_experiment`` reads it."""
    table: dict[str, Any] = unstructure(experiment)
    for part, config in (("gate", experiment.gate), ("prune", experiment.prune)):
        if config is not None:
            table[part] = {"type": type(config).__name__, **table[part]}
    return table


def differing(mine: Experiment, stored: Any) -> list[str]:
    """Dotted names of the values that make a stored description another run than ``mine``; empty: the same run.

    ``stored`` is what ``as_table`` gave, now or in an older version: an option that it does not have has its default.
    """
    with suppress(ConfigError):  # what cannot be parsed, e.g. of a newer version, is compared as it stands
        stored = as_table(parse_experiment(stored))
    return differences(as_table(mine), stored)


def _gate_config(table: Any) -> GateConfig:
    if not isinstance(table, Mapping):
        raise ConfigError(f"[gate] must be a table, got {table!r}")
    fields = dict(table)
    kind, preset = str(fields.pop("type", DEFAULT.__name__)), str(fields.pop("preset", "default"))
    config_type = lookup("gate type", kind, gate_types)
    if preset not in config_type.presets:
        raise unknown(f"{kind} preset", preset, config_type.presets)
    return structure(config_type, {**config_type.presets[preset], **fields}, "[gate]")


def _prune_config(table: Any) -> PruneConfig:
    if not isinstance(table, Mapping) or "type" not in table:
        raise ConfigError(f"[prune] must be a table with the key 'type', one of {sorted(prune_types())}, got {table!r}")
    fields = dict(table)
    return structure(lookup("prune type", str(fields.pop("type")), prune_types), fields, "[prune]")


def read_run(run: str | Path) -> Experiment:
    """The experiment a run folder was made by."""
    path = Path(run) / "experiment.json"
    table = read_json(path)
    if not isinstance(table, Mapping):
        raise FileError(f"{path} must hold a table")
    try:
        return parse_experiment(table)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error

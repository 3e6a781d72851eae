"""The runs of `cofire train` as what `shift` compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from cofire.data.images import AbstractImages
from cofire.errors import ConfigError
from cofire.experiments.provenance import provenance
from cofire.experiments.recipes import as_table, read_run
from cofire.experiments.runs import read_result, read_sets, short_names, whole_macs
from cofire.gates.persistence import load
from cofire.shift.measure import shift
from cofire.shift.results import Shift


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """Finished runs on one data set, by the names of their folders.

    Args:
        models: name -> model.
        dense_macs: name -> MACs before pruning, for runs that were pruned.
        images: the test set of them all.
        described: name -> experiment and provenance of the run as JSON values.
    """

    models: dict[str, nn.Module]
    dense_macs: dict[str, int]
    images: AbstractImages
    batch_size: int
    described: dict[str, Any]


def shift_runs(
    folders: Sequence[Path],
    corruptions: Sequence[str] | Mapping[str, Sequence[float]],
    *,
    images: int | None = None,
    seed: int = 0,
) -> tuple[Shift, dict[str, Any]]:
    """Finished runs under shift; also as JSON values, with the recipes of the runs and where they were measured.

    Args:
        folders: of the runs, as for `read_runs`.
        corruptions: as for `shift`.
        images: how many of the test set, each class its share; None for all.
    """
    origin = provenance()
    runs = read_runs(folders)
    few = runs.images if images is None or images >= len(runs.images) else runs.images.split(images)[1]
    found = shift(runs.models, few, corruptions, seed=seed, batch_size=runs.batch_size, dense_macs=runs.dense_macs)
    return found, {"provenance": origin, "runs": runs.described, **found.to_json()}


def read_runs(folders: Sequence[Path]) -> Runs:
    """Models and test set of finished runs.

    Raises:
        FileError: a folder holds no finished run.
        ConfigError: the runs are on different data sets, or a folder is named twice.
    """
    names = short_names(folders)
    if len(names) < len(folders):
        raise ConfigError(f"every run must be named once, got {', '.join(map(str, folders))}")
    results = {name: read_result(folder) for name, folder in names.items()}
    experiments = {name: read_run(folder) for name, folder in names.items()}
    first, *others = experiments
    part = experiments[first].data
    for name in others:
        other = experiments[name].data
        if (other.name, other.args) != (part.name, part.args):
            raise ConfigError(
                f"runs must be on one data set: {first} is on {part.name} {part.args or ''}, "
                f"{name} on {other.name} {other.args or ''}; compare them apart"
            )
    sets = read_sets(experiments[first])
    whole = {name: whole_macs(experiment, sets) for name, experiment in experiments.items()}
    return Runs(
        models={name: load(folder) for name, folder in names.items()},
        dense_macs={name: macs for name, macs in whole.items() if macs is not None},
        images=sets.test,
        batch_size=part.eval_batch_size,
        described={
            name: {"experiment": as_table(experiment), "provenance": results[name].get("provenance")}
            for name, experiment in experiments.items()
        },
    )

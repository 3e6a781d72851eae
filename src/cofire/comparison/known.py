"""Comparison files read back: whole, and for a comparison that goes on where run folders are gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cofire.comparison.contenders import contenders
from cofire.comparison.jobs import Outcome
from cofire.comparison.table import Comparison, Network, Row
from cofire.errors import ConfigError, FileError, unknown
from cofire.experiments.recipes import Experiment, differing, parse_experiment
from cofire.files.atomic import read_table

_DAMAGE = (KeyError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a file says of one recipe's comparison.

    Args:
        outcomes: method -> seed -> how it ended.
        rows: method -> its row in the file, for its time.
        timing: of the rounds in which the file's dense network was timed; None if nothing was.
    """

    outcomes: Mapping[str, Mapping[int, Outcome]] = field(default_factory=dict)
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timing: Mapping[str, Any] | None = None

    def has(self, method: str, seed: int) -> bool:
        """Whether there is a result; one that was refused is tried again."""
        outcome = self.outcomes.get(method, {}).get(seed)
        return outcome is not None and outcome.result is not None

    def timed_on(self, method: str) -> Mapping[str, Any] | None:
        """Where and when the method's time was measured; None if it was not."""
        row = self.rows.get(method) or {}
        if row.get("time") is None:
            return None
        found: Mapping[str, Any] | None = row.get("timed_on") or (self.timing or {}).get("provenance")
        return found


def read_comparison(path: str | Path) -> Comparison:
    """The comparison in a file that `compare` has written.

    Raises:
        FileError: the file is missing or damaged.
    """
    networks = read_table(Path(path), "networks")["networks"]
    try:
        return Comparison(networks=[_network(network) for network in networks])
    except _DAMAGE as error:
        raise _damaged(path, error) from error


def _network(found: Mapping[str, Any]) -> Network:
    rows = [
        Row(
            method=row["method"],
            sort=row["sort"],
            outcomes=_outcomes(row),
            time=row["time"],
            not_timed=row["not_timed"],
            timed_on=row["timed_on"],
        )
        for row in found["rows"]
    ]
    base = parse_experiment(found["recipe"])
    return Network(base=base, macs=found["macs"], dense=found["dense"], rows=rows, timing=found["timing"])


def _outcomes(row: Mapping[str, Any]) -> dict[int, Outcome]:
    return {int(seed): Outcome(**outcome) for seed, outcome in row["seeds"].items()}


def read_known(path: str | Path, base: Experiment, macs: float) -> Known:
    """The comparison in a file that `compare` has written, for the same recipe and budget.

    Args:
        base: the experiment that all methods have in common.

    Raises:
        FileError: the file holds no such comparison, or one under another recipe or budget; says what differs.
    """
    path = Path(path)
    networks = read_table(path, "networks")["networks"]
    try:
        named = {network["recipe"]["name"]: network for network in networks}
        network = named.get(base.name)
        differs, found = [], {}
        if network is not None:
            differs = [*(["macs"] if network["macs"] != macs else []), *differing(base, network["recipe"])]
            found = {row["method"]: row for row in network["rows"]}
        outcomes = {method: _outcomes(row) for method, row in found.items()}
        timing = network and network["timing"]
    except _DAMAGE as error:
        raise _damaged(path, error) from error
    if network is None:
        raise FileError(f"{path} must hold a comparison under the recipe {base.name!r}, got {sorted(named)}")
    if differs:
        raise FileError(
            f"{path} holds another comparison of {base.name!r} (it differs in {', '.join(differs)}), whose rows do not "
            "compare with new ones; use its recipe and budget, or leave --known out"
        )
    for method in found:
        if method not in contenders():
            raise _stranger(path, method)
    return Known(outcomes=outcomes, rows=found, timing=timing)


def _damaged(path: str | Path, error: Exception) -> FileError:
    return FileError(f"{path} must be a comparison.json of cofire compare: {error!r}")


def _stranger(path: Path, method: str) -> ConfigError:
    return ConfigError(f"{path}: {unknown('method', method, contenders())}; load it with --plugin FILE")

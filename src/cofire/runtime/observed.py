"""What a program did on images that are known: how often each filter ran, and what each threshold costs.

It lies beside the program as ``x.cofire.observed.json``. A server tells by it how far masks have drifted, and which
threshold meets a budget. Shapes: N images, O filters of a group.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cofire.errors import ConfigError, FileError
from cofire.files.atomic import read_json, write_text
from cofire.files.strict import check, structure, unstructure
from cofire.runtime.engine import Engine

LEVELS = 20  # thresholds that are tried, spread evenly over the logits


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Rates and costs, each a mean over ``n`` images.

    Args:
        n: images that were looked at.
        rates: group -> for each filter, the share of images for which it ran.
        thresholds: ascending.
        macs: at each threshold, the share of the dense MACs that was executed.
    """

    n: int
    rates: dict[str, tuple[float, ...]]
    thresholds: tuple[float, ...]
    macs: tuple[float, ...]

    def __post_init__(self) -> None:
        check(self)
        if len(self.thresholds) != len(self.macs):
            raise ConfigError(
                f"Observed.macs must have a share for each of {len(self.thresholds)} thresholds, got {len(self.macs)}"
            )

    def threshold(self, budget: float) -> float:
        """The smallest threshold seen at which the mean image costs at most ``budget`` of the dense MACs.

        Raises:
            ConfigError: none does; says what can be reached.
        """
        fitting = [t for t, macs in zip(self.thresholds, self.macs, strict=True) if macs <= budget]
        if not fitting:
            least = f"the least is {min(self.macs):.3f}" if self.macs else "the program's gates have no threshold"
            raise ConfigError(f"budget={budget} cannot be met by a threshold: {least}")
        return min(fitting)


def observe(engine: Engine, x_NCHW: NDArray[np.float32]) -> Observed:
    """Run the images once as the program stands, and once at each of some thresholds."""
    engine(x_NCHW)
    rates = {name: mask_NO.mean(0) for name, mask_NO in engine.last_masks.items()}
    with engine.force({name: np.ones(filters) for name, filters in engine.groups.items()}):
        engine(x_NCHW[:1])
    dense = _macs(engine)
    logits = [logits_NO.ravel() for logits_NO in engine.logits(x_NCHW).values()]
    thresholds = np.unique(np.quantile(np.concatenate(logits), np.linspace(0, 1, LEVELS))) if logits else np.array([])
    shares = []
    for threshold in thresholds:
        engine(x_NCHW, threshold=float(threshold))
        shares.append(_macs(engine) / dense)
    told = len(set(shares)) > 1  # else the gates do not decide by a threshold
    return Observed(
        n=len(x_NCHW),
        rates={name: tuple(map(float, rate_O)) for name, rate_O in rates.items()},
        thresholds=tuple(map(float, thresholds)) if told else (),
        macs=tuple(shares) if told else (),
    )


def _macs(engine: Engine) -> float:
    """Executed per image of the last call."""
    return float(sum(macs_N.mean() for macs_N in engine.last_macs.values()))


def write_observed(observed: Observed, program: Path) -> Path:
    """Put it beside the program."""
    path = beside(program)
    write_text(path, json.dumps(unstructure(observed)) + "\n")
    return path


def read_observed(program: Path, engine: Engine) -> Observed | None:
    """What lies beside the program; None where nothing does.

    Raises:
        FileError: it is damaged, or of another program.
    """
    path = beside(program)
    if not path.exists():
        return None
    table: Any = read_json(path)
    try:
        found = structure(Observed, table, str(path))
    except ConfigError as error:
        raise FileError(f"{path} is damaged: {error}") from error
    filters = {name: len(rates) for name, rates in found.rates.items()}
    if filters != engine.groups:
        raise FileError(f"{path} is not of this program: its gates are others; make it anew or remove it")
    return found


def beside(program: Path) -> Path:
    """The file's place."""
    return program.with_name(f"{program.name}.observed.json")

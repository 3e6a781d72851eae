"""The programs that a server has: each with its engine, its counts, and what was observed of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cofire.errors import ConfigError
from cofire.runtime.engine import Engine, load_program
from cofire.runtime.observed import Observed, read_observed
from cofire.serving.metrics import Metrics
from cofire.serving.protocol import MACS, OUTPUT, Request

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A program under its name."""

    name: str
    engine: Engine
    observed: Observed | None
    metrics: Metrics = field(repr=False)

    def threshold(self, request: Request) -> float | None:
        """The one that a request asks for; None: the program's own.

        Raises:
            ConfigError: its budget cannot be met, or nobody observed what thresholds cost.
        """
        if request.budget is None:
            return request.threshold
        if self.observed is None:
            raise ConfigError(
                f"budget needs to know what thresholds of {self.name!r} cost: make its program with "
                "`cofire compile --observe N`, or ask for a threshold"
            )
        return self.observed.threshold(request.budget)

    def infer(self, x_BCHW: NDArray[np.float32], threshold: float | None, threads: int) -> dict[str, NDArray[Any]]:
        """Outputs by name; blocks until they are there."""
        output = self.engine(x_BCHW, threads, threshold=threshold)
        macs_B = np.stack([*self.engine.last_macs.values()]).sum(0)
        self.metrics.images(macs_B, self.engine.last_masks)
        return {OUTPUT: output, MACS: macs_B}


def load_models(programs: Sequence[str]) -> dict[str, Model]:
    """Name -> model, of texts ``PATH`` or ``NAME=PATH``; without a name it is the file's, less its ending."""
    models: dict[str, Model] = {}
    for text in programs:
        name, found, path = text.rpartition("=")
        file = Path(path)
        name = name if found else file.stem
        if not NAME.fullmatch(name):
            raise ConfigError(f"a model's name must be letters, digits, '.', '_' and '-', got {name!r}: NAME={path}")
        if name in models:
            raise ConfigError(f"each model must have a name of its own, got {name!r} twice: NAME={path}")
        engine = load_program(file)
        observed = read_observed(file, engine)
        models[name] = Model(name=name, engine=engine, observed=observed, metrics=Metrics(observed))
    return models

"""Laws of the bench: under one recipe, at its default rates, every method learns.

A comparison says little of a method that diverges, or collapses, at rates that were made for another one.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from small import ROOT

from cofire import compare
from cofire.comparison import contenders
from cofire.comparison.table import Row
from cofire.gates.base import GateConfig

RECIPE = ROOT / "recipes" / "digits" / "resnet8_compare.toml"
EPOCHS = 3
AIMING = [
    name
    for name, one in contenders().items()
    if issubclass(one.config_type, GateConfig) and one.config_type().knob == "target"
]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The baseline, trained once by the recipe."""
    out = tmp_path_factory.mktemp("dense")
    compare([RECIPE], methods="L1", epochs=0, out=out, rounds=0)
    return out / RECIPE.stem / "dense" / "run"


def row(name: str, dense: Path, out: Path, epochs: int) -> Row:
    weights = [f"backbone.weights={dense}"]
    found = compare([RECIPE], methods=name, macs=0.5, epochs=epochs, out=out, overrides=weights, rounds=0)
    return found.networks[0].rows[0]


@pytest.mark.parametrize("name", contenders())
def test_every_method_learns_at_the_default_rates(name: str, dense: Path, tmp_path: Path) -> None:
    found = row(name, dense, tmp_path, EPOCHS)
    assert found.refused is None
    (result,) = found.results
    assert all(math.isfinite(epoch["loss"]) for epoch in result["epochs"])
    assert found.values("top1")[0] > 0.3  # chance is 0.1


@pytest.mark.parametrize("name", AIMING)
def test_what_aims_at_a_budget_comes_near_it(name: str, dense: Path, tmp_path: Path) -> None:
    found = row(name, dense, tmp_path, 10)
    assert found.reached == pytest.approx(0.5, abs=0.06)
    assert found.values("top1")[0] > 0.9

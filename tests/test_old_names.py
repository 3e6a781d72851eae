"""Names of 0.1 that have better ones now still work."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("package", "old", "new"),
    [
        ("cofire", "Uniform", "Random"),
        ("cofire.shift", "Point", "AtSeverity"),
        ("cofire.bench", "Point", "MeasuredCost"),
    ],
)
def test_an_old_name_stands_for_the_new_one(package: str, old: str, new: str) -> None:
    module = importlib.import_module(package)
    assert getattr(module, old) is getattr(module, new)
    assert old in module.__all__

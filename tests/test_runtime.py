"""The optional extension says what the CPU can do, and its absence is no error."""

import sys

import pytest

from cofire.runtime import native_features


def test_features_are_known_names() -> None:
    pytest.importorskip("cofire.runtime._native")
    features = native_features()
    assert features is not None
    assert set(features) <= {"avx2", "fma", "avx512f", "avx512vnni", "neon"}


def test_without_the_extension_features_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("cofire.runtime._native", raising=False)
    monkeypatch.setitem(sys.modules, "cofire.runtime._native", None)
    assert native_features() is None

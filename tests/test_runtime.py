"""The optional extension says what the CPU can do; its absence is no error for users, and one for this suite."""

import sys

import conftest
import pytest

from cofire.runtime import native_features


def test_features_are_known_names() -> None:
    features = native_features()
    assert features is not None
    v2 = {"sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16", "lahf"}
    v3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "lzcnt", "movbe", "osxsave"}
    v4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    assert set(features) <= v2 | v3 | v4 | {"avx512vnni", "avx512vbmi", "avx512vbmi2", "neon"}


def test_without_the_extension_features_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("cofire.runtime._native", raising=False)
    monkeypatch.setitem(sys.modules, "cofire.runtime._native", None)
    assert native_features() is None


def test_without_the_extension_the_suite_fails_and_skips_nothing(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.delattr("cofire.runtime._native", raising=False)
    monkeypatch.setitem(sys.modules, "cofire.runtime._native", None)
    with pytest.raises(pytest.exit.Exception, match="the native engine was not built") as left:
        conftest.pytest_configure(pytestconfig)
    assert left.value.returncode == 1

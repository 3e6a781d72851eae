"""Fixtures that several test files use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """The engine is half of what is tested: without it the suite fails, and does not leave its tests out."""
    try:
        from cofire.runtime import _native
    except ImportError as error:
        pytest.exit(f"the native engine was not built ({error}): run `make .venv/dev.stamp`, and see what it says", 1)
    assert _native.Engine


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit-equality is promised for one number of threads; the smallest keeps tests alike on all machines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

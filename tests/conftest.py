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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: two workers that share the files end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit-equality is promised for one number of threads; the smallest keeps tests alike on all machines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

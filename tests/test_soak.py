"""The short form of ``make soak``."""

from __future__ import annotations

import soak


def test_callers_side_by_side_get_what_one_alone_gets_and_memory_stays() -> None:
    found = soak.soak(20_000)
    assert found.images >= 20_000
    assert found.wrong == 0
    assert found.grown < 1 << 20

"""Floors of an op's time: products and bytes by hand, and a profile that has them."""

from __future__ import annotations

import numpy as np
import pytest
from nets import images
from small import tiny_gated

from cofire import compile
from cofire.runtime.floors import Load, Speeds, footprint, loads


def table_of(stride: int, kernel: int, algorithm_input: int = 8) -> tuple[dict, dict]:
    """One gated conv from 4 to 6 channels, 8 x 8 pixels."""
    attrs = {"kernel": [kernel, kernel], "stride": [stride, stride]}
    op = {"kind": "conv", "src": [0], "dst": 1, "gate": {"group": 0}, "weights": ["w", "b"], "attrs": attrs}
    buffers = [[4, algorithm_input, algorithm_input], [6, 8 // stride, 8 // stride]]
    tensors = {"w": {"shape": [6, 4, kernel, kernel], "dtype": "F32"}, "b": {"shape": [6], "dtype": "F32"}}
    return {"ops": [op], "buffers": buffers, "quants": []}, tensors


def test_products_and_bytes_by_hand() -> None:
    table, tensors = table_of(1, 3)
    dense = 6 * 4 * 9 * 64
    (load,) = loads(table, tensors, ["gemm"], [dense], [1.0])
    weights = 4 * (6 * 4 * 9 + 6)
    assert load == Load(dense, 4 * (4 + 6) * 64 + weights, 32)
    (half,) = loads(table, tensors, ["gemm"], [dense / 4], [0.5])  # half the filters, half the inputs
    assert half == Load(dense / 4, load.bytes / 2, 32)
    (none,) = loads(table, tensors, ["gemm"], [0], [0.0])
    assert (none.products, none.bytes) == (0, 0)
    assert footprint(table, tensors) == 4 * 10 * 64 + weights


@pytest.mark.parametrize(
    ("stride", "kernel", "algorithm", "fewer"),
    [(1, 3, "wino2", 4 / 9), (1, 3, "wino4", 1 / 4), (2, 3, "wino4", 4 * 25 / 16 / 9), (2, 7, "wino4", 1 / 4)],
)
def test_winograd_multiplies_less(stride: int, kernel: int, algorithm: str, fewer: float) -> None:
    table, tensors = table_of(stride, kernel)
    (load,) = loads(table, tensors, [algorithm], [1000.0], [1.0])
    assert load.products == pytest.approx(1000 * fewer)


def test_winograd_on_bytes_reads_the_weights_as_they_are() -> None:
    table, tensors = table_of(1, 3)
    table["ops"][0]["kind"] = "conv8"
    (direct,), (winograd,) = (loads(table, tensors, [name], [1000.0], [1.0]) for name in ("gemm", "wino4"))
    assert winograd.bytes == direct.bytes
    assert winograd.products == direct.products / 4
    assert (winograd.bits, direct.bits) == (16, 8)


def test_floors_by_hand() -> None:
    speeds = Speeds(1e9, 4e9, 2e9, 1e10)
    assert [Load(2e6, 1e7, bits).floors(speeds) for bits in (32, 16, 8)] == [(2.0, 1.0), (1.0, 1.0), (0.5, 1.0)]


def test_a_profile_has_floors_that_shrink_with_the_masks() -> None:
    x = images(2, (1, 8, 8))
    gated = tiny_gated().eval()
    for engine in (compile(gated), compile(gated, precision="int8", images=x)):
        found = []
        for keep in (1, 0):
            masks = {name: np.arange(n) % 2 <= keep for name, n in engine.groups.items()}
            with engine.force(masks):
                found.append(engine.profile(x, rounds=1))
        assert len(found[0].floors) == len(found[0].names)
        assert all(time >= 0 for pair in found[0].floors for time in pair)
        for part in (0, 1):
            assert sum(pair[part] for pair in found[1].floors) < sum(pair[part] for pair in found[0].floors)
        assert "ms of products" in str(found[0])
        assert min(vars(found[0].speeds).values()) > 1e6  # per second

"""NaN and infinities go where docs/program.md says, with every algorithm on every kernel set."""

from __future__ import annotations

import hostile
import numpy as np
import pytest
import torch
from test_kernels import KERNELS as LEVELS

from cofire.runtime import _native, interpreter
from cofire.runtime.program_file import from_bytes

HEAD = {"pool": "max", "softmax": False, "weight": "h.w", "bias": None}


def bytes_of(kernel: int, stride: int, groups: int, act: str, side: int = 16, *, gated: bool = True) -> bytes:
    """A conv, its maxima in a head, and the pooled output of a second conv that the head decides on."""
    rng = np.random.default_rng(kernel)
    pad, out = kernel // 2, (side + 2 * (kernel // 2) - kernel) // stride + 1
    how = {"groups": groups, "act": act, "slope": 0.1 if act == "leaky" else 0.0}
    first = hostile.conv("c", 0, 1, (kernel, kernel), stride=[stride] * 2, padding=[pad] * 4, **how)
    second = hostile.conv("d", 1, 2)
    if gated:
        second["gate"] = {"group": 0, "head": HEAD}
    window = {**hostile.WINDOW, "kernel": [3, 3], "stride": [2, 2], "padding": [1] * 4}
    pool = hostile.op("pool", "p", [2], 3, **window, op="max", include_pad=False, adaptive=False)
    tensors = {
        "c.w": rng.normal(size=(4, 4 // groups, kernel, kernel)),
        "c.b": rng.normal(size=4),
        "d.w": rng.normal(size=(5, 4, 1, 1)),
        "d.b": rng.normal(size=5),
        **({"h.w": np.abs(rng.normal(size=(5, 4)))} if gated else {}),
    }
    shapes = [[4, side, side], [4, out, out], [5, out, out], [5, (out + 1) // 2, (out + 1) // 2]]
    groups_ = [{"name": "g", "filters": 5}] if gated else []
    return hostile.file(shapes, [first, second, pool], tensors, groups=groups_)


def run(content: bytes, kernel: str, algorithm: str, x: np.ndarray, threads: int) -> tuple[np.ndarray, np.ndarray]:
    program = from_bytes(content)
    engine = _native.Engine(content, kernel, "" if kernel == "ref" else f"{algorithm} gemm -")
    out, masks = np.empty((1, *program.output_shape), "f4"), np.zeros(5 * len(program.groups), "u1")
    engine.run(x, out, threads, 0.0, False, masks, None, None, None, None, [])
    return out, masks


CASES = [
    (3, 1, 1, "wino4"), (3, 1, 1, "wino2"), (3, 1, 1, "gemm"), (3, 1, 1, "im2col"), (3, 2, 1, "wino4"),
    (5, 1, 1, "gemm"), (7, 2, 1, "wino4"), (1, 1, 1, "im2col"), (1, 1, 1, "gemm"), (3, 1, 4, "depthwise"),
    (3, 2, 4, "depthwise"), (5, 1, 4, "depthwise"), (1, 1, 1, "filters"), (3, 1, 1, "ref"),
]  # fmt: skip


@pytest.mark.parametrize("act", ["none", "relu", "relu6", "leaky", "silu", "hardswish"])
@pytest.mark.parametrize(("kernel", "stride", "groups", "algorithm"), CASES)
def test_what_is_not_finite_reaches_the_same_outputs(
    kernel: int, stride: int, groups: int, algorithm: str, act: str
) -> None:
    """One odd pixel in a map, at a corner or inside: the interpreter's NaN are the engine's, and no others."""
    content = bytes_of(kernel, stride, groups, act, gated=False)
    program = from_bytes(content)
    for value, at in ((np.nan, (0, 5, 7)), (np.inf, (1, 0, 0)), (-np.inf, (2, 15, 15)), (np.nan, (3, 8, 0))):
        x = np.random.default_rng(0).normal(size=(1, 4, 16, 16)).astype("f4")
        x[(0, *at)] = value
        wanted = interpreter.trace(program, torch.from_numpy(x).double()).out.numpy()
        for level in LEVELS:
            found, _ = run(content, level, algorithm, x, 1)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True, err_msg=f"{level} {value}")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("level", ["ref", *LEVELS])
def test_a_head_that_sees_a_nan_switches_all_off(level: str, threads: int) -> None:
    """The maxima that convs keep for a head lose no NaN: its logits are NaN then, and above no threshold."""
    for kernel, stride, groups, algorithm in CASES:
        content = bytes_of(kernel, stride, groups, "relu")
        x = np.random.default_rng(0).normal(size=(1, 4, 16, 16)).astype("f4")
        assert run(content, level, algorithm, x, threads)[1].any()
        x[0, 1, 6, 6] = np.nan
        assert not run(content, level, algorithm, x, threads)[1].any(), algorithm


def test_winograd_is_neither_chosen_nor_taken_from_a_file_where_it_is_inexact() -> None:
    """Weights so large that their transforms overflow, or so small that they vanish."""
    for size, winograd in ((1.0, True), (1e37, False), (1e-37, False)):
        tensors = {"c.w": np.random.default_rng(0).uniform(0.5, 1, size=(8, 8, 3, 3)) * size, "c.b": np.zeros(8)}
        shapes = [[8, 32, 32]] * 2
        content = hostile.file(shapes, [hostile.conv("c", 0, 1, (3, 3), padding=[1] * 4)], tensors)
        assert _native.Engine(content, tuning_seconds=0.0).tuning.startswith("wino") == winograd, size
        if winograd:
            assert _native.Engine(content, tuning="wino4").tuning == "wino4"
        else:  # a tuning file has no more to say than the tuner
            with pytest.raises(RuntimeError, match="'c' cannot be 'wino4', which is too inexact with its weights"):
                _native.Engine(content, tuning="wino4")


@pytest.mark.parametrize("level", ["ref", *LEVELS])
def test_infinity_times_a_channel_that_is_not_live_is_zero(level: str) -> None:
    """Where the activation lifts zero one sees it; the interpreter had NaN there."""
    gate = {"group": 0, "head": {**HEAD, "weight": "h.w"}}
    first = {**hostile.op("act", "a", [0], 1, act="relu", slope=0.0), "gate": gate}
    second = hostile.op("mul", "m", [0, 1], 2, act="sigmoid", slope=0.0)
    tensors = {"h.w": np.array([[1.0, 0.0], [-1.0, 0.0]])}
    groups = [{"name": "g", "filters": 2}]
    content = hostile.file([[2, 3, 3]] * 3, [first, second], tensors, groups=groups)
    x = np.ones((1, 2, 3, 3), "f4")
    x[0, 1, 1, 1] = -np.inf  # which the head, with its maxima, does not see
    wanted = interpreter.trace(from_bytes(content), torch.from_numpy(x).double()).out.numpy()
    out, masks = np.empty((1, 2, 3, 3), "f4"), np.zeros(2, "u1")
    _native.Engine(content, level).run(x, out, 1, 0.0, False, masks, None, None, None, None, [])
    assert masks.tolist() == [1, 0]
    assert (out[0, 1] == 0.5).all()
    np.testing.assert_allclose(out, wanted, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("level", ["ref", *LEVELS])
def test_a_row_of_zeros_decides_by_its_bias(level: str, threads: int) -> None:
    """Whatever was pooled: it is not multiplied. Numbers below float32's normal range count as zeros."""
    gate = {"group": 0, "head": {**HEAD, "weight": "h.w", "bias": "h.b"}}
    only = {**hostile.op("act", "a", [0], 1, act="relu", slope=0.0), "gate": gate}
    weight = np.zeros((9, 9))
    weight[[0, 5]], weight[7] = 1.0, 1e-40
    bias = np.array([1.0, 2.0, -1.0, 0.5, -0.5, -1.0, 0.0, 3.0, 0.25])
    content = hostile.file([[9, 3, 3]] * 2, [only], {"h.w": weight, "h.b": bias}, groups=[{"name": "g", "filters": 9}])
    x = np.ones((1, 9, 3, 3), "f4")
    for first, on in ((1.0, [1, 1, 0, 1, 0, 1, 0, 1, 1]), (np.nan, [0, 1, 0, 1, 0, 0, 0, 1, 1])):
        x[0, 0, 1, 1] = first
        masks, out = np.empty(9, "u1"), np.empty(x.shape, "f4")
        _native.Engine(content, level).run(x, out, threads, 0.0, False, masks, None, None, None, None, [])
        assert masks.tolist() == on
        assert interpreter.trace(from_bytes(content), torch.from_numpy(x)).masks["g"].int().tolist() == [on]

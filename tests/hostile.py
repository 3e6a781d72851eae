"""Program files that mean harm, made by hand: the writer of cofire would not make them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np

WINDOW = {"kernel": [1, 1], "stride": [1, 1], "padding": [0, 0, 0, 0], "dilation": [1, 1]}


def conv(name: str, src: int, dst: int, kernel: tuple[int, int] = (1, 1), **attrs: Any) -> dict[str, Any]:
    """A conv's table; its tensors are ``name.w`` and ``name.b``."""
    own = {**WINDOW, "kernel": list(kernel), "groups": 1, "residual": False, "act": "none", "slope": 0.0, **attrs}
    return op("conv", name, [src], dst, [f"{name}.w", f"{name}.b"], **own)


def op(kind: str, name: str, src: list[int], dst: int, weights: list[str] | None = None, **attrs: Any) -> dict[str, Any]:
    table = {"kind": kind, "name": name, "src": src, "dst": dst, "attrs": attrs, "weights": weights or [], "gate": None}
    return table


def file(
    buffers: list[list[int]],
    ops: list[dict[str, Any]],
    tensors: dict[str, Any] | None = None,
    *,
    output: int | None = None,
    text: Any = lambda table: json.dumps(table, separators=(",", ":")),
    **changed: Any,
) -> bytes:
    """The bytes of a program file of version 1; ``text`` makes JSON of its table."""
    arrays = {name: np.asarray(values, "<f4") for name, values in (tensors or {}).items()}
    data = b"".join(array.tobytes() for array in arrays.values())
    last = len(buffers) - 1 if output is None else output
    table = {
        "version": 1,
        "input": 0,
        "output": last,
        "output_shape": buffers[last],
        "buffers": buffers,
        "groups": [],
        "threshold": 0.0,
        "ops": ops,
        "sha256": hashlib.sha256(data).hexdigest(),
        **changed,
    }
    header: dict[str, Any] = {"__metadata__": {"cofire.program": text(table)}}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def huge_plane() -> bytes:
    """736 bytes; took 27 s and 6.5 GB to load: algorithms were timed on a plane of 2^26 pixels."""
    plane = [1, 8192, 8192]
    tensors = {"c.w": np.ones((1, 1, 3, 3)), "c.b": [0]}
    return file([plane, plane], [conv("c", 0, 1, (3, 3), padding=[1, 1, 1, 1])], tensors)


def much_memory() -> bytes:
    """About 700 bytes; needed 3 GB for one image."""
    plane = [4, 8192, 8192]
    return file([plane, plane, plane], [op("act", f"a{i}", [i], i + 1, act="relu", slope=0.0) for i in range(2)])


def huge_kernel() -> bytes:
    """1 MB; ran for more than 300 s: 2^18 taps on each of 2^20 pixels."""
    tensors = {"c.w": np.zeros((1, 1, 512, 512)), "c.b": [0]}
    return file([[1, 1535, 1535], [1, 1024, 1024]], [conv("c", 0, 1, (512, 512))], tensors)


def many_ops(count: int = 100_000) -> bytes:
    """17 MB; was planned for more than 600 s: every op's output is needed until the end."""
    ops = [op("act", str(i), [0], i + 1, act="relu", slope=0.0) for i in range(count - 1)]
    ops.append(op("cat", "all", list(range(1, count)), count))
    return file([[1, 1, 1]] * count + [[count - 1, 1, 1]], ops)


def shared_tensor() -> bytes:
    """Small file, large engine: every conv lays out the same weights for itself."""
    convs = [conv("c", i, i + 1) for i in range(500)]
    ops = [{**table, "name": f"c{i}"} for i, table in enumerate(convs)]
    return file([[256, 1, 1]] * 501, ops, {"c.w": np.zeros((256, 256, 1, 1)), "c.b": np.zeros(256)})


def large_windows() -> bytes:
    """Means over windows of a million elements, a thousand times."""
    shape = [1, 1023, 1023]
    attrs = {**WINDOW, "kernel": [1023, 1023], "padding": [511] * 4, "op": "avg", "include_pad": False, "adaptive": False}
    return file([shape, shape], [op("pool", "p", [0], 1, **attrs)])


COSTLY = [huge_plane, much_memory, huge_kernel, shared_tensor, large_windows]


def _small(**changed: Any) -> bytes:
    ops = [conv("c", 0, 1), op("act", "a", [1], 2, act="relu", slope=0.0)]
    return file([[2, 3, 3]] * 3, ops, {"c.w": np.ones((2, 2, 1, 1)), "c.b": [0, 0]}, **changed)


def _replaced(old: str, new: str) -> bytes:
    def text(table: Any) -> str:
        plain = json.dumps(table, separators=(",", ":"))
        assert old in plain
        return plain.replace(old, new, 1)

    return _small(text=text)


def odd_files() -> dict[str, bytes]:
    """Files on which the readers of 0.1 disagreed, or that ended in a raw error."""
    return {
        "plain": _small(),
        "repeated_key": _replaced('"threshold":0.0', '"threshold":1.0,"threshold":0.0'),
        "fraction_for_integer": _replaced('"groups":1', '"groups":1.0'),
        "exponent_for_integer": _replaced('"input":0', '"input":0e0'),
        "deep_nesting": _replaced('"groups":[]', '"groups":' + "[" * 5000 + "]" * 5000),
        "deep_header": (lambda text: len(text).to_bytes(8, "little") + text)(b'{"a":' * 100_000),
        "nan_threshold": _replaced('"threshold":0.0', '"threshold":NaN'),
        "infinite_threshold": _replaced('"threshold":0.0', '"threshold":1e999'),
        "huge_integer": _replaced('"input":0', '"input":' + "9" * 5000),
        "half_surrogate": _replaced('"name":"a"', '"name":"\\ud800"'),
        "nul_in_name": _replaced('"name":"a"', '"name":"\\u0000"'),
        "nan_weight": file([[1, 1, 1]] * 2, [conv("c", 0, 1)], {"c.w": np.full((1, 1, 1, 1), np.nan), "c.b": [0]}),
        "infinite_weight": file([[1, 1, 1]] * 2, [conv("c", 0, 1)], {"c.w": np.ones((1, 1, 1, 1)), "c.b": [np.inf]}),
        "tensor_used_twice": shared_tensor(),
        "not_utf8": _small()[:-40].replace(b"relu", b"re\xff\xfe") + _small()[-40:],
        "utf16": (lambda text: len(text).to_bytes(8, "little") + text)(json.dumps({"__metadata__": {}}).encode("utf-16")),
        "empty": b"",
        "only_a_length": (2**63).to_bytes(8, "little"),
    }

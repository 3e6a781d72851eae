"""The native loader: takes what the Python writer writes, refuses everything else, by name.

One test per rule of ``docs/program.md`` is in ``csrc/tests``, in test_program.cpp and test_ops.cpp; here both
sides of the file meet.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import SHAPE, Net, bn, conv
from small import tiny_gated, tiny_plain
from torch import nn

from cofire.runtime import _native
from cofire.runtime.lowering import lower
from cofire.runtime.program_file import read, to_bytes

if not hasattr(_native, "Engine"):
    pytest.skip("the extension was built without an engine", allow_module_level=True)


def _load(content: bytes) -> _native.Engine:
    return _native.Engine(content, "ref", "")


def _gated() -> bytes:
    return to_bytes(lower(tiny_gated()))


def _changed(content: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with its program's table changed."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    table = json.loads(header["__metadata__"]["cofire.program"])
    change(table)
    header["__metadata__"]["cofire.program"] = json.dumps(table)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[start:]


def _everything() -> Net:
    """A network that is lowered to every kind of op."""

    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = net.act(net.norm(net.first(x)))
        y = torch.cat([y, net.pool(y).flip(1)], 1)[:, 1:] + net.bypass(y[:, :1])
        z = torch.sigmoid(net.squeeze(y.mean((2, 3), keepdim=True)))
        y = (y * z)[:, :, ::2, ::2] + 0.5
        return net.fc(net.down(y).relu().flatten(1))

    return Net(
        forward,
        first=conv(3, 4),
        norm=bn(4),
        act=nn.LeakyReLU(0.1),
        pool=nn.MaxPool2d(3, 1, 1),
        bypass=conv(1, 7, 1),
        squeeze=conv(7, 7, 1),
        down=nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        fc=nn.Linear(7 * 3 * 3, 5),
    ).eval()


@pytest.mark.parametrize("model", [tiny_gated, tiny_plain, _everything])
def test_loads_what_the_writer_writes(model: Callable[[], nn.Module]) -> None:
    program = lower(model().eval(), SHAPE if model is _everything else None)
    assert len(_load(to_bytes(program)).tuning.split()) == len(program.ops)


def test_names_beyond_ascii_load() -> None:
    content = _changed(_gated(), lambda table: table["ops"][0].update(name="größe 名前 🙂"))
    assert _load(content).tuning == _load(_gated()).tuning


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.update(version=4), "file has version 4, this cofire reads 1 to 3: upgrade"),
        (lambda table: table.update(version=1), "the program has the unknown key"),
        (lambda table: table.update(author="me"), 'unknown key "author"'),
        (lambda table: table.pop("threshold"), 'lacks the key "threshold"'),
        (lambda table: table.update(threshold=float("nan")), "invalid JSON"),
        (lambda table: table.update(sha256="0" * 64), "the file is damaged"),
        (
            lambda table: table["ops"][1].update(dst=table["input"]),
            r"op 1 \(\".*\"\): dst must not be the program's input, got 0",
        ),
        (
            lambda table: table["ops"][1]["attrs"].update(stride=[2, 1]),
            r"op 1 \(\".*\"\): output height must be 4, got 8",
        ),
        (lambda table: table["ops"][0]["weights"].reverse(), r"op 0 \(\".*\"\): the tensor .* must have the shape"),
        (lambda table: table["ops"].pop(), "must be written by an op"),
        (lambda table: table["groups"][0].update(filters=3), "must have as many filters as the output channels"),
        (lambda table: table["buffers"].append([1, 1, 1]), r"buffer \d+ must be written by an op"),
    ],
)
def test_refuses_a_changed_program(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        _load(_changed(_gated(), change))


def test_refuses_every_truncation_and_any_changed_byte_of_the_weights() -> None:
    content = _gated()
    start = 8 + int.from_bytes(content[:8], "little")
    for end in [*range(0, start, 97), *range(start, len(content), 9973), len(content) - 1]:
        with pytest.raises(RuntimeError, match="invalid program file"):
            _load(content[:end])
    for at in range(start, len(content), 9973):
        with pytest.raises(RuntimeError, match="the file is damaged"):
            _load(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def test_refuses_another_safetensors_file() -> None:
    from safetensors.torch import save

    with pytest.raises(RuntimeError, match="not a cofire program"):
        _load(save({"weight": torch.zeros(3)}))


def test_both_readers_take_the_same_file(tmp_path: Any) -> None:
    content = _gated()
    (tmp_path / "x.cofire").write_bytes(content)
    assert to_bytes(read(tmp_path / "x.cofire")) == content
    _load(content)

"""A program comes back from its file as it was, or is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import gated_net, images
from small import tiny_gated, tiny_plain
from test_lowered_nets import CASES, net_of

import cofire
from cofire import FileError
from cofire.runtime.interpreter import run
from cofire.runtime.lowering import lower
from cofire.runtime.program import Program
from cofire.runtime.program_file import read, to_bytes, write


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Program]:
    program = lower(tiny_gated(always=True).eval())
    return write(program, tmp_path / "tiny.cofire"), program


def test_a_program_comes_back_as_it_was(written: tuple[Path, Program]) -> None:
    path, program = written
    again = read(path)
    assert to_bytes(again) == to_bytes(program) == path.read_bytes()
    x = images(2, (1, 8, 8))
    assert torch.equal(run(again, x)[0], run(program, x)[0])
    assert (again.groups, again.threshold, again.buffers) == (program.groups, program.threshold, program.buffers)


def test_every_kind_of_op_comes_back_as_it_was(tmp_path: Path) -> None:
    for name in (
        "halves, one of them further",
        "squeeze and excite",
        "pre-activation",
        "act leaky",
        "sigmoid of a sum",
    ):
        program = lower(gated_net(net_of(CASES[name]), linear=True))
        path = write(program, tmp_path / "net.cofire")
        assert to_bytes(read(path)) == to_bytes(program)


def test_a_program_file_is_a_safetensors_file(written: tuple[Path, Program]) -> None:
    from safetensors import safe_open

    path, _ = written
    with safe_open(path, "pt") as file:
        assert list(file.metadata()) == ["cofire.program"]
        table = json.loads(file.metadata()["cofire.program"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    named = [name for op in table["ops"] for name in op["weights"]]
    named += [
        op["gate"]["head"][part]
        for op in table["ops"]
        if op["gate"] and op["gate"]["head"]
        for part in ("weight", "bias")
    ]
    assert sorted(named) == sorted(tensors)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert len(path.read_bytes()) % 4 == 0


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the table of a program file."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    table = json.loads(header["__metadata__"]["cofire.program"])
    change(table)
    header["__metadata__"]["cofire.program"] = json.dumps(table)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "newer": (lambda t: t.update(version=4), "file has version 4, this cofire reads 1 to 3"),
    "digest": (lambda t: t.update(sha256="0" * 64), "the file is damaged"),
    "no digest": (lambda t: t.pop("sha256"), 'lacks the key "sha256"'),
    "unknown key": (lambda t: t.update(extra=1), 'unknown key "extra"'),
    "missing key": (lambda t: t.pop("groups"), 'lacks the key "groups"'),
    "unknown kind": (lambda t: t["ops"][0].update(kind="exec"), "kind must be one of conv"),
    "unknown attr": (lambda t: t["ops"][0]["attrs"].update(size=1), "unknown key"),
    "missing attr": (lambda t: t["ops"][0]["attrs"].pop("act"), 'attrs lacks the key "act"'),
    "missing tensor": (
        lambda t: t["ops"][0].update(weights=["0.weight", "none"]),
        'tensor "none" must be in the file',
    ),
    "unused tensors": (lambda t: t["ops"].pop(), "must be written by an op"),
    "wrong type": (lambda t: t.update(input="0"), "input must be an integer from 0 to"),
    "wrong activation": (lambda t: t["ops"][0]["attrs"].update(act="exp"), "act must be one of none relu"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_file_is_refused(name: str, written: tuple[Path, Program]) -> None:
    path, _ = written
    change, message = CHANGES[name]
    rewritten(path, change)
    with pytest.raises(FileError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


def test_a_truncated_damaged_or_foreign_file_is_refused(written: tuple[Path, Program], tmp_path: Path) -> None:
    path, _ = written
    content = path.read_bytes()
    for size in (0, 4, 8, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(FileError, match=r"truncated|not a program"):
            read(path)
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(FileError, match="the file is damaged"):
        read(path)
    cofire.save(tiny_plain(), tmp_path / "model")
    with pytest.raises(FileError, match="is not a program"):
        read(tmp_path / "model" / "model.safetensors")
    with pytest.raises(FileError, match="cannot be read"):
        read(tmp_path / "none.cofire")


def test_no_change_of_a_byte_goes_unnoticed(written: tuple[Path, Program]) -> None:
    path, program = written
    content = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    end = 8 + int.from_bytes(content[:8], "little")
    for place in [*torch.randint(0, end, (150,), generator=generator).tolist(), end, end + 1, len(content) - 1]:
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        try:
            found = read(path)
        except FileError:
            continue
        # Only what a header means can change without contradiction, such as a name.
        assert place < end
        assert len(found.ops) == len(program.ops)

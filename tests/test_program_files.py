"""Laws of a program's file and of the tuning beside it: they come back as they were, or are refused or ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowered import gated_as
from nets import images
from small import tiny_plain
from test_engine import DIGITS
from test_engine_requests import asked, same

from cofire import FTWT, FileError
from cofire.runtime.engine import Engine, compile, load_program


@pytest.fixture(scope="module")
def engine() -> Engine:
    return compile(gated_as(tiny_plain(), DIGITS, FTWT(always=True)))


def test_a_saved_program_comes_back_with_its_tuning(engine: Engine, tmp_path: Path) -> None:
    path, x = tmp_path / "digits.cofire", images(3, DIGITS)
    engine.threshold, before = 0.25, engine.threshold
    try:
        assert engine.save(path) == path
        wanted = asked(engine, x, {}, 1)
    finally:
        engine.threshold = before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["digits.cofire", "digits.cofire.tuning"]
    loaded = load_program(path)
    assert loaded.tuning == engine.tuning
    loaded.threshold = 0.25
    assert same(asked(loaded, x, {}, 1), wanted)
    assert loaded.input_shape == DIGITS


def swapped(words: str) -> str:
    """Another tuning that is as legal: every conv with the reference."""
    return " ".join("-" if word == "-" else "ref" for word in words.split())


def test_the_tuning_beside_a_file_is_used_only_if_it_was_made_here(engine: Engine, tmp_path: Path) -> None:
    path = engine.save(tmp_path / "digits.cofire")
    beside = tmp_path / "digits.cofire.tuning"
    machine, words = beside.read_text().splitlines()
    other = swapped(words)
    beside.write_text(f"{machine}\n{other}\n")
    assert load_program(path).tuning == other
    beside.write_text(f"another machine\n{other}\n")
    assert load_program(path).tuning != other
    assert beside.read_text().splitlines()[0] == machine  # timed anew and kept
    assert load_program(path).tuning == beside.read_text().splitlines()[1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"\xff\xfe\0",
        b"{m}\n",
        b"{m}\n\n",
        b"{m}\nref\n",
        b"{m}\nref {w}\n",
        b"{m}\nnonsense {w}\n",
        b"{m}\n{w}\n{w}\n",
        b"{w}\n{m}\n",
    ],
)
def test_a_damaged_tuning_is_ignored(engine: Engine, tmp_path: Path, content: bytes) -> None:
    path, x = engine.save(tmp_path / "digits.cofire"), images(2, DIGITS)
    beside = tmp_path / "digits.cofire.tuning"
    machine, words = (line.encode() for line in beside.read_text().splitlines())
    beside.write_bytes(content.replace(b"{m}", machine).replace(b"{w}", words))
    loaded = load_program(path)
    assert len(loaded.tuning.split()) == len(engine.program.ops)
    assert torch.allclose(loaded(x), engine(x), atol=1e-4)
    assert beside.read_text() == f"{machine.decode()}\n{loaded.tuning}\n"


def test_a_program_without_tuning_in_a_folder_that_cannot_be_written(engine: Engine, tmp_path: Path) -> None:
    path = engine.save(tmp_path / "digits.cofire")
    beside = tmp_path / "digits.cofire.tuning"
    beside.unlink()
    beside.mkdir()  # no file can be put in its place, whoever we are
    assert load_program(path)(images(2, DIGITS)).shape == (2, 10)


def changed(content: bytes, old: bytes, new: bytes) -> bytes:
    assert content.count(old) >= 1
    assert len(old) == len(new)
    return content.replace(old, new, 1)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in the header": lambda content: content[:100],
    "cut in the data": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "another byte of the data": lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
    "newer": lambda content: changed(content, rb"\"version\": 3", rb"\"version\": 4"),
    "foreign": lambda content: b"\x89PNG\r\n\x1a\n" + content,
    "text": lambda content: b"not a program\n" * 10,
    "another kind of op": lambda content: changed(content, rb"\"kind\": \"conv\"", rb"\"kind\": \"cove\""),
    "another shape": lambda content: changed(content, rb"\"kernel\": [3, 3]", rb"\"kernel\": [3, 4]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_program_is_refused(engine: Engine, tmp_path: Path, damage: str) -> None:
    path = engine.save(tmp_path / "digits.cofire")
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(FileError, match=r"digits\.cofire"):
        load_program(path)


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"nothing\.cofire"):
        load_program(tmp_path / "nothing.cofire")

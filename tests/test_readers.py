"""Every seed and every past finding of ``make fuzz-python``: read, or refused by an error of cofire."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
from readers import ATTACKS, READERS

from cofire.errors import CofireError

FILES = sorted(path for name in READERS for path in (ATTACKS / name).iterdir())


def test_make_fuzzes_every_reader() -> None:
    (line,) = re.findall(r"^READERS := (.*)$", (ATTACKS.parent / "Makefile").read_text(), re.M)
    assert line.split() == list(READERS)


def test_every_reader_has_a_seed_that_it_reads(tmp_path: Path) -> None:
    for name, read in READERS.items():
        plain = sorted((ATTACKS / name).glob("plain.*"))
        assert plain, name
        read(tmp_path / name, plain[0].read_bytes())


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_hostile_file_ends_in_an_error_of_ours(path: Path, tmp_path: Path) -> None:
    """Any other error fails the test; a few files are valid, and are read."""
    with suppress(CofireError):
        READERS[path.parent.name](tmp_path / "x", path.read_bytes())

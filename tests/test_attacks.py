"""No file can hurt: hostile program files cost little, and both readers say the same of every file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hostile
import pytest

from cofire import CompileError, Limits, load_program
from cofire.errors import ConfigError, FileError
from cofire.runtime import _native
from cofire.runtime.program import LIFTING
from cofire.runtime.program_file import from_bytes, read, to_bytes

ATTACKS = Path(__file__).parents[1] / "attacks" / "program"

# Loads a file with the defaults and runs one image, with no more than 1 GB and 20 seconds of CPU. Only the compiled
# module and numpy are there: PyTorch alone would take the memory.
CONFINED = """
import importlib.machinery, importlib.util, resource, sys
import numpy as np
loader = importlib.machinery.ExtensionFileLoader("_native", sys.argv[1])
_native = importlib.util.module_from_spec(importlib.util.spec_from_loader("_native", loader))
loader.exec_module(_native)
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
try:
    engine = _native.Engine(open(sys.argv[2], "rb").read(), sys.argv[3])
except _native.TooCostly as error:
    sys.exit(f"too costly: {error}")
except RuntimeError as error:
    sys.exit(f"refused: {error}")
"""


def confined(content: bytes, tmp_path: Path, kernel: str = "") -> str:
    """How a process of its own ends that may not take much: "" if it loads."""
    path = tmp_path / "x.cofire"
    path.write_bytes(content)
    command = [sys.executable, "-c", CONFINED, str(_native.__file__), str(path), kernel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode in (0, 1), (done.returncode, done.stderr)
    return done.stderr.strip()


@pytest.mark.parametrize("attack", hostile.COSTLY)
def test_a_small_file_costs_little(attack: Callable[[], bytes], tmp_path: Path) -> None:
    said = confined(attack(), tmp_path)
    assert said.startswith(("too costly: one image must take at most", "refused: invalid program file: op")), said


def test_a_hundred_thousand_ops_are_planned_in_seconds(tmp_path: Path) -> None:
    content = hostile.many_ops()
    assert len(content) > 9_000_000
    assert confined(content, tmp_path) == ""


def test_limits_can_be_raised(tmp_path: Path) -> None:
    path = tmp_path / "x.cofire"
    shape = [1, 2048, 2048]
    content = hostile.file([shape, shape], [hostile.op("act", "a", [0], 1, act="relu", slope=0.0)])
    path.write_bytes(content)
    assert load_program(path).input_shape == tuple(shape)
    with pytest.raises(CompileError, match=r"at most 1e[+]06 bytes of memory, but this program needs .*limits=Limits"):
        load_program(path, limits=Limits(memory=1_000_000))
    with pytest.raises(CompileError, match=r"at most 1000 steps of work, but this program needs 1\.34"):
        load_program(path, limits=Limits(work=1000))
    assert load_program(path, limits=Limits(memory=1 << 26, work=1e9, tuning_seconds=0)).input_shape == tuple(shape)


@pytest.mark.parametrize("name", [name for name in hostile.odd_files() if name not in ("plain", "nul_in_name")])
def test_both_readers_refuse_with_the_same_words(name: str, tmp_path: Path) -> None:
    content = hostile.odd_files()[name]
    with pytest.raises(RuntimeError, match=r"^invalid program file: ") as native:
        _native.Engine(content)
    (tmp_path / "x.cofire").write_bytes(content)
    with pytest.raises(FileError) as ours:
        read(tmp_path / "x.cofire")
    assert str(ours.value).endswith(str(native.value))


@pytest.mark.parametrize("act", sorted(LIFTING))
def test_no_activation_that_lifts_zero_follows_a_residual(act: str) -> None:
    content = (ATTACKS / "softplus_after_residual.cofire").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(b"softplus", act.encode())
    with pytest.raises(RuntimeError, match="act after a residual must be zero at zero"):
        _native.Engine(len(header).to_bytes(8, "little") + header + content[8 + length :])


@pytest.mark.parametrize("name", ["plain", "nul_in_name"])
def test_both_readers_take_odd_but_valid_files(name: str) -> None:
    content = hostile.odd_files()[name]
    _native.Engine(content)
    program = from_bytes(content)
    assert to_bytes(from_bytes(to_bytes(program))) == to_bytes(program)


def test_a_program_with_a_threshold_that_is_no_number_is_not_written() -> None:
    from dataclasses import replace

    program = from_bytes(hostile.odd_files()["plain"])
    with pytest.raises(ConfigError, match="threshold, slopes and numbers of the card must be finite"):
        to_bytes(replace(program, threshold=float("nan")))


@pytest.mark.parametrize("path", sorted(ATTACKS.glob("*.cofire")), ids=lambda path: path.stem)
def test_what_once_did_harm_does_none(path: Path, tmp_path: Path) -> None:
    """Seeds and past findings of the fuzzers; attacks/README.md says what each was."""
    content = path.read_bytes()
    said = confined(content, tmp_path)
    assert said == "" or said.startswith(("too costly: ", "refused: invalid program file: ")), said
    try:
        from_bytes(content)
    except ConfigError as error:
        assert said == f"refused: {error}"  # noqa: PT017 (either way is right)

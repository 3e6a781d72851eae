"""The C example, built against the shared library as its README says, prints what the Python engine computes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from nets import images
from small import ROOT, tiny_gated

import cofire
from cofire.runtime.engine import Engine, compile

SHAPE = (1, 8, 8)
CMAKE = shutil.which("cmake", path=Path(sys.executable).parent) or shutil.which("cmake")
CC = shutil.which("cc")


def done(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=280)


def made(*command: object) -> None:
    result = done(*command)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's executable. Where the extension was built, the library is linked from what was compiled for it."""
    if CMAKE is None or CC is None:
        pytest.skip(f"building the C example needs {'a C compiler (cc)' if CMAKE else 'cmake'}")
    build, found = ROOT / "build" / "editable", tmp_path_factory.mktemp("example") / "run_program"
    if not (build / "CMakeCache.txt").exists():
        build = found.parent / "core"
        made(CMAKE, "-S", ROOT, "-B", build, "-DCOFIRE_PYTHON=OFF")
    made(CMAKE, "--build", build, "--target", "cofire")
    sources = ("-I", ROOT / "csrc", ROOT / "examples" / "run_program.c")
    warnings = ("-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
    made(CC, *warnings, *sources, "-L", build, "-lcofire", f"-Wl,-rpath,{build}", "-o", found)
    return found


@pytest.fixture(scope="module")
def engine() -> Engine:
    return compile(tiny_gated(always=True).eval())


@pytest.fixture(scope="module")
def file(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine.save(tmp_path_factory.mktemp("program") / "digits.cofire")


def printed(program: Path, *arguments: object) -> tuple[dict[int, float], str]:
    """The lines of the largest outputs, and the last line."""
    result = done(program, *arguments)
    assert result.returncode == 0, result.stderr
    *lines, last = result.stdout.splitlines()
    return {int(line.split()[0]): float(line.split()[1]) for line in lines}, last


def five_largest(output_K: torch.Tensor) -> dict[int, float]:
    best = output_K.topk(5)
    return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_an_image_gives_what_the_python_engine_gives(
    program: Path, engine: Engine, file: Path, tmp_path: Path, threads: int
) -> None:
    x = images(1, SHAPE)
    x.numpy().tofile(tmp_path / "image.f32")
    found, last = printed(program, file, tmp_path / "image.f32", threads)
    wanted = five_largest(engine(x, threads)[0])
    assert list(found) == list(wanted)
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-4, abs=1e-6)
    assert last.endswith(f"{threads} thread(s), cofire {cofire.__version__}")


def test_without_an_image_a_ramp_stands_in(program: Path, engine: Engine, file: Path) -> None:
    ramp = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, *SHAPE)
    wanted = five_largest(torch.from_numpy(engine(ramp))[0])
    for arguments in ((), ("-",), ("-", 2)):
        found, _ = printed(program, file, *arguments)
        assert list(found) == list(wanted)
        assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-4, abs=1e-6)


def test_what_is_wrong_is_said(program: Path, file: Path, tmp_path: Path) -> None:
    (tmp_path / "short.f32").write_bytes(bytes(4 * 63))
    (tmp_path / "cut.cofire").write_bytes(file.read_bytes()[:-1])
    for arguments, message in (
        ((), "usage: run_program model.cofire"),
        ((file, tmp_path / "short.f32"), "short.f32 must hold 1 x 8 x 8 floats"),
        ((file, "-", 0), "threads must be 1 or more, got 0"),
        ((tmp_path / "none.cofire",), "none.cofire: No such file"),
        ((tmp_path / "cut.cofire",), "invalid program file"),
    ):
        result = done(program, *arguments)
        assert result.returncode == 1
        assert result.stdout == ""
        assert message in result.stderr

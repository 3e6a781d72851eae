"""`cofire bench`: what it takes, what it writes, what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from benched import StubEngine, small_bench
from small import tiny_gated
from typer.testing import CliRunner

from cofire import FileError
from cofire.bench import PEERS, bench_program, random_plan
from cofire.bench import command as bench_command
from cofire.bench.ours import NAME, compile_engine, load_program
from cofire.errors import ConfigError, DataError


def call(*args: str) -> Any:
    app = typer.Typer()
    app.command()(bench_command.bench)
    return CliRunner().invoke(app, args)


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with PyTorch alone, and the stub for our engine."""
    monkeypatch.setattr(bench_command, "PEERS", PEERS[:1])
    run = bench_command.run_bench
    float32 = {"compile": StubEngine, "precisions": ["float32"]}
    monkeypatch.setattr(bench_command, "run_bench", lambda *args, **kw: run(*args, **{**kw, **float32}))


@pytest.mark.usefixtures("stubbed")
def test_the_command_writes_json_with_its_provenance(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ("--rounds", "2", "--warm-up", "0", "--out", str(path))
    done = call("--backbone", "resnet8_digits", "--input", "1,8,8", "--macs", "0.48", *options)
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert found["provenance"]["machine"]["cpu"]
    assert found["executed_macs_reduction"] == pytest.approx(0.52, abs=0.01)
    assert found["ratio_to_fastest_dense"] > 0
    assert "resnet8_digits" in done.output


@pytest.mark.usefixtures("stubbed")
def test_the_command_takes_a_saved_model_and_real_images(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is needed (extra demo)")
    tiny_gated().save(tmp_path / "run")
    options = ("--images", "digits", "--count", "3", "--rounds", "2", "--out", str(tmp_path / "out.json"))
    done = call(str(tmp_path / "run"), *options)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["inputs"] == "digits"
    assert found["rounds"] == 3  # every image once


def test_a_program_file_is_timed_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x.cofire").write_bytes(b"")
    monkeypatch.setattr(bench_command, "load_program", lambda path: StubEngine(tiny_gated(), (1, 8, 8)))
    done = call(str(tmp_path / "x.cofire"), "--rounds", "2", "--out", str(tmp_path / "out.json"))
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out.json").read_text())["program"] == "x.cofire"


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ((), ConfigError, "bench takes one of"),
        (("--backbone", "vgg16_bn", "--paper-latency"), ConfigError, "bench takes one of"),
        (("--backbone", "resnet20", "--input", "32"), ConfigError, r"--input must be C,H,W.*got '32'"),
        (("--backbone", "resnet20", "--images", "digits"), ConfigError, "--images needs a trained model"),
        (("no/such/folder",), FileError, "holds no model: it has no config.json"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(args: tuple[str, ...], error: type[Exception], text: str) -> None:
    done = call(*args)
    assert isinstance(done.exception, error)
    assert re.search(text, str(done.exception))


@pytest.mark.usefixtures("stubbed")
def test_images_of_another_shape_are_refused(tmp_path: Path) -> None:
    tiny_gated().save(tmp_path / "run")
    done = call(str(tmp_path / "run"), "--images", "synthetic")
    assert isinstance(done.exception, DataError)
    assert "images must have shape (1, 8, 8), that of the model, got (3, 32, 32)" in str(done.exception)


def test_our_own_engine_passes_the_check(tmp_path: Path) -> None:
    plan = random_plan("resnet8_digits", macs=[0.5])
    result = small_bench(plan, compile=compile_engine)
    assert result.left_out == {}
    assert [timed.point for timed in result.timed if timed.engine == NAME] == [None, 0]
    engine = load_program(compile_engine(plan.gated, (1, 8, 8)).save(tmp_path / "x.cofire"))
    found = bench_program("x.cofire", engine, plan.images, "random", rounds=2, warm_up=0)
    assert found.dense_macs == plan.gated.cost({}).dense_total

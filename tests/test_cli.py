"""The command line: help that teaches, JSON for machines, exit codes, errors for people."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from small import ROOT

from cofire import cli, demo

RECIPE = """
[data]
name = "digits"
batch_size = 256
eval_batch_size = 360

[backbone]
name = "resnet8_digits"

[gate]
ratio = 0.8

[train]
epochs = 1
lr = 0.05
"""
COMMANDS = [
    *("estimate", "solve", "train", "eval", "compile", "export", "run", "bench", "shift", "speedup", "analyze"),
    *("report", "reproduce", "zoo", "info", "data", "demo", "compare", "serve", "explore", "doctor", "completion"),
]
GROUPS = ["results"]
# Ctrl-C must reach it also where the tests run in the background of a shell, which lets its children ignore it.
START = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); from cofire.cli import main; main()"


class Done(NamedTuple):
    code: int
    stdout: str
    stderr: str


class Cofire:
    """``cofire(*arguments)`` in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capture, self.monkeypatch = capture, monkeypatch
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("TERM", "dumb")

    def __call__(self, *arguments: object) -> Done:
        self.monkeypatch.setattr(sys, "argv", ["cofire", *map(str, arguments)])
        self.capture.readouterr()
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        output = self.capture.readouterr()
        code = leaving.value.code
        return Done(code if isinstance(code, int) else int(code is not None), output.out, output.err)

    def json(self, *arguments: object) -> Any:
        done = self(*arguments, "--json")
        assert done.code == 0, done.stderr
        return json.loads(done.stdout)

    def fails(self, *arguments: object) -> str:
        """The message of a command that fails as it should."""
        done = self(*arguments)
        assert (done.code, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr
        return done.stderr


@pytest.fixture
def cofire(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cofire:
    return Cofire(capsys, monkeypatch)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def run(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    from cofire.experiments.recipes import read_experiment
    from cofire.experiments.runs import train_experiment

    out = tmp_path_factory.mktemp("runs") / "a"
    train_experiment(read_experiment(recipe), out)
    return out


# Help


def test_help_lists_every_command_and_a_typical_session(cofire: Cofire) -> None:
    done = cofire("--help")
    assert done.code == 0
    for text in (*COMMANDS, *GROUPS, "A typical session", "Exit codes", "--plugin"):
        assert text in done.stdout
    assert [group.name for group in cli.app.registered_groups] == GROUPS
    assert {command.name or command.callback.__name__ for command in cli.app.registered_commands} == set(COMMANDS)


def test_without_arguments_the_help_is_shown(cofire: Cofire) -> None:
    done = cofire()
    assert "A typical session" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "lessons"),
    [
        ("estimate", ["What each ratio r would save", "--ratios", "one pass per ratio", "--json", "--set"]),
        ("solve", ["ratio r for a budget", "--macs", "REMAIN", "0.5 is half"]),
        ("train", ["goes on where it was", "--out", "an interrupted run there goes on", "gate.ratio=0.8"]),
        ("eval", ["Accuracy", "--threshold", "trained: 0"]),
        ("info", ["which are gated and why others are not"]),
        ("data", ["data sets cofire knows"]),
        ("demo", ["offline", "--out"]),
        ("analyze", ["Figures and arrays", "--unit", "May be repeated", "--images"]),
        ("report", ["One HTML file", "--compare", "--out"]),
    ],
)
def test_the_help_of_a_command_teaches(cofire: Cofire, command: str, lessons: list[str]) -> None:
    done = cofire(command, "--help")
    assert (done.code, done.stderr) == (0, "")
    flat = " ".join(done.stdout.replace("│", " ").split())
    assert [lesson for lesson in lessons if lesson not in flat] == []


# Commands


def test_estimate_prints_a_row_per_ratio(cofire: Cofire, recipe: Path) -> None:
    table = cofire.json("estimate", recipe, "--images", 100, "--ratios", "0.9,0.5")
    assert (table["ratios"], table["n"], table["cascade"]) == ([0.5, 0.9], 100, False)
    done = cofire("estimate", recipe, "--images", 100, "--ratios", "0.5,0.9", "--cascade")
    assert "masks applied, one pass per r, n = 100" in " ".join(done.stdout.split())
    assert len(cofire.json("estimate", recipe, "--images", 50)["ratios"]) == 20


def test_solve_gives_a_ratio_that_estimate_confirms(cofire: Cofire, recipe: Path) -> None:
    solution = cofire.json("solve", recipe, "--macs", 0.5, "--images", 100)
    table = cofire.json("estimate", recipe, "--images", 100, "--ratios", solution["ratio"])
    assert table["reduction"]["executed"][0] == pytest.approx(0.5, abs=0.005)
    done = cofire("solve", recipe, "--macs", 0.5, "--images", 100)
    assert f"--set gate.ratio={solution['ratio']:.4f}" in done.stdout


def test_train_writes_a_run_and_a_copy_of_its_result(cofire: Cofire, recipe: Path, tmp_path: Path) -> None:
    arguments = ["train", recipe, "--out", tmp_path / "b", "--set", "train.lr=0.01", "--set", "name=other"]
    result = cofire.json(*arguments, "--result", tmp_path / "results" / "b.json")
    assert result["experiment"]["train"]["lr"] == 0.01
    assert result["experiment"]["name"] == "other"
    assert json.loads((tmp_path / "results" / "b.json").read_text()) == result
    assert json.loads((tmp_path / "b" / "result.json").read_text()) == result
    done = cofire(*arguments)  # finished: comes back at once
    assert done.code == 0
    assert f"look closer: cofire eval {tmp_path / 'b'}" in " ".join(done.stdout.split())


def test_a_run_compiles_to_a_program_that_classifies_pictures_as_the_model_does(
    cofire: Cofire, run: Path, tmp_path: Path
) -> None:
    from PIL import Image

    from cofire import load, load_program
    from cofire.data import source

    _, test = source("digits")
    path = tmp_path / "a.cofire"
    assert cofire.json("compile", run, "-o", path)["input_shape"] == list(test.pixels_NCHW.shape[1:])
    pictures = []
    for number, pixels in enumerate(test.pixels_NCHW[:5]):
        pictures.append(tmp_path / f"{number}.png")
        Image.fromarray(pixels[0].numpy()).save(pictures[-1])
    model = load(run).eval()
    with torch.no_grad():
        wanted = model(test.normalise(test.pixels_NCHW[:5])).softmax(1)
    answers = cofire.json("run", path, *pictures, "--top", 3)
    assert load_program(path).classes == test.classes
    assert f"{test.classes[answers[0]['classes'][0]]} (" in cofire("run", path, pictures[0]).stdout
    for answer, expected in zip(answers, wanted, strict=True):
        assert answer["names"] == [test.classes[c] for c in answer["classes"]]
        assert answer["classes"] == expected.topk(3).indices.tolist()
        assert answer["probabilities"] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)
        assert answer["macs"] > 0
    cofire.json("compile", run, "-o", path, "--observe", 20)
    assert json.loads((tmp_path / "a.cofire.observed.json").read_text())["n"] == 20
    shown = cofire.json("info", path)
    assert shown["ops"][0]["name"] == "normalise"
    assert set(shown["groups"]) == set(model.gates)
    cheap = cofire.json("run", path, pictures[0], "--threshold", 1e9)
    assert cheap[0]["macs"] < answers[0]["macs"]


def test_a_run_compiles_to_int8_with_a_folder_of_pictures(cofire: Cofire, run: Path, tmp_path: Path) -> None:
    from PIL import Image

    from cofire.data import source

    _, test = source("digits")
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number, pixels in enumerate(test.pixels_NCHW[:40]):
        Image.fromarray(pixels[0].numpy()).save(folder / f"{number:02}.png")
    cofire.json("compile", run, "-o", tmp_path / "a.cofire")
    cofire.json("compile", run, "-o", tmp_path / "b.cofire", "--int8", "--images", folder)
    assert {op["kind"] for op in cofire.json("info", tmp_path / "b.cofire")["ops"]} >= {"conv8", "quantize"}
    assert cofire.json("info", tmp_path / "b.cofire")["card"]["classes"] == list(test.classes)
    pictures = sorted(folder.iterdir())[:20]
    wanted, found = (cofire.json("run", tmp_path / name, *pictures, "--top", 1) for name in ("a.cofire", "b.cofire"))
    assert sum(a["classes"] == b["classes"] for a, b in zip(wanted, found, strict=True)) >= 18
    refused = cofire("compile", run, "-o", tmp_path / "c.cofire", "--int8")
    assert refused.code != 0
    assert "--int8 needs --images FOLDER" in " ".join(refused.stderr.split())


def test_eval_reports_a_run_at_any_threshold(cofire: Cofire, run: Path) -> None:
    report = cofire.json("eval", run)
    assert report["n"] == 360
    assert report["top1"] == json.loads((run / "result.json").read_text())["test"]["top1"]
    assert set(cofire.json("eval", run, "--threshold", 1e9)["keep_rate"].values()) == {0.0}
    assert set(cofire.json("eval", run, "--threshold", -1e9)["keep_rate"].values()) == {1.0}
    done = cofire("eval", run)
    assert (done.code, done.stderr) == (0, "")
    assert "layer3.0.conv2" in done.stdout


def test_info_describes_cofire_a_recipe_and_a_run(cofire: Cofire, recipe: Path, run: Path) -> None:
    known = cofire.json("info")
    assert "resnet56" in known["backbones"]
    assert "digits" in known["data"]
    of_recipe, of_run = cofire.json("info", recipe), cofire.json("info", run)
    assert of_recipe["units"] == of_run["units"]
    assert [unit["name"] for unit in of_run["units"]][:2] == ["conv1", "layer1.0.conv1"]
    assert "7 of 7 units gated" in cofire("info", run).stdout
    assert "resnet8_digits" in cofire("info").stdout


def test_info_describes_a_plain_model(cofire: Cofire, tmp_path: Path) -> None:
    (tmp_path / "dense.toml").write_text('[data]\nname = "digits"\n[backbone]\nname = "resnet8_digits"\n')
    macs = cofire.json("info", tmp_path / "dense.toml")["macs"]
    assert macs["conv1"] == 64 * 9 * 16
    assert f"plain model, {sum(macs.values()):,} MACs" in cofire("info", tmp_path / "dense.toml").stdout


def test_data_lists_the_sources_and_reads_one(cofire: Cofire) -> None:
    assert "cifar10" in cofire.json("data")
    assert cofire.json("data", "digits") == [
        {"name": "digits", "n": 1437, "shape": [1, 8, 8]},
        {"name": "digits", "n": 360, "shape": [1, 8, 8]},
    ]
    assert "Images('digits': 1437 x 1x8x8, 10 classes)" in cofire("data", "digits").stdout


def test_names_with_brackets_are_printed_as_they_are(cofire: Cofire, recipe: Path, tmp_path: Path) -> None:
    done = cofire("train", recipe, "--out", tmp_path / "[red]x")
    assert f"{tmp_path / '[red]x'}" in "".join(done.stdout.split())


@pytest.mark.slow
def test_the_demo_trains_solves_and_compares(cofire: Cofire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own recipes with a fifth of the epochs; `make demo` ends with both above 0.9."""
    for name, epochs in (("DENSE", 5), ("GATED", 12), ("SECOND_LOOK", 6)):
        short = tmp_path / f"{name}.toml"
        short.write_text(f'extends = "{getattr(demo, name)}"\n[train]\nepochs = {epochs}\n')
        monkeypatch.setattr(demo, name, short)
    monkeypatch.chdir(tmp_path)
    result = cofire.json("demo", "--out", "models")
    assert result["dense"]["top1"] > 0.9
    assert result["gated"]["top1"] > 0.6
    assert set(result["dense"]["reduction"].values()) == {0.0}
    assert result["independent"] == pytest.approx(0.5, abs=0.01)
    assert result["gated"]["reduction"]["executed+heads"] == pytest.approx(0.5, abs=0.005)
    assert result["second_look"]["top1"] > 0.9
    assert result["second_look"]["reduction"]["executed+heads"] == pytest.approx(0.5, abs=0.05)  # of 360 images
    assert set(result["milliseconds"]) == {f"engine, {it}" for it in ("dense", "gated", "second look")} | {
        "PyTorch, dense"
    }
    assert json.loads(Path("models/result.json").read_text()) == result
    assert cofire.json("info", "models/gated")["gate"]["fields"]["ratio"] == result["ratio"]
    assert cofire.json("info", "models/dense")["backbone"]["name"] == "resnet8_digits"
    for kind in ("dense", "gated", "second_look"):  # all are runs to the other commands
        assert cofire.json("eval", f"models/{kind}")["top1"] == result[kind]["top1"]
    before = {path: path.stat().st_mtime_ns for path in Path("models/gated").rglob("*")}
    assert cofire.json("demo", "--out", "models")["gated"] == result["gated"]  # finished: nothing is trained again
    assert {path: path.stat().st_mtime_ns for path in Path("models/gated").rglob("*")} == before


def test_the_demo_s_table_shows_all_networks() -> None:
    from small import tiny_gated, tiny_images, tiny_plain

    from cofire import SecondLook, evaluate, gate
    from cofire.text import rendered

    loader = tiny_images(20).loader(20)
    twice = gate(tiny_plain(), SecondLook(), input_shape=loader.images.shape)
    text = rendered(demo._comparison(*(evaluate(one, loader).to_json() for one in (tiny_plain(), tiny_gated(), twice))))
    for part in (
        "dense",
        "gated",
        "second look",
        "top-1",
        "MACs saved: executed+heads",
        "filters run",
        "layer3.0.conv2",
        "█",
    ):
        assert part in text


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "RECIPE", "--out", "OUT", "--set", "train.epoch=2"], "did you mean 'epochs'?"),
        (["train", "RECIPE", "--out", "OUT", "--set", "gate.ratio=1.5"], "FTWT.ratio must be in (0, 1], got 1.5"),
        (["train", "RECIPE", "--out", "OUT", "--set", "gate.ratio=0"], "FTWT.ratio must be in (0, 1], got 0"),
        (["train", "RECIPE", "--out", "OUT", "--set", "epochs"], "--set takes section.key=value, got 'epochs'"),
        (["train", "gone.toml", "--out", "OUT"], "recipe gone.toml does not exist"),
        (["train", "RECIPE", "--out", "OUT", "--set", "backbone.name=resnet20"], "(1, 8, 8)"),
        (["train", "RECIPE", "--out", "OUT", "--set", "backbone.name=resnet"], "unknown backbone 'resnet'"),
        (["train", "RECIPE", "--out", "RECIPE/run"], "cannot be written"),
        (["train", "RECIPE", "--out", "RUN", "--set", "train.lr=1"], "holds another run (it differs in train.lr)"),
        (["train", "RECIPE"], "Missing option '--out'"),
        (["estimate", "RECIPE", "--ratios", "0.5,1.5"], "FTWT.ratio must be in (0, 1], got 1.5"),
        (["estimate", "RECIPE", "--ratios", "half"], "--ratios takes numbers separated by commas, got 'half'"),
        (["estimate", "RECIPE", "--images", "0"], "Invalid value for '--images'"),
        (["solve", "RECIPE", "--macs", "50"], "must be in (0, 1), got 50.0"),
        (["solve", "RECIPE", "--macs", "0.0001"], "cannot be reached"),
        (["solve", "RECIPE"], "one of --macs and --latency-ms, got neither"),
        (["solve", "RECIPE", "--macs", "0.5", "--latency-ms", "1"], "one of --macs and --latency-ms, got both"),
        (["eval", "gone"], "does not exist"),
        (["eval", "RUN", "--threshold", "high"], "Invalid value for '--threshold'"),
        (["info", "gone.toml"], "recipe gone.toml does not exist"),
        (["data", "digit"], "did you mean 'digits'?"),
        (["trian", "RECIPE"], "No such command 'trian'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_gets_one_message_and_exit_code_2(
    cofire: Cofire, recipe: Path, run: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    places = {"RECIPE": str(recipe), "RUN": str(run), "OUT": str(tmp_path / "out"), "RECIPE/run": f"{recipe}/run"}
    text = cofire.fails(*(places.get(argument, argument) for argument in arguments))
    flat = " ".join(text.replace("│", " ").split())
    assert message in flat
    assert flat.count(message) == 1
    assert not (tmp_path / "out").exists()


def test_a_damaged_run_gets_one_message(cofire: Cofire, run: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "experiment.json"):
        (broken / name).write_bytes((run / name).read_bytes())
    (broken / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes()[:-1])
    for command in ("eval", "info"):
        assert "model.safetensors is truncated or not a safetensors file" in cofire.fails(command, broken)


def test_a_dense_recipe_cannot_be_estimated(cofire: Cofire, recipe: Path, tmp_path: Path) -> None:
    dense = tmp_path / "dense.toml"
    dense.write_text('[data]\nname = "digits"\n[backbone]\nname = "resnet8_digits"\n')
    assert "needs a [gate] section in the recipe" in cofire.fails("estimate", dense)
    assert "needs a [gate] section in the recipe" in cofire.fails("solve", dense, "--macs", 0.5)


# As a process


def test_a_mistake_reaches_the_shell_as_exit_code_and_standard_error(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START, "eval", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"cofire: {tmp_path / 'experiment.json'} does not exist\n"


def test_an_interrupted_training_says_how_to_go_on(recipe: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", START, "train", str(recipe), "--out", str(tmp_path), "--set", "train.epochs=1000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    while process.poll() is None and not (tmp_path / "log.jsonl").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "interrupted; call the same command again to go on" in errors
    assert "Traceback" not in errors

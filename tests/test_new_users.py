"""What people who tried cofire for the first time stumbled over, each once."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import patterns
import pytest
import torch
import torch.nn.functional as F
import zoo
from nets import SHAPE, Net, conv, fc, gated_net, images, option_a_net, run
from small import ROOT, digest, tiny_gated, tiny_plain
from torch import nn
from typer.testing import CliRunner

import cofire
from cofire import FTWT, L1, ConfigError, FileError, TraceError, create_backbone, gate, load, mask_loss, prune, save
from cofire.cli import app, main
from cofire.files.card import Card
from cofire.runtime.classify import pixels_of

NEEDS_ZOO = pytest.mark.skipif(bool(zoo.why_not), reason=zoo.why_not)


# Weights of a network with other classes


def test_weights_with_other_classes_are_taken_with_a_new_head_or_the_way_is_named(tmp_path: Path) -> None:
    trained = create_backbone("resnet8_digits", num_classes=10)
    folder = save(trained, tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    assert folder
    with pytest.raises(FileError, match=r"other classes: new_head=True keeps a fresh last layer"):
        create_backbone("resnet8_digits", num_classes=3, weights=path)
    found = create_backbone("resnet8_digits", num_classes=3, weights=path, new_head=True)
    head = [key for key, tensor in found.state_dict().items() if tensor.shape[:1] == (3,)]
    assert len(head) == 2
    for key, tensor in trained.state_dict().items():
        assert key in head or torch.equal(found.state_dict()[key], tensor)


def test_a_network_gets_as_many_classes_as_its_weights_have(tmp_path: Path) -> None:
    trained = create_backbone("resnet8_digits", num_classes=3)
    torch.save(trained.state_dict(), tmp_path / "mine.pth")
    found = create_backbone("resnet8_digits", weights=tmp_path / "mine.pth")
    assert found.spec.args["num_classes"] == 3
    assert digest(found) == digest(trained)


def test_a_new_head_does_not_hide_weights_of_another_network(tmp_path: Path) -> None:
    save(create_backbone("resnet8_digits"), tmp_path)
    with pytest.raises(FileError, match="does not fit resnet20;"):
        create_backbone("resnet20", num_classes=3, weights=tmp_path / "model.safetensors", new_head=True)


# Models of other precision, with attributes of their own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_of_half_precision_can_be_gated_and_trained(dtype: torch.dtype) -> None:
    net, x = option_a_net().to(dtype).eval(), images().to(dtype)
    gated = gated_net(net)
    assert all(parameter.dtype == dtype for parameter in gated.parameters())
    assert torch.equal(run(gated, x, "open"), net(x))
    gated.train()
    (gated(x).float().sum() + mask_loss(gated)).backward()
    assert all(parameter.grad is not None for parameter in gated.gates.parameters())


def test_the_backbones_attributes_are_the_gated_models_but_not_its_methods() -> None:
    net = option_a_net()
    net.output_stride = 16
    gated = gated_net(net)
    assert gated.output_stride == 16
    with pytest.raises(AttributeError, match="logits"):
        gated.logits(images())  # would run the backbone without its gates
    with pytest.raises(AttributeError, match="nothing_like_it"):
        gated.nothing_like_it  # noqa: B018


# Saving, pruning


@NEEDS_ZOO
def test_a_model_that_keeps_a_version_beside_its_tensors_is_saved_and_loaded(tmp_path: Path) -> None:
    model = zoo.build("torchvision/mnasnet0_5")
    save(model, tmp_path)
    torch.manual_seed(1)
    found = load(tmp_path, model=zoo.build("torchvision/mnasnet0_5"))
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(found(x), model(x))


def test_prune_leaves_what_a_function_computes_whole_and_says_so() -> None:
    class Blur(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kernel", torch.ones(8, 1, 3, 3) / 9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.conv2d(x, self.kernel, stride=2, padding=1, groups=8)

    net = Net(
        lambda m, x: m.logits(F.relu(m.two(m.blur(F.relu(m.one(x)))))),
        one=conv(3, 8),
        blur=Blur(),
        two=conv(8, 8),
        fc=fc(8),
    )
    with pytest.raises(ConfigError, match=r"one: conv2d \(.*\) is a function, not a module"):
        prune(net, L1(macs=0.6), input_shape=SHAPE)


def test_prune_refuses_heads_that_run_in_training_mode_only() -> None:
    with pytest.raises(TraceError, match=r"aux, side\.0 run in training mode only .*take them out first"):
        prune(patterns.build("auxiliary"), L1(macs=0.6), input_shape=(3, 16, 16))


@NEEDS_ZOO
def test_blocks_with_parallel_convs_are_told_to_be_fused_first(caplog: pytest.LogCaptureFixture) -> None:
    from timm.utils.model import reparameterize_model

    model = zoo.build("timm/repvgg_a0")
    with caplog.at_level(logging.WARNING, "cofire"):
        gate(model, FTWT(), input_shape=(3, 64, 64))
    assert "22 blocks (stem, ...) run parallel convs" in caplog.text
    assert "reparameterize" in caplog.text
    caplog.clear()
    gate(reparameterize_model(model), FTWT(), input_shape=(3, 64, 64))
    assert not caplog.text


# The command line and what is around it


def test_export_is_there_without_an_import_of_its_own() -> None:
    code = "import cofire; print(cofire.export.to_onnx.__name__)"  # in a process that imported nothing else
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "to_onnx\n"
    with pytest.raises(AttributeError, match="no attribute 'exprot'"):
        cofire.exprot  # noqa: B018


def test_cofire_export_writes_the_runs_model_and_says_how_to_feed_it(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    gated = tiny_gated()
    shape = gated.graph.input_shape
    card = Card(input_shape=shape, mean=(0.5,) * shape[0], std=(0.25,) * shape[0])
    save(gated, tmp_path / "run", card)
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "-o", str(tmp_path / "m.onnx"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["mean"] == [0.5] * shape[0]
    assert onnx.load(tmp_path / "m.onnx").graph.input[0].name == "images"
    x = torch.rand(3, *shape)
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "m.onnx")
    with torch.no_grad():
        wanted, dense = gated.eval()(x), gated.backbone(x)
    assert not torch.allclose(wanted, dense, rtol=1e-3), "all filters are on: nothing is seen"
    torch.testing.assert_close(torch.from_numpy(session.run(None, {"images": x.numpy()})[0]), wanted)


def test_bench_takes_a_dense_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cofire.bench import command

    plain = tiny_plain()
    shape = (1, 12, 12)  # not what the backbone was made for
    save(plain, tmp_path / "dense", Card(input_shape=shape, mean=(0.5,), std=(0.25,)))
    plan = command._plan(tmp_path / "dense", "", None, [0.6], [], 0, "", 4)
    assert plan.network == "dense"
    assert plan.gated.graph.input_shape == shape
    for key, tensor in plain.state_dict().items():
        assert torch.equal(plan.gated.state_dict()[key], tensor)
    assert plan.asked == (0.6,)
    monkeypatch.setattr(command, "PEERS", command.PEERS[:1])
    options = ["--macs", "0.6", "--rounds", "2", "--warm-up", "0", "--no-int8", "--json"]
    result = CliRunner().invoke(app, ["bench", str(tmp_path / "dense"), *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["network"] == "dense"
    assert found["executed_macs_reduction"] == pytest.approx(0.4, abs=0.01)


@pytest.mark.parametrize("size", [(14, 14), (40, 28), (15, 60)])
def test_cofire_run_shows_a_network_what_eval_shows_it(size: tuple[int, int], tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    picture = image.effect_noise(size, 60).convert("RGB")
    picture.save(tmp_path / "a.png")
    by_eval = cofire.data.folder(tmp_path, size=14, labelled=False).pixels_NCHW
    assert torch.equal(by_eval.float() / 255, pixels_of([tmp_path / "a.png"], (3, 14, 14)))


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_a_build_without_python_installs_library_and_header(tmp_path: Path) -> None:
    command = ["cmake", "-S", ROOT, "-B", tmp_path, "-DCOFIRE_PYTHON=OFF", f"-DCMAKE_INSTALL_PREFIX={tmp_path}/there"]
    subprocess.run(command, check=True, capture_output=True)
    script = (tmp_path / "cmake_install.cmake").read_text()
    assert "csrc/cofire.h" in script
    assert "libcofire" in script


def test_the_c_example_says_that_a_compiled_program_normalises_by_itself() -> None:
    for file in ("README.md", "run_program.c"):
        text = " ".join((ROOT / "examples" / file).read_text().replace(" * ", " ").split())
        assert "pixels in [0, 1]" in text
        assert "normalises by itself" in text
        assert "normalised as in training" not in text


# What is named on the command line is not what it should be


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `cofire` says of something that a user can fix."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["cofire", *words])
        with pytest.raises(SystemExit) as left:
            main()
    assert left.value.code == 2
    return capsys.readouterr().err


def test_a_folder_in_place_of_a_program_or_a_picture_is_told_with_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder, program = str(tmp_path / "run"), str(tmp_path / "small.cofire")
    save(tiny_plain(), run_folder)
    cofire.compile(tiny_plain()).save(program)
    assert f"of a run: cofire compile {run_folder} -o NAME.cofire" in said(capsys, "serve", run_folder)
    assert f"name its pictures, e.g. {tmp_path}/*.jpg" in said(capsys, "run", program, str(tmp_path))
    (tmp_path / "text.jpg").write_text("no picture")
    found = said(capsys, "run", program, str(tmp_path / "text.jpg"))
    assert "must be a JPEG, PNG or the like" in found
    assert "recipe" not in found


def test_what_holds_no_model_is_told_with_what_makes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "compile", "timm:resnet18", "-o", str(tmp_path / "x.cofire"))
    assert "timm:resnet18 holds no model: it has no config.json" in found
    assert "`cofire speedup`" in found


def test_a_file_that_is_no_weights_does_not_pass_on_advice_to_run_it(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    path.write_text("no weights")
    with pytest.raises(FileError, match=r"torch\.save\(model\.state_dict\(\), FILE\)") as told:
        create_backbone("resnet8_digits", weights=path)
    assert "weights_only" not in str(told.value)


def test_tables_in_a_log_are_wide_enough_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    save(gate(create_backbone("mobilenet_v2", width=0.25), FTWT()), tmp_path)
    found = CliRunner().invoke(app, ["info", str(tmp_path)]).stdout
    assert "features.17" in found
    assert "…" not in found

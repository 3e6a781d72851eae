"""ONNX files and programs of torch.export: compiled, they say what the network they came from says."""

from __future__ import annotations

import copy
import json
import struct
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import patterns
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from laws.test_compiles import Detector, randomised
from nets import gated_net, images, randomise
from small import tiny_plain
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from typer.testing import CliRunner

import cofire
from cofire.cli import app
from cofire.errors import CofireError, CompileError, ConfigError, FileError
from cofire.export import to_onnx
from cofire.files.card import Card
from cofire.importing import imported
from cofire.runtime.limits import Limits
from cofire.speedup.models import named_model

onnx: Any = pytest.importorskip("onnx", reason="onnx is needed (extra export)")
SHAPE = (3, 16, 16)
NEAR = 1e-4  # of the outputs' spread
QUICK = Limits(tuning_seconds=0.0)


class Mixed(nn.Module):
    """One small network with a call of each kind that exporters write in a way of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.prelu = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.PReLU(8)
        self.up, self.groups = nn.ConvTranspose2d(8, 6, 3, 2, 1, output_padding=1), nn.GroupNorm(3, 6)
        self.same = nn.Conv2d(6, 6, 2, padding="same", padding_mode="reflect")
        self.layer, self.fc = nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.gelu(self.norm(self.first(x)))
        y = y + F.gelu(self.prelu(self.depthwise(y)), approximate="tanh")
        one, two = y.chunk(2, 1)
        y = torch.cat([F.hardsigmoid(one), F.leaky_relu(two, 0.1)], 1).view(x.shape[0], 2, 4, 8, 8)
        y = F.avg_pool2d(F.pad(y.transpose(1, 2).flatten(1, 2), (0, 1, 0, 1)), 2, 1)
        y = self.same(F.silu(self.groups(self.up(y))))
        maps = F.interpolate(F.max_pool2d(y, 3, 2, 1, ceil_mode=True), scale_factor=1.5, mode="bilinear")
        y = self.layer(F.hardtanh(y).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).mean((2, 3))
        return self.fc(F.normalize(y)).log_softmax(1), F.mish(maps[:, ::2, 1:]) - 0.5


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixed": Mixed,
    "resnet8_digits": lambda: cofire.create_backbone("resnet8_digits"),
    **{
        name: patterns.PATTERNS[name]
        for name in ("unet", "transposed_unet", "two_headed", "super_resolution", "cbam", "eca", "coordinate_attention")
    },
    **{name: patterns.PATTERNS[name] for name in ("gelu_blocks", "group_norm", "squeeze_excite", "csp", "pyramid")},
}


def built(name: str) -> tuple[nn.Module, tuple[int, int, int]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    if name == "mixed":
        randomise(model)
    return model.eval(), getattr(model, "input_shape", SHAPE) if name == "resnet8_digits" else SHAPE


def write(model: nn.Module, shape: tuple[int, int, int], path: Path, **options: Any) -> Path:
    """By the exporter of torch that needs no package but onnx."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is said to be old
        torch.onnx.export(model, (torch.zeros(1, *shape),), str(path), dynamo=False, **options)
    return path


def check(engine: cofire.Engine, model: nn.Module, shape: tuple[int, int, int]) -> None:
    x = images(3, shape)
    with torch.no_grad():
        wanted, _ = tree_flatten(model(x))
    found, _ = tree_flatten(engine(x))
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= NEAR * float(other.max() - other.min())


@pytest.mark.parametrize("name", MODELS)
def test_an_onnx_file_computes_what_its_network_does(name: str, tmp_path: Path) -> None:
    model, shape = built(name)
    path = write(model, shape, tmp_path / "model.onnx", input_names=["x"], dynamic_axes={"x": {0: "batch"}})
    check(cofire.compile(path, limits=QUICK), model, shape)


@pytest.mark.parametrize("name", ["mixed", "cbam", "pyramid", "super_resolution", "gelu_blocks", "transposed_unet"])
def test_a_program_of_torch_export_computes_what_its_network_does(name: str) -> None:
    model, shape = built(name)
    program = torch.export.export(model, (torch.zeros(2, *shape),))
    engine = cofire.compile(program, limits=QUICK)
    check(engine, model, shape)
    x = images(2, shape)
    assert tree_flatten(engine(x))[1] == tree_flatten(model(x))[1]  # a dict stays a dict


@pytest.mark.parametrize("turned", [False, True])
def test_silu_that_a_file_spells_out_is_one_op_with_its_conv(turned: bool, tmp_path: Path) -> None:
    class Spelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return torch.sigmoid(y) * y if turned else F.silu(y)

    path = write(Spelled().eval(), SHAPE, tmp_path / "silu.onnx")
    assert {node.op_type for node in onnx.load(path).graph.node} == {"Conv", "Sigmoid", "Mul"}
    engine = cofire.compile(path, SHAPE, limits=QUICK)
    assert len(engine.profile(images(1, SHAPE)).names) == 1


def test_a_detector_through_a_file_is_off_by_rounding_alone(tmp_path: Path) -> None:
    """Its weights let numbers grow, so that float32 itself is off by 1e-4 for some images: float64 says by how much."""
    model, x = randomised(Detector()), images(60, (3, 32, 32))
    path = write(model, (3, 32, 32), tmp_path / "model.onnx", input_names=["x"], dynamic_axes={"x": {0: "batch"}})
    with torch.no_grad():
        exact, single = copy.deepcopy(model).double()(x.double()), model(x)

    def off(outputs: Any) -> float:
        pairs = zip(outputs, exact, strict=True)
        return float(torch.stack([(one - other).abs().flatten(1).amax(1) for one, other in pairs]).amax(0).median())

    as_module = off(cofire.compile(model, (3, 32, 32), limits=QUICK)(x))
    as_file = off(cofire.compile(path, limits=QUICK)(x))
    assert 1e-6 < off(single) < 1e-3
    assert as_module < 5 * off(single)  # Winograd rounds more than sums in order do
    assert as_file < 2 * as_module


def test_a_product_with_the_sigmoid_of_something_else_stays_one(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 5, 3), nn.Conv2d(3, 5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) * torch.sigmoid(self.two(x))

    model = Scaled().eval()
    check(cofire.compile(write(model, SHAPE, tmp_path / "scaled.onnx"), SHAPE, limits=QUICK), model, SHAPE)


@pytest.mark.parametrize("opset", [11, 13])
def test_older_files_and_those_of_one_image_take_any_batch(opset: int, tmp_path: Path) -> None:
    for name in ("squeeze_excite", "csp"):
        model, shape = built(name)
        path = write(model, shape, tmp_path / "model.onnx", opset_version=opset)
        check(cofire.compile(path, limits=QUICK), model, shape)


def test_layers_keep_their_names_so_that_costs_can_be_compared(tmp_path: Path) -> None:
    model, shape = built("resnet8_digits")
    program = torch.export.export(model, (torch.zeros(2, *shape),))
    keep = {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
    path = write(model, shape, tmp_path / "model.onnx", **keep)
    wanted = cofire.cost(cofire.trace(model, shape), {}).dense
    for source in (program, path):
        assert cofire.cost(cofire.trace(imported(source).model, shape), {}).dense == wanted


# Nodes that no exporter of ours writes: against ONNX Runtime, which others wrote


def file_of(path: Path, nodes: list[Any], constants: dict[str, Any], shape: Any = SHAPE, **model: Any) -> Path:
    """A file with these nodes, from ``x`` to ``y``."""
    helper, tensor = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", tensor.FLOAT, ["batch", *shape])],
        [helper.make_tensor_value_info("y", tensor.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9, **model)
    path.write_bytes(made.SerializeToString())
    return path


def node(kind: str, *inputs: str, to: str = "y", **attrs: Any) -> Any:
    return onnx.helper.make_node(kind, ["x", *inputs], [to], name=f"the_{kind}", **attrs)


WEIGHT = {"w": np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)}
SCALES = {"s": np.array([1, 1, 1.5, 2], np.float32), "r": np.array([], np.float32)}
RESIZE = {"coordinate_transformation_mode": "half_pixel", "mode": "cubic"}
NODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "conv, same upper": (lambda: node("Conv", "w", strides=[2, 2], auto_pad="SAME_UPPER"), WEIGHT),
    "conv, same lower": (lambda: node("Conv", "w", strides=[2, 2], auto_pad="SAME_LOWER"), WEIGHT),
    "conv, sides": (lambda: node("Conv", "w", pads=[0, 1, 2, 3], dilations=[2, 1]), WEIGHT),
    "max pool, sides": (lambda: node("MaxPool", kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1]), {}),
    "average, padding": (lambda: node("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1]), {}),
    "depth to space": (lambda: node("SpaceToDepth", blocksize=2), {}),
    "cubic": (lambda: node("Resize", "r", "s", **RESIZE), SCALES),
    "nearest": (lambda: node("Resize", "r", "s", mode="nearest"), SCALES),
    "hard sigmoid": (lambda: node("HardSigmoid"), {}),
    "reflect": (lambda: node("Pad", "p", mode="reflect"), {"p": np.array([0, 0, 1, 2, 0, 0, 3, 1])}),
    "gather": (lambda: node("Gather", "i", axis=1), {"i": np.array([2, 0])}),
    "turned": (lambda: node("Slice", "a", "b", "d", "a"), {"a": [-1], "b": [-1000], "d": [3]}),
    "product": (lambda: node("MatMul", "m"), {"m": np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)}),
    "group norm": (
        lambda: node("GroupNormalization", "g", "h", num_groups=3),
        {"g": np.array([1, 2, 3], np.float32), "h": np.array([0, 1, 0], np.float32)},
    ),
}


@pytest.mark.parametrize("name", NODES)
def test_a_node_means_what_it_means_to_onnx_runtime(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is needed (extra dev)")
    make, constants = NODES[name]
    path = file_of(tmp_path / "node.onnx", [make()], constants)
    x = images(2, SHAPE)
    (wanted,) = runtime.InferenceSession(path).run(None, {"x": x.numpy()})
    with torch.no_grad():
        ours = imported(path).model(x)
    np.testing.assert_allclose(ours.numpy(), wanted, rtol=1e-4, atol=1e-5)
    if name != "turned":  # which is an output that is only moved
        np.testing.assert_allclose(cofire.compile(path, limits=QUICK)(x.numpy()), wanted, rtol=1e-4, atol=1e-4)


# Gated


@pytest.mark.parametrize("options", [{}, {"pool": "avg", "softmax": False}])
def test_a_gated_file_of_cofire_compiles_with_its_gates(options: Any, tmp_path: Path) -> None:
    plain = cofire.create_backbone("resnet8_digits")
    randomise(plain)
    gated = gated_net(plain, plain.input_shape, **options)
    gated.threshold = 0.05
    engine = cofire.compile(to_onnx(gated, tmp_path / "gated.onnx"), limits=QUICK)
    own = cofire.compile(gated, limits=QUICK)
    x = images(4, plain.input_shape).numpy()
    np.testing.assert_array_equal(engine(x), own(x))
    assert engine.groups == own.groups
    assert any(not mask.all() for mask in engine.last_masks.values())
    for group, mask in own.last_masks.items():
        np.testing.assert_array_equal(engine.last_masks[group], mask)
    assert {name: macs.tolist() for name, macs in engine.last_macs.items()} == {
        name: macs.tolist() for name, macs in own.last_macs.items()
    }


def test_gates_of_another_network_are_refused_with_the_way_out(tmp_path: Path) -> None:
    gated = gated_net(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU()), SHAPE)
    path = to_onnx(gated, tmp_path / "gated.onnx")
    with pytest.raises(CompileError, match=r"not one of cofire's backbones.*cofire\.compile\(gated\)"):
        cofire.compile(path)


def test_damaged_metadata_is_told(tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.onnx", [node("Relu")], {})
    for text in ("{", "[]", '{"backbone": 3}', json.dumps({"backbone": {"name": "resnet20", "args": {}}, "gate": 1})):
        model = onnx.load(path)
        onnx.helper.set_model_props(model, {"cofire.model": text})
        path.write_bytes(model.SerializeToString())
        with pytest.raises(CofireError):
            cofire.compile(path)


# Refusals


def test_an_unknown_node_is_named_with_what_can_be_done(tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.onnx", [node("Det")], {})
    with pytest.raises(CompileError, match=r"the node 'the_Det' \(Det\) cannot be compiled.*Ways out.*Known: Abs, Add"):
        cofire.compile(path)
    path = file_of(tmp_path / "x.onnx", [node("Pow", "two")], {"two": np.float32(2)})
    with pytest.raises(CompileError, match=r"'the_Pow' \(pow\) cannot be compiled"):
        cofire.compile(path)


@pytest.mark.parametrize("place", ["../weights", "/etc/passwd", "", "folder/weights", ".hidden", "link", "short"])
def test_weights_are_read_from_beside_the_file_only(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    for file in (tmp_path / "weights", folder / "folder" / "weights", folder / ".hidden"):
        file.write_bytes(WEIGHT["w"].tobytes())
    (folder / "short").write_bytes(b"1234")
    (folder / "link").symlink_to(tmp_path / "weights")
    path = outside(folder / "x.onnx", place)
    with pytest.raises(FileError, match=r"must lie in the file or in one beside it|is shorter than"):
        cofire.compile(path)


def outside(path: Path, place: str) -> Path:
    """A file with a conv whose weight lies elsewhere."""
    model = onnx.load(file_of(path, [node("Conv", "w")], WEIGHT))
    (weight,) = model.graph.initializer
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key, entry.value = "location", place
    path.write_bytes(model.SerializeToString())
    return path


def test_weights_beside_the_file_are_read(tmp_path: Path) -> None:
    inside = cofire.compile(file_of(tmp_path / "y.onnx", [node("Conv", "w")], WEIGHT), limits=QUICK)
    (tmp_path / "x.onnx.data").write_bytes(WEIGHT["w"].tobytes())
    apart = cofire.compile(outside(tmp_path / "x.onnx", "x.onnx.data"), limits=QUICK)
    x = images(1, SHAPE).numpy()
    np.testing.assert_array_equal(inside(x), apart(x))


BOMBS: dict[str, Any] = {
    "a constant": lambda: [
        onnx.helper.make_node("ConstantOfShape", ["n"], ["c"]),
        onnx.helper.make_node("Add", ["x", "c"], ["y"]),
    ],
    "a broadcast": lambda: [node("Expand", "n")],
    "copies": lambda: [node("Tile", "n")],
    "a padding": lambda: [node("Pad", "p")],
    "an enlargement": lambda: [node("Resize", "", "", "n")],
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_cannot_ask_for_any_size(name: str, tmp_path: Path) -> None:
    constants = {"n": np.array([1, 1, 1 << 20, 1 << 20]), "p": np.array([0, 0, 0, 0, 0, 0, 1 << 20, 1 << 20])}
    with pytest.raises(CompileError):
        cofire.compile(file_of(tmp_path / "x.onnx", BOMBS[name](), constants))


def test_files_that_leave_sizes_open_need_them(tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.onnx", [node("Conv", "w")], WEIGHT, (3, "height", "width"))
    with pytest.raises(ConfigError, match=r"leaves sizes of 'x' open, \(3, None, None\): give input_shape"):
        cofire.compile(path)
    assert cofire.compile(path, (3, 9, 7), limits=QUICK).output_shape == (4, 7, 5)
    with pytest.raises(ConfigError, match=r"input_shape must be \(3, None, None\)"):
        cofire.compile(path, (1, 9, 7))


def test_other_files_are_refused_and_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can run code from it: torch\.export\.load it yourself"):
        cofire.compile(tmp_path / "model.pt2")
    with pytest.raises(ConfigError, match=r"must be that of an \.onnx file"):
        cofire.compile(str(tmp_path / "model.bin"))
    with pytest.raises(FileError, match="cannot be read"):
        cofire.compile(tmp_path / "missing.onnx")
    with pytest.raises(ConfigError, match="a model, the path"):
        cofire.compile(3)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_a_file_holds_the_error_is_one_of_cofires(data: st.DataObject, tmp_path: Path) -> None:
    path = file_of(tmp_path / "x.onnx", [node("Conv", "w", pads=[1, 1, 1, 1], to="z"), relu("z")], WEIGHT)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["byte", "cut", "number"]))
        if kind == "byte":
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del content[at : at + data.draw(st.integers(1, 40))]
        else:
            content[at : at + 8] = struct.pack("<q", data.draw(st.integers(-(2**63), 2**63 - 1)))
        if not content:
            break
    path.write_bytes(bytes(content))
    with suppress(CofireError):
        cofire.compile(path, limits=QUICK)


def relu(source: str) -> Any:
    return onnx.helper.make_node("Relu", [source], ["y"], name="the_relu")


class Written(nn.Module):
    """Writes on a part of what it reads again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y[:, :2].relu_()
        return y + 1


def test_calls_in_place_through_a_view_are_refused_not_compiled_wrongly() -> None:
    program = torch.export.export(Written().eval(), (torch.zeros(2, *SHAPE),))
    with pytest.raises(CompileError, match="in place"):
        cofire.compile(program, limits=QUICK)


# The command line


def test_the_command_compiles_a_file_and_keeps_its_card(tmp_path: Path) -> None:
    plain = cofire.create_backbone("resnet8_digits").eval()
    card = Card(input_shape=plain.input_shape, mean=(0.25,), std=(0.5,))
    path = to_onnx(plain, tmp_path / "model.onnx", card=card)
    program = tmp_path / "model.cofire"
    told = CliRunner().invoke(app, ["compile", str(path), "--out", str(program), "--json"])
    assert told.exit_code == 0, told.output
    described = json.loads(told.output)
    assert (described["mean"], described["std"], described["gated"]) == ([0.25], [0.5], False)
    pixels = images(2, plain.input_shape).clamp(0, 1)
    with torch.no_grad():
        wanted = plain((pixels - 0.25) / 0.5)
    torch.testing.assert_close(cofire.load_program(program)(pixels), wanted, rtol=1e-4, atol=1e-4)
    told = CliRunner().invoke(app, ["compile", str(path), "--out", str(program), "--observe", "3"])
    assert isinstance(told.exception, ConfigError)
    assert "--observe needs a run" in str(told.exception)


def test_speedup_takes_a_dense_file_and_refuses_a_gated_one(tmp_path: Path) -> None:
    path = to_onnx(cofire.create_backbone("resnet8_digits").eval(), tmp_path / "model.onnx")
    named = named_model(str(path), mean=(0.25,))
    assert (named.card.input_shape, named.card.mean) == ((1, 8, 8), (0.25,))
    gated = cofire.fit_heads(named.model, [images(40, (1, 8, 8))], macs=0.7)
    assert cofire.compile(gated, limits=QUICK).groups
    to_onnx(gated_net(cofire.create_backbone("resnet8_digits"), (1, 8, 8)), path)
    with pytest.raises(ConfigError, match="has gates already; speedup takes the dense network"):
        named_model(str(path))
    with pytest.raises(ConfigError, match="has weights of its own"):
        named_model(str(path), weights="x.pth")


def test_a_plain_model_has_no_gates_in_its_file(tmp_path: Path) -> None:
    assert not cofire.compile(to_onnx(tiny_plain(), tmp_path / "x.onnx"), limits=QUICK).groups

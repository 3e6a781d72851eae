"""The engines we are compared with: each takes the same weights, images and a number of threads.

An engine is a `Peer`: a name, the packages it needs, and a function that builds a call ``x -> logits``. Nothing is
imported before it is built.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from cofire.bench.portable import portable_onnx
from cofire.errors import CofireError
from cofire.export import INPUT, folded
from cofire.runtime import native_features
from cofire.runtime.engine import Precision

Array = NDArray[np.float32]
Infer = Callable[[Array], Array]
"""One image (1, C, H, W) -> its logits (1, K)."""


class PeerError(CofireError, RuntimeError):
    """A peer cannot run this model, or gives other logits; the bench goes on without it."""


@dataclass(frozen=True)
class Peer:
    """A dense engine; ``build(model, x, threads)`` gets a plain model in eval mode, and images (N, C, H, W).

    In float32 they say of which shape an image is; in int8 ranges are fitted to them.
    """

    name: str
    packages: tuple[str, ...]
    """Distributions it needs; the first one's version is its own."""
    build: Callable[[nn.Module, Array, int], Infer]
    precision: Precision = "float32"

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [package for package in self.packages if _version(package) is None]

    @property
    def version(self) -> str | None:
        """None if it is not installed."""
        return _version(self.packages[0])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _folded_for(model: nn.Module, x: Array) -> nn.Module:
    _, channels, height, width = x.shape
    return folded(model, (channels, height, width))


def eager(model: nn.Module, x: Array, threads: int) -> Infer:
    """PyTorch as it is, batch norm folded. Its threads are the process's own: see ``torch_threads``."""
    return _from_torch(_folded_for(model, x))


def inductor(model: nn.Module, x: Array, threads: int) -> Infer:
    """PyTorch compiled, with weights frozen into the code; needs a C++ compiler and minutes."""
    import torch._inductor.config as config

    infer = _from_torch(torch.compile(_folded_for(model, x)))
    with config.patch(freezing=True):  # counts when the first call compiles
        infer(x[:1])
    return infer


def _from_torch(model: Callable[[torch.Tensor], torch.Tensor]) -> Infer:
    def infer(x: Array) -> Array:
        with torch.no_grad():
            return model(torch.from_numpy(x)).numpy()

    return infer


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Inside the block PyTorch uses this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def onnx_runtime(model: nn.Module, x: Array, threads: int) -> Infer:
    """ONNX Runtime, CPU provider."""
    return _onnx_session(portable_onnx(model, x[:1]), threads)


def onnx_runtime_int8(model: nn.Module, x: Array, threads: int) -> Infer:
    """ONNX Runtime after its own static quantisation: u8 activations, s8 weights with a scale for each filter, QDQ."""
    quantization = importlib.import_module("onnxruntime.quantization")
    feeds = iter([{INPUT: image[None]} for image in x])

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def get_next(self) -> dict[str, Array] | None:
            return next(feeds, None)

    with _hushed(), tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
        before.write_bytes(portable_onnx(model, x[:1]))
        quantization.quantize_static(
            before,
            after,
            Reader(),
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            reduce_range=_sums_saturate(),
        )
        return _onnx_session(after.read_bytes(), threads)


def _sums_saturate() -> bool:
    """Whether pairs of products of bytes are added up in 16 bits here, which takes weights of 7 bits to be right."""
    features = native_features() or ()
    return "avx2" in features and not any("vnni" in feature for feature in features)


def _onnx_session(model: bytes, threads: int) -> Infer:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Between our calls others run: its threads may spin for work during a call, but not after it.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def infer(x: Array) -> Array:
        logits: Array = session.run(None, {INPUT: x})[0]
        return logits

    return infer


def openvino(model: nn.Module, x: Array, threads: int) -> Infer:
    """OpenVINO on the CPU, for latency."""
    core = _openvino_core()
    return _openvino_request(core, core.read_model(portable_onnx(model, x[:1])), threads)


def openvino_int8(model: nn.Module, x: Array, threads: int) -> Infer:
    """OpenVINO after NNCF's post-training quantisation."""
    core = _openvino_core()
    with _hushed():
        nncf = importlib.import_module("nncf")
        found = core.read_model(portable_onnx(model, x[:1]))
        dataset = nncf.Dataset([image[None] for image in x])
        return _openvino_request(core, nncf.quantize(found, dataset, subset_size=len(x)), threads)


def _openvino_core() -> Any:
    # Importing it reports to Google Analytics, which a bench has no business with; without this package it does not.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return importlib.import_module("openvino").Core()


def _openvino_request(core: Any, model: Any, threads: int) -> Infer:
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",  # of what is not in int8
        "ENABLE_CPU_PINNING": False,  # the other engines' threads would inherit it
    }
    request = core.compile_model(model, "CPU", settings).create_infer_request()

    def infer(x: Array) -> Array:
        logits: Array = request.infer([x], share_inputs=True)[0]
        return logits

    return infer


def mnn(model: nn.Module, x: Array, threads: int) -> Infer:
    """MNN, float32, with its own choice of algorithms (Winograd among them)."""
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        MNN = importlib.import_module("MNN")
        (Path(folder) / "model.onnx").write_bytes(portable_onnx(model, x[:1]))
        # Not MNN.tools, whose import runs `pip install` on its own and reports to a server; and in a process of its
        # own, because the converter talks on standard output.
        code = "import sys, MNN, _tools; sys.exit(0 if _tools.mnnconvert(sys.argv) else 1)"
        options = ["-f", "ONNX", "--modelFile", "model.onnx", "--MNNModel", "model.mnn", "--bizCode", "cofire"]
        _convert([sys.executable, "-c", code, *options], folder, "model.mnn")
        interpreter = MNN.Interpreter(f"{folder}/model.mnn")
        session = interpreter.createSession({"backend": "CPU", "numThread": threads, "precision": "high"})
    target = interpreter.getSessionInput(session)
    shape, layout = (1, *x.shape[1:]), MNN.Tensor_DimensionType_Caffe

    def infer(x: Array) -> Array:
        target.copyFrom(MNN.Tensor(shape, MNN.Halide_Type_Float, x, layout))
        interpreter.runSession(session)
        logits = interpreter.getSessionOutput(session)
        return np.array(logits.getNumpyData(), dtype=np.float32).reshape(len(x), -1)

    return infer


def ncnn(model: nn.Module, x: Array, threads: int) -> Infer:
    """ncnn with float32 storage and arithmetic, converted by pnnx."""
    spec = importlib.util.find_spec("pnnx")
    if spec is None or spec.origin is None:
        raise PeerError("ncnn needs pnnx, its converter: pip install pnnx")
    with _quiet(), tempfile.TemporaryDirectory() as folder:
        library = importlib.import_module("ncnn")
        (Path(folder) / "model.onnx").write_bytes(portable_onnx(model, x[:1]))
        sizes = f"inputshape=[{','.join(map(str, x[:1].shape))}]f32"
        _convert([str(Path(spec.origin).parent / "pnnx"), "model.onnx", sizes, "fp16=0"], folder, "model.ncnn.param")
        net = library.Net()
        net.opt.num_threads = threads
        for option in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
            setattr(net.opt, option, False)
        failed = net.load_param(f"{folder}/model.ncnn.param") or net.load_model(f"{folder}/model.ncnn.bin")
    if failed:
        raise PeerError("ncnn has no layer for one of the model's ops")

    def infer(x: Array) -> Array:
        extractor = net.create_extractor()
        extractor.input("in0", library.Mat(x[0]))
        status, logits = extractor.extract("out0")
        if status:
            raise PeerError(f"ncnn stopped with status {status}")
        return np.array(logits, dtype=np.float32).reshape(1, -1)

    return infer


def _convert(command: list[str], folder: str, product: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode or not (Path(folder) / product).is_file():
        said = (done.stderr or done.stdout).strip().splitlines()
        raise PeerError(f"its converter failed with code {done.returncode}: {' '.join(said[-3:])}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside the block nothing is written to standard output, not even by C code."""
    import ctypes

    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


@contextmanager
def _hushed() -> Iterator[None]:
    """Inside the block progress and advice of a library, on standard output and in the log, are not heard."""
    logging.disable(logging.WARNING)
    try:
        with _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


PYTORCH = "PyTorch"
PEERS = (
    Peer(PYTORCH, ("torch",), eager),
    Peer("ONNX Runtime", ("onnxruntime", "onnx"), onnx_runtime),
    Peer("OpenVINO", ("openvino", "onnx"), openvino),
    Peer("MNN", ("MNN", "onnx"), mnn),
    Peer("ncnn", ("ncnn", "pnnx", "onnx"), ncnn),
    Peer("ONNX Runtime", ("onnxruntime", "onnx"), onnx_runtime_int8, "int8"),
    Peer("OpenVINO", ("openvino", "nncf", "onnx"), openvino_int8, "int8"),
)
COMPILED = Peer("PyTorch compiled", ("torch",), inductor)

"""compile(model) -> Engine: a program on the native kernels; images in, outputs out, no PyTorch in between.

A program is loaded and run with numpy alone; who compiles a model has PyTorch.

Shapes: B images, O filters of a group.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from cofire.errors import CompileError, ConfigError, DataError, FileError, unknown
from cofire.files.atomic import write_atomically, write_text
from cofire.runtime.floors import Speeds, footprint, loads
from cofire.runtime.forced import Forced
from cofire.runtime.limits import Limits
from cofire.runtime.outline import arranged, native, outline, read_content, read_table
from cofire.runtime.profile import Profile

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.export import ExportedProgram

    from cofire.data.feeding import AnyLoader
    from cofire.runtime import _native
    from cofire.runtime.program import Program

Masks = dict[str, NDArray[np.bool_]]
Precision = Literal["float32", "int8"]


class _Last(threading.local):
    """What a thread's last call left behind, and the masks it forces."""

    batch = 0
    masks: NDArray[np.uint8] | None = None
    macs: NDArray[np.int64] | None = None
    forced: Forced | None = None
    heads = False


class Engine:
    """A compiled model. Made by :func:`compile` or :func:`load_program`.

    Calls may come from several threads at once; ``last_masks``, ``last_macs`` and ``force`` are each thread's own.
    """

    def __init__(self, program: Program | bytes, *, tuning: str = "", limits: Limits | None = None) -> None:
        """From a program, or the content of its file."""
        if isinstance(program, bytes):
            self._file = program
        else:
            self._file, self.program = _content(program), program
        self._native = _native_engine(self._file, tuning, limits or Limits())
        self._outline = outline(self._file)
        self.threshold = self._outline.threshold
        self._groups = self._outline.groups
        self._filters = sum(self._groups.values())
        self._last = _Last()

    @cached_property
    def program(self) -> Program:
        """What runs, op by op, with its weights; needs PyTorch."""
        from cofire.runtime.program_file import from_bytes

        return from_bytes(self._file)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        return self._outline.input_shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of what the model says of one image; of the first output where there are several."""
        return self._outline.output_shapes[0]

    @property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of every output for one image."""
        return self._outline.output_shapes

    @property
    def card(self) -> dict[str, Any]:
        """What the program says of its model, such as ``classes``."""
        return self._outline.card

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of the outputs, as the card has them; empty where it has none."""
        names = self.card.get("classes")
        return tuple(map(str, names)) if isinstance(names, list) else ()

    @property
    def groups(self) -> dict[str, int]:
        """Group of filters that are decided on together -> how many they are."""
        return dict(self._groups)

    @property
    def kernel(self) -> str:
        """The kernel set that runs: ``v2``, ``v3``, ``v4`` (x86-64 levels), ``base`` or ``ref``."""
        return self._native.kernel

    @property
    def tuning(self) -> str:
        """The algorithm of each op, one word each, as found by timing when the engine was made."""
        return self._native.tuning

    def __call__(self, x_BCHW: Any, threads: int = 1, *, threshold: float | None = None) -> Any:
        """The model's output for a batch of images.

        Args:
            x_BCHW: float32 (B, C, H, W) on the CPU: a torch tensor, a numpy array, or anything with DLPack.
            threads: one image is split over threads, a batch gives each thread images of its own; at most as many
                as the machine has cores are used.
            threshold: of this call, in place of the engine's: filters with a logit above it run.

        Returns:
            A tensor for a tensor, else an array; where the model gives several, the same tuple, list or dict of them.
        """
        outputs: list[Any] = self._run(self._images(x_BCHW), threads, threshold=threshold)
        if _is_tensor(x_BCHW):
            outputs = [sys.modules["torch"].from_numpy(output) for output in outputs]
        return arranged(self._outline.structure, outputs)

    @property
    def last_masks(self) -> Masks:
        """Group -> bool (B, O): the masks of this thread's last call."""
        if self._last.masks is None:
            raise ConfigError("last_masks needs a call first: engine(x)")
        return dict(zip(self._groups, self._by_group(self._last.masks.view(np.bool_), self._last.batch), strict=True))

    @property
    def last_macs(self) -> dict[str, NDArray[np.int64]]:
        """Conv or linear layer -> MACs executed in this thread's last call, (B,), counted where the work is done."""
        if self._last.macs is None:
            raise ConfigError("last_macs needs a call first: engine(x)")
        return {name: self._last.macs[:, number] for number, name in self._outline.counted.items()}

    @contextmanager
    def force(self, masks: Mapping[str, Any], *, heads: bool = False) -> Iterator[None]:
        """Inside the block this thread's calls run with the masks given, group -> (O,) or (B, O) of 0/1.

        Groups left out decide for themselves. With ``heads=True`` heads are evaluated all the same: what a gated
        model costs, with masks of your choice. Where filters have factors too, those are 1 for forced groups, and
        with ``heads=True`` what the heads say.
        """
        last = self._last
        before = last.forced, last.heads
        checked = {name: self._mask(name, mask) for name, mask in masks.items()}
        last.forced, last.heads = Forced(checked, self._groups), heads
        try:
            yield
        finally:
            last.forced, last.heads = before

    def logits(self, x_BCHW: Any) -> dict[str, NDArray[np.float32]]:
        """Group -> (B, O): what the heads say, filter by filter.

        A filter runs if its logit is above the threshold, or among the largest where the head takes so many of them.
        """
        x = self._images(x_BCHW)
        found = np.zeros(len(x) * self._filters, np.float32)
        self._run(x, 1, logits=found)
        return dict(zip(self._groups, self._by_group(found, len(x)), strict=True))

    def profile(self, x_BCHW: Any, rounds: int = 10) -> Profile:
        """Time and MACs of each op, means over all images and ``rounds`` passes, beside its floors; one thread."""
        x = self._images(x_BCHW)
        seconds = np.zeros(len(self._outline.ops))
        self._run(x, 1)
        for _ in range(rounds):
            self._run(x, 1, seconds=seconds)
        assert self._last.macs is not None
        found = self._outline.precisions
        algorithms, macs_P = self.tuning.split(), self._last.macs.mean(0)
        table, tensors, _ = read_table(self._file)
        on = [float(mask_BO.mean()) for mask_BO in self.last_masks.values()]
        found_loads = loads(table, tensors, algorithms, macs_P.tolist(), on)
        return Profile(
            names=list(self._outline.ops),
            algorithms=algorithms,
            precisions=[precision for precision, _ in found],
            reasons=[reason for _, reason in found],
            milliseconds=(1e3 * seconds / (rounds * len(x))).tolist(),
            macs=macs_P.astype(int).tolist(),
            floors=[load.floors(self._speeds) for load in found_loads],
            speeds=self._speeds,
        )

    @cached_property
    def _speeds(self) -> Speeds:
        table, tensors, _ = read_table(self._file)
        return Speeds(*native().speeds(self.kernel, footprint(table, tensors)))

    def save(self, path: str | Path) -> Path:
        """Write the program file, and beside it (``.tuning``) the algorithms found on this machine."""
        path = Path(path)
        write_atomically(path, self._file)
        write_text(_tuning_path(path), f"{_machine()}\n{self.tuning}\n")
        return path

    def _run(
        self,
        x: NDArray[np.float32],
        threads: int,
        logits: NDArray[np.float32] | None = None,
        seconds: NDArray[np.float64] | None = None,
        threshold: float | None = None,
    ) -> list[NDArray[np.float32]]:
        if threads < 1:
            raise ConfigError(f"threads must be at least 1, got {threads}")
        batch, last = len(x), self._last
        shapes = [(batch, *shape) for shape in self._outline.output_shapes]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        output = np.empty(ends[-1], np.float32)
        last.batch = batch
        last.masks = np.zeros(batch * self._filters, np.uint8)
        last.macs = np.zeros((batch, len(self._outline.ops)), np.int64)
        forced, is_forced = last.forced.of(batch) if last.forced else (None, [])
        if batch:
            how = (threads, float(self.threshold if threshold is None else threshold), last.heads)
            self._native.run(x, output, *how, last.masks, last.macs, logits, seconds, forced, is_forced)
        return [part.reshape(shape) for part, shape in zip(np.split(output, ends[:-1]), shapes, strict=True)]

    def _images(self, x_BCHW: Any) -> NDArray[np.float32]:
        if _is_tensor(x_BCHW):
            if x_BCHW.device.type != "cpu":
                raise DataError(f"images must be on the CPU, got {x_BCHW.device}; pass x.cpu()")
            x = x_BCHW.detach().numpy() if str(x_BCHW.dtype) == "torch.float32" else x_BCHW
        elif isinstance(x_BCHW, np.ndarray):
            x = x_BCHW
        elif hasattr(x_BCHW, "__dlpack__"):
            x = np.from_dlpack(x_BCHW)
        else:
            raise DataError(f"images must be a tensor or an array, got {type(x_BCHW).__name__}")
        shape = tuple(x.shape)
        if len(shape) != 4 or shape[1:] != self.input_shape:
            wanted = ", ".join(map(str, self.input_shape))
            raise DataError(f"images must have shape (B, {wanted}), got {shape}; compile for another shape if need be")
        if x.dtype != np.float32:
            raise DataError(f"images must be float32, got {x.dtype}; convert them, e.g. x.float()")
        return np.ascontiguousarray(cast(NDArray[np.float32], x))

    def _mask(self, name: str, mask: Any) -> NDArray[np.uint8]:
        if name not in self._groups:
            raise unknown("group", name, self._groups)
        found = np.asarray(mask.detach().cpu() if _is_tensor(mask) else mask)
        if found.ndim not in (1, 2) or found.shape[-1] != self._groups[name]:
            raise ConfigError(f"group {name!r}: mask must have shape (B, {self._groups[name]}), got {found.shape}")
        return np.atleast_2d(found > 0.5).astype(np.uint8)

    def _by_group(self, flat: NDArray[Any], batch: int) -> list[NDArray[Any]]:
        ends = np.cumsum([batch * filters for filters in self._groups.values()])
        parts = np.split(flat, ends[:-1]) if len(ends) else []
        return [part.reshape(batch, filters) for part, filters in zip(parts, self._groups.values(), strict=True)]


def compile(
    model: nn.Module | ExportedProgram | str | Path,
    input_shape: tuple[int, int, int] | None = None,
    *,
    precision: Precision = "float32",
    images: AnyLoader | Tensor | None = None,
    limits: Limits | None = None,
    card: Mapping[str, Any] | None = None,
) -> Engine:
    """The engine of a model, plain, gated or quantised, in eval mode; ``model`` is left alone.

    Each conv is timed here with every algorithm that can run it, a second or two for a large network.

    Args:
        model: a module; or a graph: the path of an ``.onnx`` file, or a program of `torch.export`. A graph is dense,
            but for a file that `cofire.export.to_onnx` wrote of a gated model.
        input_shape: (C, H, W) of an image. Default: the shape a graph, a gated model or a registered backbone was made
            for, else 224 x 224.
        precision: ``int8`` stands for ``compile(quantize(model, images))``.
        images: those that :func:`cofire.quantize` fits ranges to.
        limits: what one image may cost; default ``Limits()``.
        card: what people want to know of the model, as JSON values, kept in the program; ``classes`` are the names of
            its classes.

    Raises:
        ConfigError: int8 without images, or images without int8; a path of another kind of file.
        FileError: the ONNX file is missing or damaged.
        CompileError: the extension was not built, the engine has nothing like some call, or the program would cost
            more than the limits allow.
    """
    from torch import nn

    from cofire.runtime.lowering import lower
    from cofire.runtime.quantized import Quantized, quantize

    if not isinstance(model, nn.Module):
        from cofire.importing import imported

        model, input_shape, _ = imported(model, input_shape)
    if precision not in get_args(Precision):
        raise unknown("precision", precision, get_args(Precision))
    if (precision == "int8") != (images is not None):
        raise ConfigError("images must be given with precision='int8', which fits ranges to them, and only then")
    if images is not None:
        model = quantize(model, images, input_shape=input_shape)
    if isinstance(model, Quantized):
        shape = model.program.buffers[model.program.input]
        if input_shape is not None and tuple(input_shape) != shape:
            raise ConfigError(f"input_shape must be {shape}, for which the model was quantised, got {input_shape}")
        program = replace(model.program, threshold=model.threshold)
    else:
        program = lower(model, input_shape)
    return Engine(replace(program, card=dict(card or {})), limits=limits)


def load_program(path: str | Path, *, limits: Limits | None = None) -> Engine:
    """The engine of a program file. The tuning beside it is used if it was made on this kind of machine.

    Otherwise convs are timed anew, and the result is kept beside the file where it can be written.

    Args:
        limits: what one image may cost; default ``Limits()``, which a file from anywhere can be loaded with.

    Raises:
        FileError: missing, damaged or not a program.
        CompileError: it would cost more than the limits allow.
    """
    path = Path(path)
    content, beside = read_content(path), _tuning_path(path)
    try:
        machine, tuning = beside.read_text().splitlines()
        known = tuning if machine == _machine() else ""
    except (OSError, ValueError):
        known = ""
    try:
        engine = Engine(content, tuning=known, limits=limits)
    except CompileError:
        if not known:
            raise
        engine, known = Engine(content, limits=limits), ""  # the tuning is of another program
    if not known and not os.environ.get("COFIRE_KERNEL"):
        with suppress(FileError):  # a read-only folder: it is timed again next time
            write_text(beside, f"{_machine()}\n{engine.tuning}\n")
    return engine


def _is_tensor(value: Any) -> bool:
    """Of PyTorch: nobody has one where it was not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _content(program: Program) -> bytes:
    from cofire.runtime.program_file import to_bytes

    return to_bytes(program)


def _native_engine(file: bytes, tuning: str, limits: Limits) -> _native.Engine:
    module = native()
    kernel = os.environ.get("COFIRE_KERNEL", "")
    try:
        engine: _native.Engine = module.Engine(
            file, kernel, tuning, limits.memory, limits.work or 0.0, limits.seconds()
        )
        return engine
    except module.TooCostly as error:
        raise CompileError(f"{error}, e.g. limits=Limits(memory=2 << 30, work=1e12)") from error
    except RuntimeError as error:
        raise CompileError(str(error)) from error


def _tuning_path(path: Path) -> Path:
    return path.with_name(path.name + ".tuning")


def _machine() -> str:
    """What a tuning holds for; the C interface reads the same line."""
    return str(native().machine())

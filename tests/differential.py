"""Mutated program files through both readers and, where they are taken, through every kernel set and the interpreter.

``python tests/differential.py COUNT SEED SHARE`` is the long form; SHARE of the programs that are taken are also run.
``test_differential.py`` runs a short one.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, get_args

import numpy as np
import torch
from test_random_programs import Maker
from torch import Tensor

from cofire.errors import ConfigError
from cofire.runtime import _native, interpreter
from cofire.runtime.program import (
    KINDS,
    Act,
    Affine,
    Conv,
    Deconv,
    Mul,
    Norm,
    Program,
    Quantize,
    Reduce,
    Resample,
    Rescale,
    Softmax,
)
from cofire.runtime.program_file import from_bytes, to_bytes

KERNELS = ["ref", "v2", "v3", "v4", "base"]
SEEDS = sorted((Path(__file__).parent / "golden").glob("program_v*/*.cofire"))
NUMBERS = [
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    16,
    -1,
    -2,
    0.5,
    1.0,
    1e3,
    1e-40,
    3.4e38,
    1 << 20,
    (1 << 20) + 1,
    1 << 28,
    1 << 31,
    1 << 53,
    None,
    True,
    "",
    [],
    {},
]
WORDS = [*KINDS, *get_args(Act), "max", "avg", "abs", "both"]
PIECES = [*'"{}[],:0- ', ".0", "e0", "NaN", "Infinity", "\\ud800", '"x":0,', "\x00"]
FLOATS = np.array([0, -0.0, 1, -1, 6, 1e-3, 100, -100, 1e4, np.nan, np.inf, -np.inf, 1e-42], "<f4")
EPSILON = 2e-5  # of one op, in units of the largest number it adds up


@dataclass
class Tally:
    """What happened to the mutants."""

    files: int = 0
    taken: int = 0
    run: int = 0
    compared: int = 0
    """Outputs of a kernel set that stand beside the interpreter's."""
    beyond: int = 0
    """Programs whose numbers leave the range in which results are defined."""


class Mutator:
    def __init__(self, seed: int, seeds: list[bytes] | None = None) -> None:
        self.random = Random(seed)
        self.seeds = [_parts(content) for content in seeds or [path.read_bytes() for path in SEEDS]]

    def file(self) -> bytes:
        """A mutant; most have a right length and digest, so that what is wrong lies deeper."""
        header, table, data = self.random.choice(self.seeds) if self.random.random() < 0.2 else self.fresh()
        table, header = json.loads(json.dumps(table)), json.loads(json.dumps(header))
        how = self.random.random()
        if how < 0.3 and data:  # nothing but weights
            data = self.changed_data(data)
        else:
            for _ in range(self.random.choice([1, 1, 1, 2, 4])):
                self.change(table if self.random.random() < 0.9 else header)
        table["sha256"] = sha256(data).hexdigest() if self.random.random() < 0.98 else "0" * 64
        text = json.dumps(table)
        if how > 0.85:
            text = self.changed_text(text)
        encoded = json.dumps({"__metadata__": {"cofire.program": text}, **header}).encode("utf-8", "surrogatepass")
        content = len(encoded).to_bytes(8, "little") + encoded + data
        if how > 0.97:
            at = self.random.randrange(len(content))
            content = content[:at] + bytes([self.random.randrange(256)]) + content[at + self.random.randrange(3) :]
        return content

    def fresh(self) -> tuple[dict[str, Any], dict[str, Any], bytes]:
        """A random program, so that every kind of op of today's format is changed too."""
        return _parts(to_bytes(Maker(self.random, self.random.randrange(1 << 30)).program()))

    def changed_data(self, data: bytes) -> bytes:
        values = np.frombuffer(data, "<f4").copy()
        for _ in range(self.random.choice([1, 2, 8])):
            values[self.random.randrange(len(values))] = self.random.choice(FLOATS)
        return values.tobytes()

    def change(self, table: Any) -> None:
        """One value somewhere in a nested table."""
        while True:
            keys = list(table) if isinstance(table, dict) else list(range(len(table)))
            if not keys:
                return
            key = self.random.choice(keys)
            inner = table[key]
            if isinstance(inner, (dict, list)) and inner and self.random.random() < 0.9:
                table = inner
                continue
            if isinstance(inner, str) and self.random.random() < 0.8:
                table[key] = self.random.choice(WORDS)
            elif isinstance(inner, int) and self.random.random() < 0.6:
                table[key] = inner + self.random.randint(-2, 2)
            elif isinstance(table, dict) and self.random.random() < 0.1:
                table["x"] = table.pop(key)
            elif isinstance(table, list) and self.random.random() < 0.3:
                table.insert(key, inner)
            else:
                table[key] = self.random.choice(NUMBERS)
            return

    def changed_text(self, text: str) -> str:
        at = self.random.randrange(len(text))
        piece = self.random.choice(PIECES)
        return text[:at] + piece + text[at + self.random.randrange(2) :]


def _parts(content: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    return header, json.loads(header.pop("__metadata__")["cofire.program"]), content[start:]


def check(content: bytes, random: Random, tally: Tally, share: float) -> None:
    """Both readers say the same of the file; a share of what they take is computed by every kernel set."""
    tally.files += 1
    try:
        _native.check(content)
    except RuntimeError as error:
        if not str(error).startswith("invalid program file: "):
            raise
        try:
            from_bytes(content)
        except ConfigError as ours:
            assert str(ours) == str(error)  # noqa: PT017 (it must be refused)
            return
        raise AssertionError("Python takes what the native reader refuses") from error
    tally.taken += 1
    program = from_bytes(content)
    again = from_bytes(to_bytes(program))
    assert to_bytes(again) == to_bytes(program)
    if random.random() < share and sum(np.prod(shape) for shape in program.buffers) < 1 << 16:
        compare(content, program, random, tally)


def compare(content: bytes, program: Program, random: Random, tally: Tally) -> None:
    """An image, sometimes with numbers that are not finite, through all kernel sets and the interpreter."""
    shape = program.buffers[program.input]
    x = np.random.default_rng(random.randrange(1 << 30)).normal(size=(1, *shape)).astype("f4")
    if random.random() < 0.4:
        for _ in range(random.choice([1, 1, 3])):
            x.flat[random.randrange(x.size)] = random.choice([np.nan, np.inf, -np.inf, 3e4])
    tally.run += 1
    images, known = torch.from_numpy(x).double(), {}
    for kernel in KERNELS:
        try:
            engine = _native.Engine(content, kernel, _tuning(content, kernel, program, random), tuning_seconds=0.0)
        except _native.TooCostly:
            return
        except RuntimeError as error:
            if "no kernel set" not in str(error):
                raise
            continue
        out = np.empty((1, *program.output_shape), "f4")
        masks = np.zeros(sum(group.filters for group in program.groups), "u1")
        threads = 1 if random.random() < 0.98 else 2
        engine.run(x, out, threads, program.threshold, False, masks, None, None, None, None, [])
        given, at = {}, 0
        for group in program.groups:
            given[group.name] = torch.from_numpy(masks[at : at + group.filters].astype(bool))[None]
            at += group.filters
        if masks.tobytes() not in known:
            wanted = interpreter.trace(program, images, forced=given, unscaled=())
            known[masks.tobytes()] = wanted, error_of(program, images, wanted)
        wanted, most = known[masks.tobytes()]
        if not most < 1e6:
            tally.beyond += 1
            return
        tally.compared += 1
        got, want = out.astype("f8"), wanted.out.numpy()
        odd = ~np.isfinite(want)
        same = np.array_equal(got[odd], want[odd], equal_nan=True) and np.isfinite(got[~odd]).all()
        assert same, f"{kernel} {engine.tuning}: other elements are not finite"
        off = np.abs(got[~odd] - want[~odd]).max(initial=0)
        assert off <= most, f"{kernel} {engine.tuning}: off by {off}, at most {most} is right"


def _tuning(content: bytes, kernel: str, program: Program, random: Random) -> str:
    """The likely best algorithms, or one of them changed for another that fits."""
    if kernel == "ref" or not any(isinstance(op, Conv) for op in program.ops):
        return ""
    try:
        words = _native.Engine(content, kernel, "", tuning_seconds=0.0).tuning.split()
        at = random.choice([number for number, op in enumerate(program.ops) if isinstance(op, Conv)])
        words[at] = random.choice(_native.conv_algorithms())
        return str(_native.Engine(content, kernel, " ".join(words), tuning_seconds=0.0).tuning)
    except RuntimeError:
        return ""


def error_of(program: Program, x: Tensor, wanted: interpreter.Trace) -> float:
    """What rounding can do to the output: each op adds its own to what its sources bring, times its largest gain.

    Infinite where numbers leave the range in which results are defined.
    """
    errors = {program.input: 0.0}
    values = {program.input: x}

    def largest(tensor: Tensor) -> float:
        finite = tensor[tensor.isfinite()]
        return float(finite.abs().max()) if finite.numel() else 0.0

    for op in program.ops:
        sources = [largest(values[src]) for src in op.src]
        brought = [errors[src] for src in op.src]
        if isinstance(op, Conv):
            gain = float(op.weight.double().abs().flatten(1).sum(1).max())
            size, bound = gain * sources[0] + float(op.bias.abs().max()), gain * brought[0]
            if op.residual:
                size, bound = size + sources[1], bound + brought[1]
        elif isinstance(op, Affine):
            gain = float(op.scale.double().abs().max())
            size, bound = gain * sources[0] + float(op.shift.abs().max()), gain * brought[0]
        elif isinstance(op, Mul):
            size, bound = (
                sources[0] * sources[1],
                sources[0] * brought[1] + sources[1] * brought[0] + brought[0] * brought[1],
            )
        elif isinstance(op, Deconv | Resample | Reduce | Softmax | Norm):
            gain, added = _linear_gain(op, program.buffers[op.src[0]][0] // program.buffers[op.dst][0])
            size, bound = gain * sources[0] + added, gain * brought[0]
        elif isinstance(op, Quantize):
            return float("inf")  # a number at the edge of two bytes may become either; tests of int8 know better
        else:
            size, bound = sum(sources), sum(brought)
        if op.gate is not None and isinstance(op, Conv | Rescale) and op.shift is not None:
            factor = largest(wanted.factors[program.groups[op.gate.group].name])
            head = _head_error(program, op.gate.group, errors, values)
            size, bound = (
                size * max(1.0, factor) + largest(op.shift.double()),
                bound * max(1.0, factor) + head * max(size, 1),
            )
        slope = next((abs(float(op.slope)) for field in fields(op) if field.name == "slope"), 0.0)  # type: ignore[attr-defined]
        errors[op.dst] = max(1.5, slope) * (bound + EPSILON * max(size, 1.0))
        values[op.dst] = wanted.values[op.name].data
        if size > 1e30:
            return float("inf")
    return errors[program.output]


def _linear_gain(op: Deconv | Resample | Reduce | Softmax | Norm, reduced: int) -> tuple[float, float]:
    """How much larger an error of the source can get, and the largest number that is added."""
    if isinstance(op, Deconv):
        return float(op.weight.double().abs().sum((0, 2, 3)).max()), float(op.bias.abs().max())
    if isinstance(op, Resample):
        rows, columns = op.row_weights.double(), op.column_weights.double()
        return float(rows.abs().sum(1).max() * columns.abs().sum(1).max()), 0.0
    if isinstance(op, Reduce):
        return float(reduced if op.op == "sum" else 1), 0.0
    if isinstance(op, Softmax):
        return 2.0, 1.0
    return 2 * float(op.scale.abs().max()) / max(op.epsilon, 1e-24) ** 0.5, float(op.shift.abs().max())


def _head_error(program: Program, group: int, errors: dict[int, float], values: dict[int, Tensor]) -> float:
    for op in program.ops:
        if op.gate is not None and op.gate.group == group and op.gate.head is not None:
            head = op.gate.head
            source = op.src[0] if head.src is None else head.src
            gain = float(head.weight.double().abs().sum(1).max())
            finite = values[source][values[source].isfinite()]
            size = float(finite.abs().max()) if finite.numel() else 0.0
            return gain * (errors[source] + EPSILON * max(size, 1.0)) + EPSILON
    return 0.0


def fuzz(count: int, seed: int, share: float = 1.0, *, every: int = 20_000) -> Tally:
    mutator, tally, begin = Mutator(seed), Tally(), time.monotonic()
    for number in range(count):
        content = mutator.file()
        try:
            check(content, mutator.random, tally, share)
        except Exception:
            Path(f"found-{seed}-{number}.cofire").write_bytes(content)
            raise
        if (number + 1) % every == 0:
            print(f"{time.monotonic() - begin:.0f} s: {tally}", flush=True)
    return tally


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(fuzz(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))

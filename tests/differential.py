"""Mutated program files through both readers and, where they are taken, through every kernel set and the interpreter.

``python tests/differential.py COUNT SEED FOLDER`` is a slice of the long form: it adds a line to ``slices.jsonl`` in
the folder when it ends, and does nothing if the line is there already. A mutant on which two disagree is written there,
and ends it. ``test_differential.py`` runs a short one.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from functools import cache
from hashlib import sha256
from math import prod
from pathlib import Path
from random import Random
from typing import Any, get_args

import numpy as np
import torch
from test_int8 import Int8Maker
from test_random_programs import Maker
from torch import Tensor

from cofire.errors import ConfigError
from cofire.runtime import _native, interpreter
from cofire.runtime.meanings import Value
from cofire.runtime.program import (
    KINDS,
    Act,
    Affine,
    Cat,
    Conv,
    Conv8,
    Deconv,
    Dequantize,
    Flatten,
    Move,
    Mul,
    Norm,
    Op,
    Pool,
    Program,
    Quantize,
    Reduce,
    Resample,
    Rescale,
    Softmax,
    Strided,
)
from cofire.runtime.program_file import from_bytes, to_bytes
from cofire.runtime.quantizing import quantized_program

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
FLUSHED = 2e-38  # numbers below float32's normal range may be zero
LARGEST = 1 << 16  # elements of all buffers of a program that is run: a slice has many to run
MUTANTS = 16  # of a fresh program


@dataclass
class Tally:
    """What happened to the mutants, no two of which are the same."""

    files: int = 0
    taken: int = 0
    large: int = 0
    """Programs that are taken but not run: they would take long."""
    costly: int = 0
    """Programs that the engine does not run, by its limits."""
    beyond: int = 0
    """Programs whose numbers leave the range in which results are defined."""
    run: int = 0
    """All others."""
    compared: int = 0
    """Outputs of an engine, of any kernel set and tuning, that stand beside the interpreter's."""


class Parts:
    """A program file taken apart."""

    def __init__(self, content: bytes) -> None:
        start = 8 + int.from_bytes(content[:8], "little")
        self.header = json.loads(content[8:start])
        self.text: str = self.header.pop("__metadata__")["cofire.program"]
        self.header_text, self.data = json.dumps(self.header), content[start:]
        self.digest = sha256(self.data).hexdigest()


class Mutator:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.seeds = [Parts(path.read_bytes()) for path in SEEDS]
        self.fresh, self.left = self.seeds[0], 0

    def file(self) -> bytes:
        """A mutant; most have a right length and digest, so that what is wrong lies deeper."""
        parts = self.random.choice(self.seeds) if self.random.random() < 0.2 else self.made()
        header, text, data = parts.header, parts.text, parts.data
        how = self.random.random()
        if how < 0.3 and len(data) >= 4:  # nothing but weights
            data = self.changed_data(data)
            text = text.replace(parts.digest, sha256(data).hexdigest())
        else:
            table, header = json.loads(text), json.loads(parts.header_text)
            for _ in range(self.random.choice([1, 1, 1, 2, 4])):
                self.change(table if self.random.random() < 0.9 else header)
            table["sha256"] = parts.digest if self.random.random() < 0.98 else "0" * 64
            text = json.dumps(table)
        if how > 0.85:
            text = self.changed_text(text)
        encoded = json.dumps({"__metadata__": {"cofire.program": text}, **header}).encode("utf-8", "surrogatepass")
        encoded += b" " * (-len(encoded) % 8)
        content = len(encoded).to_bytes(8, "little") + encoded + data
        if how > 0.97:
            at = self.random.randrange(len(content))
            content = content[:at] + bytes([self.random.randrange(256)]) + content[at + self.random.randrange(3) :]
        return content

    def made(self) -> Parts:
        """A random program, now and then in int8, so that every kind of op of today's format is changed too."""
        if self.left == 0:
            in_int8 = self.random.random() < 0.15
            maker = (Int8Maker if in_int8 else Maker)(self.random, self.random.randrange(1 << 30))
            program = maker.program()
            if in_int8:
                program = quantized_program(program, [maker.values(2, *program.buffers[0])], ())
            self.fresh, self.left = Parts(to_bytes(program)), MUTANTS
        self.left -= 1
        return self.fresh

    def changed_data(self, data: bytes) -> bytes:
        whole = len(data) // 4 * 4
        values = np.frombuffer(data[:whole], "<f4").copy()
        for _ in range(self.random.choice([1, 2, 8])):
            values[self.random.randrange(len(values))] = self.random.choice(FLOATS)
        return values.tobytes() + data[whole:]

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


def check(content: bytes, random: Random, tally: Tally) -> None:
    """Both readers say the same of the file; what they take is computed by every kernel set."""
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
    written = to_bytes(program)
    assert written == content or to_bytes(from_bytes(written)) == written
    if sum(prod(shape) for shape in program.buffers) < LARGEST:
        compare(content, program, random, tally)
    else:
        tally.large += 1


def compare(content: bytes, program: Program, random: Random, tally: Tally) -> None:
    """An image, sometimes with numbers that are not finite, through all kernel sets and the interpreter."""
    shape = program.buffers[program.input]
    x = np.random.default_rng(random.randrange(1 << 30)).normal(size=(1, *shape)).astype("f4")
    if random.random() < 0.4:
        for _ in range(random.choice([1, 1, 3])):
            x.flat[random.randrange(x.size)] = random.choice([np.nan, np.inf, -np.inf, 3e4])
    images, known = torch.from_numpy(x).double(), {}
    convs = [number for number, op in enumerate(program.ops) if isinstance(op, Conv)]
    for kernel in kernel_sets():
        try:
            engine = _native.Engine(content, kernel, tuning_seconds=0.0)
        except _native.TooCostly:
            tally.costly += 1
            return
        if kernel != "ref" and convs and random.random() < 0.5:
            engine = _tuned_otherwise(engine, content, random.choice(convs), random)
        out = np.empty((1, prod(program.output_shape)), "f4")
        masks = np.zeros(sum(group.filters for group in program.groups), "u1")
        threads = 1 if random.random() < 0.98 else 2
        engine.run(x, out, threads, program.threshold, False, masks, None, None, None, None, [])
        if masks.tobytes() not in known:
            given, at = {}, 0
            for group in program.groups:
                given[group.name] = torch.from_numpy(masks[at : at + group.filters].astype(bool))[None]
                at += group.filters
            wanted = interpreter.trace(program, images, forced=given, unscaled=())
            known[masks.tobytes()] = wanted.out.flatten(1).numpy(), error_of(program, images, wanted)
        want, most = known[masks.tobytes()]
        if not most < 1e6:
            tally.beyond += 1
            return
        tally.compared += 1
        odd = ~np.isfinite(want)
        same = np.array_equal(out[odd], want[odd], equal_nan=True) and np.isfinite(out[~odd]).all()
        assert same, f"{kernel} {engine.tuning}: other elements are not finite"
        off = np.abs(out[~odd] - want[~odd]).max(initial=0)
        assert off <= most + FLUSHED, f"{kernel} {engine.tuning}: off by {off}, at most {most} is right"
    tally.run += 1


@cache
def kernel_sets() -> list[str]:
    """Those that this CPU has."""
    content, found = SEEDS[0].read_bytes(), []
    for kernel in KERNELS:
        try:
            _native.Engine(content, kernel, tuning_seconds=0.0)
        except RuntimeError as error:
            assert "no kernel set" in str(error)  # noqa: PT017 (it must be refused)
        else:
            found.append(kernel)
    return found


def _tuned_otherwise(engine: _native.Engine, content: bytes, conv: int, random: Random) -> _native.Engine:
    """The engine with another algorithm for one conv, if that fits it and is exact with its weights."""
    words = engine.tuning.split()
    words[conv] = random.choice(_native.conv_algorithms())
    try:
        return _native.Engine(content, engine.kernel, " ".join(words), tuning_seconds=0.0)
    except RuntimeError as error:
        assert "cannot be" in str(error)  # noqa: PT017 (it must be refused)
        return engine


def error_of(program: Program, x: Tensor, wanted: interpreter.Trace) -> float:
    """What rounding can do to the output: each op adds its own to what its sources bring, times its largest gain.

    Infinite where numbers leave the range in which results are defined.
    """
    errors = {program.input: 0.0}
    sizes = {program.input: largest(x)}
    for op in program.ops:
        sources = [sizes[src] for src in op.src]
        brought = [errors[src] for src in op.src]
        sizes[op.dst] = size_of(wanted.values[op.name])
        if is_exact(op):
            if isinstance(op, Quantize) and brought[0] > 0:
                return float("inf")  # a number at the edge of two bytes may become either
            errors[op.dst] = max(brought)
            continue
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
        else:
            size, bound = sum(sources), sum(brought)
        if op.gate is not None and isinstance(op, Conv | Rescale) and op.shift is not None:
            factor = largest(wanted.factors[program.groups[op.gate.group].name])
            head = _head_error(program, op.gate.group, errors, sizes)
            size, bound = (
                size * max(1.0, factor) + largest(op.shift.double()),
                bound * max(1.0, factor) + head * max(size, 1),
            )
        slope = next((abs(float(op.slope)) for field in fields(op) if field.name == "slope"), 0.0)  # type: ignore[attr-defined]
        errors[op.dst] = max(1.5, slope) * (bound + EPSILON * max(size, 1.0))
        if size > 1e30:
            return float("inf")
    return errors[program.output]


def is_exact(op: Op) -> bool:
    """Whether an op rounds nothing, or as the definition says: then all kernel sets give the same bits."""
    moves = isinstance(op, Move | Cat | Flatten | Strided) or (isinstance(op, Pool) and op.op == "max")
    return moves or isinstance(op, Quantize | Conv8 | Dequantize)


def largest(tensor: Tensor) -> float:
    """Of the numbers that are finite."""
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().amax())


def size_of(value: Value) -> float:
    """The largest number in a buffer, whatever it is stored as."""
    return largest(value.data) * (1.0 if value.quant is None else value.quant.scale)


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


def _head_error(program: Program, group: int, errors: dict[int, float], sizes: dict[int, float]) -> float:
    for op in program.ops:
        if op.gate is not None and op.gate.group == group and op.gate.head is not None:
            head = op.gate.head
            source = op.src[0] if head.src is None else head.src
            gain = float(head.weight.double().abs().sum(1).max())
            return gain * (errors[source] + EPSILON * max(sizes[source], 1.0)) + EPSILON
    return 0.0


def fuzz(count: int, seed: int, folder: Path, *, every: int = 20_000) -> Tally:
    """So many different mutants, the same for the same seed.

    Args:
        folder: where one goes that two disagree on.
    """
    mutator, tally, seen, begin = Mutator(seed), Tally(), set(), time.monotonic()
    while tally.files < count:
        content = mutator.file()
        if hash(content) in seen:
            continue
        seen.add(hash(content))
        try:
            check(content, mutator.random, tally)
        except BaseException:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"found-{seed}-{tally.files}.cofire").write_bytes(content)
            raise
        if tally.files % every == 0:
            print(f"{time.monotonic() - begin:.0f} s: {tally}", flush=True)
    return tally


def run_slice(count: int, seed: int, folder: Path) -> None:
    """Runs a slice, unless this commit has; says what it and all slices of this commit came to."""
    folder.mkdir(parents=True, exist_ok=True)
    book = folder / "slices.jsonl"
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    lines = [json.loads(line) for line in book.read_text().splitlines()] if book.exists() else []
    lines = [line for line in lines if line["commit"] == commit]
    if not any((line["seed"], line["files"]) == (seed, count) for line in lines):
        begin = time.monotonic()
        tally = asdict(fuzz(count, seed, folder))
        lines.append({"commit": commit, "seed": seed, "seconds": round(time.monotonic() - begin), **tally})
        with book.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(json.dumps(lines[-1]))
    names = ("seconds", *(field.name for field in fields(Tally)))
    print(f"{commit}, {len(lines)} slices:", {name: sum(line[name] for line in lines) for name in names})


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # there is much that never goes away
    gc.set_threshold(50_000)
    run_slice(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

"""Laws of the engine in int8: bit for bit what the simulation computes, and files it must refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import Net, conv, fc, images
from safetensors.torch import load_file, save_file
from small import tiny_gated, tiny_plain
from test_kernels import KERNELS, with_kernel
from test_random_programs import Maker
from torch import Tensor

import cofire
from cofire import ConfigError, quantize, zoo
from cofire.runtime import interpreter
from cofire.runtime.engine import Engine
from cofire.runtime.outline import outline
from cofire.runtime.program import Cat, Conv8, Flatten, Move, Op, Pool, Program, kind_of
from cofire.runtime.program_file import from_bytes, read, to_bytes, write
from cofire.runtime.quantizing import quantized_program

DIGITS = (1, 8, 8)
NOT_A_NUMBER = float("nan")


class Int8Maker(Maker):
    """Random programs of which everything has an int8 form; heads decide, but the masks are given."""

    def act(self, lifting: bool = True) -> dict[str, Any]:
        return {"act": self.random.choice(["none", "relu", "relu", "relu6"]), "slope": 0.0}

    def gate(self, channels: int, filters: int) -> Any:
        gate = super().gate(channels, filters)
        self.scaled.clear()  # without factors
        return gate

    def other(self) -> None:
        before = len(self.ops), len(self.buffers), len(self.groups)
        super().other()
        if any(not isinstance(op, Cat | Move | Flatten | Pool) for op in self.ops[before[0] :]):
            del self.ops[before[0] :], self.buffers[before[1] :], self.groups[before[2] :]


def only_passes(op: Op) -> bool:
    return isinstance(op, Cat | Move | Flatten) or (isinstance(op, Pool) and op.op == "max")


def extreme_masks(random: Random, images: int, filters: int) -> Tensor:
    """For each image none, one, all but one, all, or any of the filters."""
    rows = []
    for _ in range(images):
        count = random.choice([0, 1, filters - 1, filters, random.randint(0, filters)])
        rows.append(torch.isin(torch.arange(filters), torch.tensor(random.sample(range(filters), count))))
    return torch.stack(rows)


def check_bits(engine: Engine, x: Tensor, forced: dict[str, Tensor]) -> None:
    """One image or many, on one thread or two: the interpreter's bits and MACs."""
    wanted = interpreter.trace(engine.program, x, forced=forced)
    for threads in (1, 2):
        engine(torch.full_like(x, NOT_A_NUMBER), threads)  # leaves other numbers in all memory
        with engine.force(forced):
            assert torch.equal(engine(x, threads), wanted.out)
            for name, logits in engine.logits(x).items():
                near = 1e-5 * float(wanted.logits[name].abs().max().clamp(min=1))
                assert torch.allclose(torch.from_numpy(logits), wanted.logits[name], atol=near, rtol=0), name
        for name, macs in wanted.macs.items():
            assert engine.last_macs[name].tolist() == macs.tolist(), name
        for number, image in enumerate(x):
            with engine.force({name: mask[number] for name, mask in forced.items()}):
                assert torch.equal(engine(image[None], threads)[0], wanted.out[number])


@pytest.mark.parametrize("kernel", ["ref", *KERNELS])
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.randoms(use_true_random=False), st.integers(0, 2**32 - 1))
def test_random_programs_bit_for_bit(kernel: str, random: Random, seed: int) -> None:
    maker = Int8Maker(random, seed)
    plain = maker.program()
    x = maker.values(3, *plain.buffers[0])
    program = quantized_program(plain, [x], keep=[op.name for op in plain.ops if random.random() < 0.1])
    forced = {group.name: extreme_masks(random, len(x), group.filters) for group in program.groups}
    engine = with_kernel(kernel, program, "")
    if all(
        how == "int8" or only_passes(op)
        for op, (how, _) in zip(program.ops, outline(to_bytes(program)).precisions, strict=True)
    ):
        check_bits(engine, x, forced)
        check_bits(engine, 100 * x, forced)  # saturates
    else:  # convs in float32 round as they like, and that may tip a byte
        wanted = interpreter.trace(program, x, forced=forced).out
        with engine.force(forced):
            assert torch.allclose(engine(x), wanted, atol=0.05 * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("kernel", ["ref", *KERNELS])
@pytest.mark.parametrize("net", [tiny_plain, tiny_gated])
def test_small_networks_bit_for_bit(net: Any, kernel: str) -> None:
    torch.manual_seed(0)
    model, x = net().eval(), images(6, DIGITS)
    program = quantize(model, images(32, DIGITS, seed=5)).program
    random = Random(0)
    forced = {group.name: extreme_masks(random, len(x), group.filters) for group in program.groups}
    check_bits(with_kernel(kernel, program, ""), x, forced)


@pytest.mark.parametrize("kernel", ["ref", *KERNELS])
def test_a_trained_gated_network_bit_for_bit(kernel: str) -> None:
    """Under the engine's own masks; those are the simulation's but for logits that round to the threshold."""
    model = zoo.load("resnet20_cifar10_ftwt").eval()
    x = images(16, (3, 32, 32))
    found = quantize(model, x)
    engine = with_kernel(kernel, found.program, "")
    out = engine(x)
    masks = {name: torch.from_numpy(mask) for name, mask in engine.last_masks.items()}
    wanted = interpreter.trace(found.program, x, forced=masks)
    assert torch.equal(out, wanted.out)
    for name, logits in engine.logits(x).items():
        away = (wanted.logits[name] - engine.threshold).abs()
        assert ((wanted.logits[name] > engine.threshold) == masks[name])[away > 1e-4].all()
        assert torch.allclose(torch.from_numpy(logits), wanted.logits[name], atol=1e-4)


def test_compile_in_int8() -> None:
    model, x = tiny_plain().eval(), images(8, DIGITS)
    engine = cofire.compile(model, precision="int8", images=x)
    assert torch.equal(engine(x), quantize(model, x)(x))
    profile = engine.profile(x[:1], rounds=1)
    assert set(profile.precisions) == {"int8"}
    assert "int8" in str(profile)
    for wrong in ({"precision": "int8"}, {"images": x}):
        with pytest.raises(ConfigError, match="images must be given with precision='int8'"):
            cofire.compile(model, **wrong)
    with pytest.raises(ConfigError, match="unknown precision 'int4'"):
        cofire.compile(model, precision="int4", images=x)
    with pytest.raises(ConfigError, match="for which the model was quantised"):
        cofire.compile(quantize(model, x), (1, 16, 16))


def test_the_profile_says_why_a_layer_is_in_float32() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.fc(net.bend(net.second(torch.nn.functional.silu(net.first(x)))).mean((2, 3)) * 2)

    net = Net(forward, first=conv(1, 4), second=conv(4, 4), bend=torch.nn.ReLU(), fc=fc(4)).eval()
    x = images(8, DIGITS)
    profile = cofire.compile(quantize(net, x, keep=["second"])).profile(x, rounds=1)
    said = dict(zip(profile.names, zip(profile.precisions, profile.reasons, strict=True), strict=True))
    assert said["first"] == ("float32", "activation silu")
    assert said["second"] == ("float32", "as asked")
    assert said["fc"] == ("int8", "")
    plain = cofire.compile(net, DIGITS).profile(x, rounds=1)
    assert set(zip(plain.precisions, plain.reasons, strict=True)) == {("float32", "")}


# Files


def small_program() -> Program:
    """Of every kind that int8 has, with a residual."""
    maker = Int8Maker(Random(3), 3)
    x = maker.values(4, *maker.buffers[0])
    wanted = {"quantize", "dequantize", "residual", "gives bytes"}
    while not wanted <= kinds(program := quantized_program(maker.program(), [x], [])):
        maker = Int8Maker(maker.random, maker.random.randrange(1 << 30))
        x = maker.values(4, *maker.buffers[0])
    return program


def kinds(program: Program) -> set[str]:
    convs = [op for op in program.ops if isinstance(op, Conv8)]
    u8 = {quant.buffer for quant in program.quants}
    found = {kind_of(op) for op in program.ops}
    found |= {"residual"} if any(op.residual for op in convs) else set()
    return found | ({"gives bytes"} if any(op.dst in u8 for op in convs) else set())


def test_files_keep_every_bit(tmp_path: Path) -> None:
    program = small_program()
    again = from_bytes(to_bytes(program))
    assert to_bytes(again) == to_bytes(program)
    assert again.quants == program.quants
    for op, other in zip(program.ops, again.ops, strict=True):
        if isinstance(op, Conv8):
            assert isinstance(other, Conv8)
            assert (other.weight.dtype, other.bias.dtype) == (torch.int8, torch.int32)
            assert torch.equal(op.weight, other.weight)
            assert torch.equal(op.multiplier, other.multiplier)
    engine = Engine(program)
    loaded = cofire.load_program(engine.save(tmp_path / "a.cofire"))
    x = torch.randn(2, *engine.input_shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(engine(x), loaded(x))
    assert read(tmp_path / "a.cofire").quants == program.quants


Change = Callable[[dict[str, Any], dict[str, Any]], Any]


GOLDEN = Path(__file__).parent / "golden" / "int8"


@pytest.mark.parametrize("kernel", ["ref", *KERNELS])
def test_a_file_gives_what_it_gave(kernel: str) -> None:
    """On every machine: integers do not depend on it. ``golden()`` made the files."""
    stored = load_file(GOLDEN / "results.safetensors")
    engine = with_kernel(kernel, read(GOLDEN / "gated.cofire"), "")
    with engine.force({name.removeprefix("mask "): mask for name, mask in stored.items() if name.startswith("mask ")}):
        assert torch.equal(engine(stored["x"]), stored["out"])


def golden() -> None:
    """Write the files, after an intended change of the definition; the commit says why."""
    torch.manual_seed(0)
    x = images(4, DIGITS)
    program = quantize(tiny_gated().eval(), images(32, DIGITS, seed=5)).program
    masks = {group.name: extreme_masks(Random(0), len(x), group.filters) for group in program.groups}
    out = interpreter.trace(program, x, forced=masks).out
    GOLDEN.mkdir(parents=True, exist_ok=True)
    write(program, GOLDEN / "gated.cofire")
    stored = {"x": x, "out": out, **{f"mask {name}": mask for name, mask in masks.items()}}
    save_file(stored, GOLDEN / "results.safetensors")


def changed(
    content: bytes,
    change: Change,
    data: Callable[[bytes], bytes] | None = None,
) -> bytes:
    """The file with its table and its tensors' entries changed; the digest follows the data."""
    start = 8 + int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8:start]), content[start:]
    table = json.loads(header["__metadata__"]["cofire.program"])
    change(table, header)
    body = body if data is None else data(body)
    table["sha256"] = sha256(body).hexdigest()
    header["__metadata__"]["cofire.program"] = json.dumps(table)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def first(table: dict[str, Any], kind: str, residual: bool | None = None) -> dict[str, Any]:
    return next(op for op in table["ops"] if op["kind"] == kind and residual in (None, op["attrs"].get("residual")))


def set_attr(kind: str, residual: bool | None = None, **values: Any) -> Callable[..., None]:
    return lambda table, header: first(table, kind, residual)["attrs"].update(values)


def writes_bytes(table: dict[str, Any]) -> dict[str, Any]:
    bytes_ = {quant["buffer"] for quant in table["quants"]}
    return next(op for op in table["ops"] if op["kind"] == "conv8" and op["dst"] in bytes_)


REFUSED: dict[str, tuple[Change, str]] = {
    "no quants": (lambda t, h: t.pop("quants"), 'lacks the key "quants"'),
    "quants in an old file": (lambda t, h: t.update(version=2), 'unknown key "quants"'),
    "a scale of zero": (lambda t, h: t["quants"][0].update(scale=0), r"scale must be from 2\^-64 to 2\^64, got 0"),
    "a scale that is huge": (lambda t, h: t["quants"][0].update(scale=1e30), "scale must be from"),
    "a zero that is no byte": (lambda t, h: t["quants"][0].update(zero=256), "zero must be an integer from 0 to 255"),
    "a buffer twice": (lambda t, h: t["quants"].insert(0, t["quants"][0]), "buffer must be above the one before"),
    "a buffer that is not there": (lambda t, h: t["quants"][-1].update(buffer=999), "buffer must be an integer from 0"),
    "a quantised input": (
        lambda t, h: t["quants"].insert(0, {"buffer": 0, "scale": 1.0, "zero": 0}),
        r"src 0 must not be quantised|must have one scale and zero|input and output must not",
    ),
    "a conv that reads floats": (
        lambda t, h: t.update(quants=[q for q in t["quants"] if q["buffer"] != first(t, "conv8")["src"][0]]),
        "must be quantised|must have one scale",
    ),
    "low above high": (
        lambda t, h: writes_bytes(t)["attrs"].update(low=200, high=100),
        "low must be an integer from 0 to 100, got 200",
    ),
    "a clamp of floats": (
        lambda t, h: next(op for op in t["ops"] if op["dst"] == t["output"])["attrs"].update(low=1),
        "low must be an integer from 0 to 0, got 1|unknown key",
    ),
    "high that is no byte": (set_attr("conv8", high=256), "high must be an integer"),
    "a residual multiplier for nothing": (
        set_attr("conv8", False, residual_multiplier=1.0),
        "residual_multiplier must be 0 without a residual",
    ),
    "a residual of factor zero": (set_attr("conv8", True, residual_multiplier=0.0), "residual_multiplier must be from"),
    "weights as floats": (
        lambda t, h: h[first(t, "conv8")["weights"][2]].update(dtype="I32"),
        "must be of type F32",
    ),
    "an unknown type": (
        lambda t, h: h[first(t, "conv8")["weights"][1]].update(dtype="F64"),
        "one of F32 I8 I32",
    ),
    "an activation": (set_attr("conv8", act="relu"), 'unknown key "act"'),
    "quantize with attrs": (set_attr("quantize", scale=1.0), 'unknown key "scale"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    change, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        from_bytes(changed(to_bytes(small_program()), change))


def at(content: bytes, which: int) -> int:
    """Where the ``which``-th tensor of the first conv begins in the data."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    table = json.loads(header["__metadata__"]["cofire.program"])
    return int(header[first(table, "conv8")["weights"][which]]["data_offsets"][0])


def test_sums_that_may_leave_int32_and_odd_multipliers_are_refused() -> None:
    content = to_bytes(small_program())

    def with_four_bytes(which: int, four: bytes) -> bytes:
        begin = at(content, which)
        return changed(content, lambda t, h: None, lambda body: body[:begin] + four + body[begin + 4 :])

    with pytest.raises(ConfigError, match="sums of filter 0 must stay within int32"):
        from_bytes(with_four_bytes(1, (2**31 - 1).to_bytes(4, "little")))
    with pytest.raises(ConfigError, match=r"multipliers must be from 2\^-64 to 2\^64"):
        from_bytes(with_four_bytes(2, bytes(4)))


def test_tensors_of_four_bytes_begin_at_a_multiple_of_four() -> None:
    content = to_bytes(small_program())

    def shift(table: dict[str, Any], header: dict[str, Any]) -> None:
        for name, entry in header.items():
            if name != "__metadata__":
                entry["data_offsets"] = [place + 1 for place in entry["data_offsets"]]

    with pytest.raises(ConfigError, match="must begin at a multiple of 4"):
        from_bytes(changed(content, shift, lambda body: b"\0" + body))

"""Odd requests to the engine: images that do not fit, any layout, threads, numbers at the end of the scale."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lowered import gated_as
from nets import images, random_masks
from small import tiny_gated, tiny_plain
from test_engine import DIGITS
from torch import Tensor

from cofire import FTWT, ConfigError, DataError
from cofire.errors import CompileError
from cofire.runtime import interpreter
from cofire.runtime.engine import Engine, compile
from cofire.runtime.lowering import lower
from cofire.runtime.program import Act, Activation, Pool, Program

NAN = float("nan")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return compile(gated_as(tiny_plain(), DIGITS, FTWT(always=True)))


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(1, 8, 8),
        torch.zeros(2, 3, 8, 8),
        torch.zeros(2, 1, 8, 9),
        torch.zeros(2, 1, 8, 8, 1),
        torch.zeros(()),
        np.zeros((2, 1, 9, 8), np.float32),
        torch.zeros(2, 1, 8, 8, dtype=torch.float64),
        torch.zeros(2, 1, 8, 8, dtype=torch.bfloat16),
        torch.zeros(2, 1, 8, 8, dtype=torch.uint8),
        np.zeros((2, 1, 8, 8)),
        np.zeros((2, 1, 8, 8), ">f4"),
        torch.zeros(2, 1, 8, 8, device="meta"),
        [[[[0.0] * 8] * 8]],
        None,
    ],
    ids=lambda wrong: f"{type(wrong).__name__} {getattr(wrong, 'dtype', '')} {tuple(getattr(wrong, 'shape', ()))}",
)
def test_images_that_do_not_fit_are_refused(engine: Engine, wrong: Any) -> None:
    for call in (engine, engine.logits, engine.profile):
        with pytest.raises(DataError, match="images must"):
            call(wrong)


def test_images_in_any_layout_give_the_same(engine: Engine) -> None:
    x = images(4, DIGITS)
    wanted = engine(x)
    spread = torch.zeros(8, 1, 16, 24)[::2, :, ::2, ::3].copy_(x)
    turned = x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    for same in (spread, turned, x.to(memory_format=torch.channels_last), x.clone().requires_grad_(), x.numpy()):
        found = engine(same)
        assert isinstance(found, Tensor) == isinstance(same, Tensor)
        assert torch.equal(torch.as_tensor(found), wanted)
    readonly = x.numpy().copy()
    readonly.flags.writeable = False
    assert np.array_equal(engine(readonly), wanted)
    assert np.array_equal(engine(x.numpy()[:, :, ::-1, ::-1]), engine(x.flip(2, 3)))


def test_an_empty_batch_is_no_error(engine: Engine) -> None:
    assert engine(torch.zeros(0, *DIGITS)).shape == (0, 10)
    assert [mask.shape for mask in engine.last_masks.values()] == [
        (0, group.filters) for group in engine.program.groups
    ]
    assert all(macs.shape == (0,) for macs in engine.last_macs.values())
    assert all(len(logits) == 0 for logits in engine.logits(torch.zeros(0, *DIGITS)).values())
    assert engine(images(2, DIGITS)).shape == (2, 10)


def test_any_number_of_threads_gives_the_same_bits(engine: Engine) -> None:
    for batch in (1, 2, 5):
        x = images(batch, DIGITS)
        wanted = engine(x)
        masks, macs = engine.last_masks, engine.last_macs
        for threads in (2, 3, 64, 10**6):
            assert torch.equal(engine(x, threads), wanted)
            assert all(np.array_equal(engine.last_masks[name], mask) for name, mask in masks.items())
            assert all(np.array_equal(engine.last_macs[name], count) for name, count in macs.items())
    for threads in (0, -1):
        with pytest.raises(ConfigError, match="threads must be at least 1"):
            engine(x, threads)


def test_before_the_first_call_there_is_no_last_one() -> None:
    fresh = compile(tiny_gated())
    for what in ("last_masks", "last_macs"):
        with pytest.raises(ConfigError, match="needs a call first"):
            getattr(fresh, what)


def test_a_profile_names_every_op_and_its_macs(engine: Engine) -> None:
    profile = engine.profile(images(2, DIGITS), rounds=2)
    assert profile.names == [op.name for op in engine.program.ops]
    assert profile.algorithms == engine.tuning.split()
    assert min(profile.milliseconds) >= 0
    assert sum(profile.macs) == pytest.approx(
        sum(macs.mean() for macs in engine.last_macs.values()), abs=len(profile.macs)
    )
    assert all(name in str(profile) for name in profile.names)


@torch.no_grad()
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_one_bad_image_spoils_no_other(value: float) -> None:
    model, x = tiny_plain().eval(), images(3, DIGITS)
    engine = compile(model)
    wanted = engine(x)
    x[1, 0, 3, 4] = value
    for threads in (1, 2):
        found = engine(x, threads)
        assert not found[1].isfinite().any()
        assert not model(x)[1].isfinite().any()
        assert torch.equal(found[::2], wanted[::2])
        assert torch.equal(engine(x[:1], threads), wanted[:1])


def pooled(**own: Any) -> Program:
    window = {"kernel": (3, 2), "stride": (2, 1), "dilation": (1, 1), "padding": (1, 1, 1, 1), "include_pad": True}
    op = Pool(**{"name": "pool", "src": (0,), "dst": 1, "gate": None, "adaptive": False, **window, **own})
    sides = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip((7, 9), op.padding, op.dilation, op.kernel, op.stride, strict=False)
    ]
    shape = (1, 1, 1) if op.adaptive else (1, sides[0], sides[1])
    return Program(
        input=0, output=1, output_shape=shape, buffers=((1, 7, 9), shape), groups=(), threshold=0.0, ops=(op,)
    )


@pytest.mark.parametrize("how", ["dense", "dilated", "adaptive"])
@pytest.mark.parametrize("kind", ["max", "avg"])
def test_pooling_keeps_what_is_not_a_number(kind: str, how: str) -> None:
    own: dict[str, Any] = {"dilated": {"dilation": (2, 2)}, "dense": {}}.get(how) or {}
    if how == "adaptive":
        own = {"kernel": (1, 1), "stride": (1, 1), "padding": (0, 0, 0, 0), "adaptive": True}
    engine = Engine(pooled(op=kind, **own))
    x = images(63, (1, 7, 9))
    x.view(63, 63).fill_diagonal_(NAN)
    wanted = interpreter.run(engine.program, x)[0]
    assert torch.equal(engine(x).isnan(), wanted.isnan())
    assert torch.allclose(engine(x), wanted, atol=1e-6, equal_nan=True)


SLOPED = ("leaky", "elu", "hardtanh")


@pytest.mark.parametrize("act", get_args(Act))
def test_activations_of_numbers_at_the_end_of_the_scale(act: Act) -> None:
    """Infinite, huge, tiny and not a number; tiny ones may count as zero."""
    op = Activation(name="act", src=(0,), dst=1, gate=None, act=act, slope=0.5 if act in SLOPED else 0.0)
    shape = (1, 3, 11)
    program = Program(
        input=0, output=1, output_shape=shape, buffers=(shape, shape), groups=(), threshold=0.0, ops=(op,)
    )
    functions: dict[Act, Callable[[Tensor], Tensor]] = {
        "none": lambda x: x, "relu": F.relu, "relu6": F.relu6, "leaky": lambda x: F.leaky_relu(x, 0.5), "silu": F.silu,
        "hardswish": F.hardswish, "sigmoid": torch.sigmoid, "hardsigmoid": F.hardsigmoid,
        "gelu": lambda x: F.gelu(x.double()).float(),  # in float32 PyTorch makes NaN of infinity
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "elu": lambda x: F.elu(x, 0.5), "tanh": torch.tanh,
        "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.5), "mish": F.mish, "softplus": F.softplus,
    }  # fmt: skip
    inf = float("inf")
    ends = [NAN, inf, -inf, 3e38, -3e38, 1e30, -1e30, 100.0, -100.0, 88.8, -88.8, 6.0, 3.0, -3.0, 1e-39, -0.0, 0.0]
    x = torch.tensor(ends + [1.5] * (33 - len(ends))).view(1, *shape)
    wanted = functions[act](x)
    assert torch.allclose(Engine(program)(x), wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_the_callers_floating_point_mode_stays() -> None:
    def halves() -> list[float]:
        return (torch.full((8,), 1e-39) * 0.5).tolist()

    engine = compile(tiny_plain().eval())
    before = halves()
    assert before[0] > 0
    for threads in (1, 2):
        for batch in (1, 4):
            assert engine(torch.full((batch, *DIGITS), 1e-39), threads).isfinite().all()
            assert halves() == before


class Answer(NamedTuple):
    output: Tensor
    masks: dict[str, Any]
    macs: dict[str, Any]


def asked(engine: Engine, x: Tensor, forced: Mapping[str, Any], threads: int) -> Answer:
    with engine.force(forced):
        return Answer(engine(x, threads), engine.last_masks, engine.last_macs)


def same(one: Answer, other: Answer) -> bool:
    pairs = [(one.masks[name], other.masks[name]) for name in one.masks]
    pairs += [(one.macs[name], other.macs[name]) for name in one.macs]
    return torch.equal(one.output, other.output) and all(np.array_equal(*pair) for pair in pairs)


def test_threads_of_one_engine_do_not_meet(engine: Engine) -> None:
    """Each has images, batch sizes and forced masks of its own, and finds its own answer again and again."""
    model = tiny_gated(always=True)
    requests = [
        (
            images(1 + number % 3, DIGITS, seed=number),
            random_masks(model, 1, seed=number) if number % 2 else {},
            1 + number % 2,
        )
        for number in range(6)
    ]
    wanted = [asked(engine, *request) for request in requests]
    right = [0] * len(requests)

    def ask(number: int) -> None:
        for _ in range(30):
            right[number] += same(asked(engine, *requests[number]), wanted[number])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [30] * len(requests)


def test_answers_are_the_same_every_time(engine: Engine) -> None:
    x = images(3, DIGITS)
    first = asked(engine, x, {}, 2)
    for _ in range(5):
        engine(images(2, DIGITS, seed=9))
        assert same(asked(engine, x, {}, 2), first)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell a process's memory")
def test_memory_does_not_grow(engine: Engine) -> None:
    def megabytes() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    batches = [(images(1, DIGITS), 1), (images(1, DIGITS), 2), (images(8, DIGITS), 2)]

    def call(times: int) -> None:
        for _ in range(times):
            for x, threads in batches:
                engine(x, threads)

    call(20)
    before = megabytes()
    call(200)
    assert megabytes() - before < 1


# What is not there


def test_without_the_extension_compile_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("cofire.runtime._native", raising=False)
    monkeypatch.setitem(sys.modules, "cofire.runtime._native", None)
    with pytest.raises(CompileError, match=r"not built: install a C\+\+ compiler"):
        compile(tiny_plain())


def test_a_kernel_set_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COFIRE_KERNEL", "v99")
    with pytest.raises(CompileError, match="no kernel set 'v99'"):
        compile(tiny_plain())


def test_a_tuning_that_does_not_fit_is_refused(engine: Engine) -> None:
    for tuning in ("ref", engine.tuning + " ref", engine.tuning.replace("-", "ref"), "dot " * len(engine.program.ops)):
        with pytest.raises(CompileError, match="tuning"):
            Engine(engine.program, tuning=tuning)
    relaxed = replace(engine.program, threshold=1.0)
    assert Engine(relaxed, tuning=engine.tuning).tuning == engine.tuning
    assert lower(tiny_plain()).threshold == 0.0

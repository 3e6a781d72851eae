"""The bench: figures by hand, fair order, the right cost, and engines that must be right before they are timed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from nets import images, random_masks
from small import tiny_gated
from torch import Tensor, nn
from typer.testing import CliRunner

from cofire import FTWT, FileError, GatedModel, create_backbone, gate
from cofire.bench import COMPILED, PEERS, Peer, Plan, Result, bench, bench_program, bench_runs, own_plan, random_plan
from cofire.bench import command as bench_command
from cofire.bench.masks import pool_for_keep, pool_for_macs
from cofire.bench.ours import NAME, compile_engine, load_program
from cofire.bench.paper import paper_latency, paper_rows, paper_table
from cofire.bench.peers import eager
from cofire.bench.portable import pooled_slices
from cofire.bench.report import plot, table
from cofire.bench.rounds import Contestant, interleaved, pinned, ratio_by_round, ratio_of_medians, rotated, spread
from cofire.bench.run import LARGEST_ERROR, SLICED
from cofire.bench.sliced import Sliced
from cofire.errors import ConfigError, DataError
from cofire.export import folded
from cofire.gates.base import LinearHead
from cofire.runtime import native_features
from cofire.text import rendered


class StubEngine:
    """PyTorch behind the interface of our engine; remembers whether heads were asked for."""

    def __init__(self, model: nn.Module, input_shape: tuple[int, int, int]) -> None:
        self.model, self.input_shape = model.eval(), input_shape
        self.heads: list[bool] = []
        self.last_macs: dict[str, Any] = {}
        self.last_masks: dict[str, Any] = {}

    @torch.no_grad()
    def __call__(self, x: Any, threads: int = 1) -> Any:
        logits = self.model(torch.as_tensor(x))
        if isinstance(self.model, GatedModel):
            self.last_macs = {name: macs.numpy() for name, macs in self.model.cost().executed.items()}
            self.last_masks = {group: mask.numpy() for group, mask in self.model.masks.items()}
        return logits

    @contextmanager
    def force(self, masks: Mapping[str, Any], *, heads: bool = False) -> Iterator[None]:
        assert isinstance(self.model, GatedModel)
        self.heads.append(heads)
        with self.model.force({group: torch.as_tensor(mask) for group, mask in masks.items()}):
            yield


def small_bench(plan: Plan | None = None, peers: tuple[Peer, ...] = PEERS[:1], **options: Any) -> Result:
    plan = plan or random_plan("resnet8_digits", macs=[0.5, 0.7])
    options = {"rounds": 3, "warm_up": 1, "precisions": ["float32"], "compile": StubEngine, "text": "", **options}
    return bench(plan, peers=peers, **options)


# Rounds and figures


def test_a_round_begins_one_contestant_later_than_the_one_before() -> None:
    calls: list[str] = []
    contestants = {name: Contestant(lambda name=name: calls.append(name)) for name in "abc"}
    interleaved(contestants, rounds=3, warm_up=1)
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"


def test_rotation_goes_around() -> None:
    assert rotated("abc", 4) == ["b", "c", "a"]
    assert rotated([], 4) == []


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux pins processes to cores")
def test_a_pinned_process_stays_on_one_core_and_is_let_go() -> None:
    before = os.sched_getaffinity(0)
    with pinned(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_only_the_call_is_timed_and_warm_up_is_not_kept() -> None:
    ticks = iter(range(0, 100_000, 5))
    entered: list[int] = []

    def setting(n: int) -> nullcontext[None]:
        entered.append(n)
        next(ticks)  # time that passes before the call
        return nullcontext()

    seconds = interleaved({"a": Contestant(lambda: None, setting)}, 2, 3, clock=lambda: next(ticks))
    assert seconds == {"a": [5e-9, 5e-9]}
    assert entered == [0, 1, 2, 3, 4]


def test_rounds_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="rounds must be at least 1, got 0"):
        interleaved({}, 0, 0)


def test_medians_and_tenths_by_hand() -> None:
    found = spread([float(value) for value in range(11)])
    assert (found.median, found.p10, found.p90) == (5.0, 1.0, 9.0)
    assert vars(spread([3.0])) == {"median": 3.0, "p10": 3.0, "p90": 3.0}


def test_ratios_by_hand() -> None:
    ours, theirs = [1.0, 2.0, 9.0], [4.0, 4.0, 3.0]
    assert ratio_of_medians(ours, theirs) == 0.5
    assert ratio_by_round(ours, theirs).median == 0.5
    assert ratio_by_round(ours, theirs).p90 == pytest.approx(0.5 + 0.8 * 2.5)


# Masks


@pytest.mark.parametrize("name", ["resnet20", "vgg16_bn", "mobilenet_v1"])
def test_macs_are_met_within_half_a_point(name: str) -> None:
    gated = gate(create_backbone(name), FTWT())
    for macs in (0.25, 0.48, 0.74, 1.0):
        pool = pool_for_macs(gated, macs)
        assert abs(pool.macs - macs) < 0.005
        remaining = 1 - gated.cost(pool.masks).reduction("executed").mean()
        assert pool.macs == pytest.approx(float(remaining))


def test_masks_keep_the_same_number_of_filters_in_every_set_and_differ() -> None:
    gated = tiny_gated()
    pool = pool_for_keep(gated, 0.6, sets=5)
    for group, mask in pool.masks.items():
        kept = mask.sum(1)
        assert kept.unique().numel() == 1
        assert abs(int(kept[0]) - 0.6 * mask.shape[1]) <= 1, group
    assert len({tuple(mask[n].tolist()) for n in range(5) for mask in [pool.masks["layer3.0.conv1"]]}) > 1
    assert pool.number(7).keys() == pool.masks.keys()
    assert torch.equal(pool.number(7)["conv1"][0], pool.masks["conv1"][2])


def test_at_least_one_filter_is_kept() -> None:
    assert all(bool((mask.sum(1) == 1).all()) for mask in pool_for_keep(tiny_gated(), 1e-6).masks.values())


def test_masks_are_a_function_of_the_seed() -> None:
    one, same, other = (pool_for_keep(tiny_gated(), 0.5, seed=seed).masks["conv1"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_cost_that_cannot_be_reached_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"macs must be at least 0\.\d+, the share with one filter left.*got 0.0001"):
        pool_for_macs(tiny_gated(), 0.0001)
    with pytest.raises(ConfigError, match=r"macs, the share that REMAINS, must be in \(0, 1\], got 1.5"):
        pool_for_macs(tiny_gated(), 1.5)
    with pytest.raises(ConfigError, match=r"keep must be in \(0, 1\], got 0"):
        pool_for_keep(tiny_gated(), 0.0)


# The paper's way


@torch.no_grad()
@pytest.mark.parametrize("name", ["vgg11_bn", "mobilenet_v2", "resnet8_digits"])
@pytest.mark.parametrize("options", [{}, {"pool": "avg", "depthwise": "separate"}])
def test_sliced_weights_give_the_logits_of_the_gated_model(name: str, options: Any) -> None:
    plan = random_plan(name)
    gated = gate(plan.gated.backbone, FTWT(**options)).eval()
    sliced, x = Sliced(gated), images(1, gated.graph.input_shape)
    for seed in range(2):
        masks = random_masks(gated, 1, keep=0.4, seed=seed)
        with gated.force(masks), sliced.force(masks):
            torch.testing.assert_close(sliced(x), gated(x), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(sliced(x), gated(x), rtol=1e-3, atol=1e-4)  # gates decide


@torch.no_grad()
def test_sliced_weights_of_filters_that_are_off_do_not_matter() -> None:
    plain = create_backbone("resnet8_digits").eval()
    gated = gate(plain, FTWT()).eval()
    masks = random_masks(gated, 1)
    sliced = Sliced(gated)
    expected = Sliced(gated)
    with torch.no_grad():
        weight = dict(sliced._run.named_parameters())["layer1.0.conv1.weight"]
        weight[~masks["layer1.0.conv1"][0]] = float("nan")
    with sliced.force(masks), expected.force(masks):
        assert torch.equal(sliced(images(1, (1, 8, 8))), expected(images(1, (1, 8, 8))))


def test_heads_run_also_where_masks_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = tiny_gated().eval()
    sliced = Sliced(gated)
    asked: list[str] = []
    groups = {id(head): group for group, head in sliced._heads.items()}
    chosen = LinearHead.chosen

    def asking(head: LinearHead, *given: Any) -> Tensor:
        asked.append(groups[id(head)])
        return chosen(head, *given)

    monkeypatch.setattr(LinearHead, "chosen", asking)
    with sliced.force(random_masks(gated, 1)):
        sliced(images(1, (1, 8, 8)))
    assert asked == list(gated.gates)


def test_slicing_takes_one_image_and_masks_before_the_addition() -> None:
    with pytest.raises(ConfigError, match="one image at a time, got a batch of 2"):
        Sliced(tiny_gated())(images(2, (1, 8, 8)))
    with pytest.raises(ConfigError, match=r"unit 'layer1.0.conv2': .* mask behind an addition"):
        Sliced(tiny_gated(site="post_add"))


# Engines


@pytest.mark.parametrize(
    ("peer", "name"),
    [(peer, "resnet8_digits") for peer in PEERS]
    + [(peer, "mobilenet_v2") for peer in PEERS if peer.precision == "float32"],
    ids=lambda value: value if isinstance(value, str) else f"{value.name}, {value.precision}",
)
def test_an_installed_peer_passes_the_check(peer: Peer, name: str) -> None:
    if peer.missing:
        pytest.skip(f"not installed: {' '.join(peer.missing)}")
    result = small_bench(random_plan(name), peers=(peer,), precisions=[peer.precision])
    assert result.left_out == {}
    timed = result.of(peer.name, None, peer.precision)
    assert timed is not None
    assert timed.version
    assert timed.error < LARGEST_ERROR[peer.precision]
    assert peer.precision == "float32" or timed.error > 1e-3  # or nothing was rounded
    assert timed.agreement == 1.0
    assert len(timed.seconds) == 3


@pytest.mark.slow
def test_compiled_pytorch_passes_the_check() -> None:
    result = small_bench(random_plan("resnet8_digits"), peers=(COMPILED,))
    assert result.of(COMPILED.name, None) is not None or COMPILED.name in result.left_out


def test_what_is_not_installed_is_named() -> None:
    absent = Peer("Fast Engine", ("no-such-package", "torch"), eager)
    result = small_bench(peers=(*PEERS[:1], absent))
    assert result.left_out == {"Fast Engine": "not installed: no-such-package; pip install 'cofire[peers]'"}
    assert "left out: Fast Engine: not installed" in rendered(table(result))
    assert result.to_json()["left_out"] == result.left_out


def test_wrong_logits_are_refused() -> None:
    def scaled(model: nn.Module, x: Any, threads: int) -> Any:
        right = eager(model, x, threads)
        return lambda x: 1.01 * right(x)

    def stuck(model: nn.Module, x: Any, threads: int) -> Any:  # right for one input only
        logits = eager(model, x, threads)(x)
        return lambda x: logits

    def nothing(model: nn.Module, x: Any, threads: int) -> Any:
        return lambda x: np.full((1, 10), np.nan, dtype=np.float32)

    def half(model: nn.Module, x: Any, threads: int) -> Any:  # right for the first input, then nothing
        right = eager(model, x, threads)
        return lambda other: right(other) if np.array_equal(other, x) else np.full((1, 10), np.nan, dtype=np.float32)

    def flat(model: nn.Module, x: Any, threads: int) -> Any:
        return lambda x: np.zeros(10, dtype=np.float32)

    peers = [Peer(build.__name__, ("torch",), build) for build in (scaled, stuck, nothing, half, flat)]
    result = small_bench(peers=(*PEERS[:1], *peers))
    for name in ("scaled", "stuck", "nothing", "half"):
        text = r"refused: its logits must be within 0\.001 standard deviations of PyTorch's, got"
        assert re.match(text, result.left_out[name]), name
    assert result.left_out["flat"] == "refused: its logits must have shape (1, 10), got (10,)"
    assert {timed.engine for timed in result.timed} == {"PyTorch", NAME, SLICED}


def test_a_peer_that_fails_does_not_stop_the_bench() -> None:
    def broken(model: nn.Module, x: Any, threads: int) -> Any:
        raise MemoryError("no room\nsecond line")

    result = small_bench(peers=(Peer("Broken", ("torch",), broken), *PEERS[:1]))
    assert result.left_out == {"Broken": "MemoryError: no room"}
    assert result.to_json()["fastest_dense"] == "PyTorch"


def test_without_our_engine_the_others_are_timed() -> None:
    def no_engine(model: nn.Module, shape: tuple[int, int, int]) -> Any:
        raise ConfigError("no compiler was found")

    result = small_bench(compile=no_engine)
    assert result.left_out == {NAME: "no compiler was found"}
    assert result.to_json()["ratio_to_fastest_dense"] is None
    assert {timed.engine for timed in result.timed} == {"PyTorch", SLICED}


def test_a_wrong_gated_engine_is_refused_and_its_dense_form_stays() -> None:
    class Forgetful(StubEngine):
        @contextmanager
        def force(self, masks: Any, *, heads: bool = False) -> Iterator[None]:
            yield

    result = small_bench(compile=Forgetful)
    assert result.left_out[f"{NAME}, gated"].startswith("refused: its logits must be within")
    assert [timed.point for timed in result.timed if timed.engine == NAME] == [None]


def test_our_heads_run_under_forced_masks() -> None:
    built: list[StubEngine] = []

    def compile(model: nn.Module, shape: tuple[int, int, int]) -> StubEngine:
        built.append(StubEngine(model, shape))
        return built[-1]

    small_bench(compile=compile)
    heads = [engine.heads for engine in built if engine.heads]
    assert len(heads) == 1
    assert all(heads[0])


def test_several_runs_share_what_was_built() -> None:
    built: list[int] = []

    def counting(model: nn.Module, x: Any, threads: int) -> Any:
        built.append(threads)
        return eager(model, x, threads)

    plan = random_plan("resnet8_digits")
    found = bench_runs(plan, 3, 1, 2, 0, [Peer("A", ("torch",), counting)], ["float32"], StubEngine, "")
    assert len(built) == 1
    assert len({tuple(result.timed[0].seconds) for result in found}) == 3


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def counting(model: nn.Module, x: Any, threads: int) -> Any:
        seen.extend((threads, torch.get_num_threads()))
        return eager(model, x, threads)

    small_bench(peers=(Peer("Counting", ("torch",), counting),), threads=before + 1)
    assert seen == [before + 1, before + 1]
    assert torch.get_num_threads() == before
    with pytest.raises(ConfigError, match="threads must be at least 1, got 0"):
        small_bench(threads=0)


def test_a_strided_slice_becomes_a_pooling_with_the_same_values() -> None:
    model = create_backbone("resnet8_digits").eval()
    found = pooled_slices(folded(model))
    assert "::" not in found.code
    assert "max_pool2d" in found.code
    x = images(2, (1, 8, 8))
    with torch.no_grad():
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)


# Int8


def rounding(model: nn.Module, x: Any, threads: int) -> Any:
    """A peer in int8 that is roughly right; the more images it was calibrated on, the better."""
    right = eager(model, x, threads)
    return lambda image: right(image) * np.float32(1 + 0.1 / len(x))


@pytest.mark.skipif(native_features() is None, reason="the native engine was not built")
def test_int8_stands_beside_float32_and_each_is_held_against_the_fastest_of_its_own() -> None:
    plan = random_plan("resnet8_digits", macs=[0.5])
    slow = Peer("Slow", ("torch",), eager)
    peers = (slow, Peer("Rough", ("torch",), rounding, "int8"))
    result = small_bench(plan, peers=peers, compile=compile_engine, precisions=["float32", "int8"])
    assert result.left_out == {}
    who = [(timed.engine, timed.precision, timed.point) for timed in result.timed]
    assert who == [
        *(("Slow", "float32", None), ("Rough", "int8", None), (NAME, "float32", None), (NAME, "float32", 0)),
        *((NAME, "int8", None), (NAME, "int8", 0)),
    ]
    found = json.loads(json.dumps(result.to_json()))
    assert (found["fastest_dense"], found["fastest_dense_int8"]) == ("Slow", "Rough")
    ours, rough = result.of(NAME, 0, "int8"), result.of("Rough", None, "int8")
    assert ours is not None
    assert rough is not None
    expected = ratio_of_medians(ours.seconds, rough.seconds)
    assert found["ratio_to_fastest_dense_int8"] == found["points"][0]["ratio_to_fastest_dense_int8"] == expected
    assert [engine["precision"] for engine in found["engines"]] == [precision for _, precision, _ in who]
    assert found["engines"][5]["ratio_to_fastest_dense_int8"] == expected
    assert found["engines"][5]["ratio_to_fastest_dense"] == result.ratio(ours)
    assert ours.error == 0  # it was held against its simulation under the same masks
    assert rendered(table(result)).count(" int8 ") == 4  # three rows, and the column of ratios


def test_all_engines_in_int8_see_the_same_images() -> None:
    plan = random_plan("resnet8_digits")
    seen: list[Any] = []

    def seeing(model: nn.Module, x: Any, threads: int) -> Any:
        seen.append(x)
        return eager(model, x, threads)

    peers = (Peer("A", ("torch",), seeing), Peer("B", ("torch",), seeing, "int8"))
    small_bench(plan, peers=peers, precisions=["float32", "int8"])
    assert [len(x) for x in seen] == [1, len(plan.images)]
    other = own_plan("x", tiny_gated(), images(2, (1, 8, 8)), "two", calibration=images(5, (1, 8, 8)))
    small_bench(other, peers=peers[1:], precisions=["int8"])
    assert np.array_equal(seen[-1], images(5, (1, 8, 8)).numpy())


def test_an_engine_in_int8_may_be_roughly_right_and_no_more() -> None:
    def far_off(model: nn.Module, x: Any, threads: int) -> Any:
        right = eager(model, x, threads)
        return lambda image: right(image)[:, ::-1]

    peers = (Peer("Rough", ("torch",), rounding, "int8"), Peer("Far", ("torch",), far_off, "int8"))
    result = small_bench(random_plan("resnet8_digits"), peers=peers, precisions=["int8"])
    assert list(result.left_out) == ["Far, int8"]
    assert result.left_out["Far, int8"].startswith("refused: its logits must be within 1 standard deviations")


def test_accuracy_and_agreement_by_hand() -> None:
    gated = tiny_gated().eval()
    x = images(4, (1, 8, 8))
    with torch.no_grad():
        said = gated.backbone(x).argmax(1)
        gates_say = gated(x).argmax(1)
    labels = torch.cat([said[:3], (said[3:] + 1) % 10])
    result = small_bench(own_plan("digits", gated, x, "four images", labels=labels))
    dense, ours = result.of("PyTorch", None), result.of(NAME, 0)
    assert dense is not None
    assert ours is not None
    assert (dense.agreement, dense.accuracy) == (1.0, 0.75)
    assert ours.agreement == float((gates_say == said).double().mean())
    assert ours.accuracy == float((gates_say == labels).double().mean())
    assert "75.0 %" in rendered(table(result))


# Results


def test_the_json_has_what_is_promised(tmp_path: Path) -> None:
    result = small_bench()
    found = json.loads(json.dumps(result.to_json()))
    assert found["network"] == "resnet8_digits"
    assert found["input_shape"] == [1, 8, 8]
    assert (found["threads"], found["rounds"], found["batch"]) == (1, 3, 1)
    assert found["executed_macs_reduction"] == pytest.approx(0.5, abs=0.01)
    assert found["fastest_dense"] == "PyTorch"
    ours, dense = (result.of(*key) for key in ((NAME, 0), ("PyTorch", None)))
    assert ours is not None
    assert dense is not None
    assert found["ratio_to_fastest_dense"] == ratio_of_medians(ours.seconds, dense.seconds)
    assert [point["asked"] for point in found["points"]] == [0.5, 0.7]
    assert [(e["engine"], e["point"]) for e in found["engines"]] == [
        *(("PyTorch", None), (NAME, None)),
        *((NAME, 0), (NAME, 1), (SLICED, 0), (SLICED, 1)),
    ]
    for engine in found["engines"]:
        assert len(engine["seconds"]) == 3
        assert set(engine["milliseconds"]) == set(engine["ratio_by_round"]) == {"median", "p10", "p90"}
        assert engine["dense"] == (engine["executed_macs_reduction"] == 0.0)
    assert "conv1" in found["gated"]


def test_our_own_dense_engine_is_not_the_measure() -> None:
    result = small_bench(random_plan("resnet8_digits"))
    assert [timed.engine for timed in result.timed] == ["PyTorch", NAME]
    assert result.to_json()["fastest_dense"] == "PyTorch"
    assert result.to_json()["ratio_to_fastest_dense"] == result.ratio(result.of(NAME, None))


def test_keep_rates_are_points_too() -> None:
    plan = random_plan("resnet8_digits", macs=[0.6], keep=[0.5])
    assert [point.keep for point in small_bench(plan).points][1] == 0.5
    assert plan.asked == (0.6, None)


def test_a_plan_is_a_function_of_its_seed_and_leaves_the_random_state_alone() -> None:
    state = torch.random.get_rng_state()
    one, same, other = (random_plan("resnet8_digits", macs=[0.5], seed=seed) for seed in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    assert np.array_equal(one.images, same.images)
    assert not np.array_equal(one.images, other.images)
    for key, value in one.gated.state_dict().items():
        assert torch.equal(value, same.gated.state_dict()[key])


def test_a_trained_model_is_timed_with_its_own_gates() -> None:
    gated = tiny_gated().eval()
    x = images(5, (1, 8, 8))
    result = small_bench(own_plan("digits", gated, x, "five images"), rounds=5)
    with torch.no_grad():
        gated(x)
    expected = float(gated.cost().reduction("executed").mean())
    assert result.points[0].executed_macs_reduction == pytest.approx(expected)
    assert result.masks == "the gates' own"
    assert result.of(NAME, 0) is not None
    assert result.of(SLICED, 0) is not None


def test_a_program_alone_is_timed_with_its_gates_and_with_all_open() -> None:
    gated = tiny_gated().eval()
    x = images(4, (1, 8, 8))
    result = bench_program("x.cofire", StubEngine(gated, (1, 8, 8)), x.numpy(), "random", rounds=6, warm_up=0)
    with torch.no_grad():
        gated(x)
    assert result.reduction == pytest.approx(float(gated.cost().reduction("executed").mean()))
    found = json.loads(json.dumps(result.to_json()))
    assert found["dense_macs"] == gated.cost().dense_total
    assert found["rounds"] == 6
    assert "x.cofire" in rendered(result.__rich__())


def test_the_paper_table_sets_its_figures_beside_ours() -> None:
    plan = random_plan("resnet8_digits", macs=[1 - row.macs for row in paper_latency()])
    result = small_bench(plan)
    rows = paper_rows(result)
    assert [row["paper"]["latency_reduction"] for row in rows] == [0.2717, 0.1978, 0.1108]
    assert rows[0]["executed_macs_reduction"] == pytest.approx(0.5218, abs=0.01)
    assert "27.2" in paper_table(result.network, rows).to_markdown()


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is needed (extra peers)")
    plot(small_bench(), tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


# The command line


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
        (("no/such/folder",), FileError, "does not exist"),
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


@pytest.mark.skipif(native_features() is None, reason="the native engine was not built")
def test_our_own_engine_passes_the_check(tmp_path: Path) -> None:
    plan = random_plan("resnet8_digits", macs=[0.5])
    result = small_bench(plan, compile=compile_engine)
    assert result.left_out == {}
    assert [timed.point for timed in result.timed if timed.engine == NAME] == [None, 0]
    engine = load_program(compile_engine(plan.gated, (1, 8, 8)).save(tmp_path / "x.cofire"))
    found = bench_program("x.cofire", engine, plan.images, "random", rounds=2, warm_up=0)
    assert found.dense_macs == plan.gated.cost({}).dense_total

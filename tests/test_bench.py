"""The bench: engines that must be right before they are timed, and what it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benched import StubEngine, small_bench
from nets import images
from small import tiny_gated, tiny_plain
from torch import nn

from cofire import SecondLook, compile, create_backbone, gate
from cofire.bench import COMPILED, PEERS, Peer, bench_program, bench_runs, own_plan, random_plan
from cofire.bench.ours import NAME
from cofire.bench.paper import paper_latency, paper_rows, paper_table
from cofire.bench.peers import eager
from cofire.bench.portable import pooled_slices
from cofire.bench.report import plot, table
from cofire.bench.rounds import ratio_of_medians
from cofire.bench.run import LARGEST_ERROR, SLICED
from cofire.errors import ConfigError
from cofire.export import folded
from cofire.text import rendered

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


def test_a_model_that_rests_as_a_whole_is_timed_by_the_mean_over_images() -> None:
    """The network runs for one image in five: a median would not see it."""
    gated = gate(tiny_plain(), SecondLook()).eval()
    x = images(5, (1, 8, 8))
    with torch.no_grad():
        gated.threshold = float(gated.gates.first(x)[0].sort(0).values[-2])
    plan = own_plan("digits", gated, x, "five images")
    result = small_bench(plan, rounds=5, warm_up=0, compile=compile)
    point, ours, dense = result.points[0], result.of(NAME, 0), result.fastest_dense()
    assert (point.keep, point.executed_macs_reduction) == (pytest.approx(0.2), pytest.approx(0.8))
    assert ours is not None
    assert dense is not None
    assert result.ratio(ours) == pytest.approx(sum(ours.seconds) / sum(dense.seconds))
    assert "slicing weights handles masks of filters" in result.left_out[f"{SLICED}, gated"]


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

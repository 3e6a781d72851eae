"""Milliseconds as a budget: predictions from timings per op, and the ratio that meets a latency."""

import sys

import numpy as np
import pytest
from small import tiny_images, tiny_plain

from cofire import FTWT, ConfigError, Engine, compile, cost, gate, solve_ratio, trace
from cofire.runtime.latency import KEEPS, LatencyModel, latency_model, mean_over_images


def test_prediction_interpolates_each_op_at_its_own_share_and_others_at_the_whole() -> None:
    model = LatencyModel(
        ops=("conv", "pool"),
        share_QP=np.array([[0.25, 0.0], [1.0, 0.0]]),
        milliseconds_QP=np.array([[1.0, 0.5], [4.0, 1.5]]),
        total_Q=np.array([0.2, 1.0]),
    )
    assert model.predict({"conv": 1.0}, total=1.0) == pytest.approx(4.0 + 1.5)
    assert model.predict({"conv": 0.625}, total=0.6) == pytest.approx(2.5 + 1.0)
    assert model.predict({"conv": 0.1}, total=0.1) == pytest.approx(1.0 + 0.5)  # nothing is known below


def test_an_image_in_four_that_takes_long_is_paid_for() -> None:
    rounds = [
        1.0,
        1.0,
        1.0,
        9.0,
        1.0,
        1.0,
        50.0,
        9.0,
        1.0,
        1.0,
        1.0,
        9.0,
    ]  # three of each image; once the machine paused
    assert mean_over_images(rounds, 4) == pytest.approx((1 + 1 + 1 + 9) / 4)
    assert mean_over_images(rounds[:2], 4) == 1.0


def test_the_timings_of_an_engine_cover_shares_up_to_dense() -> None:
    engine = compile(gate(tiny_plain(), FTWT()))
    model = latency_model(engine, rounds=2)
    assert model.milliseconds_QP.shape == (len(KEEPS), len(engine.program.ops))
    assert (model.milliseconds_QP >= 0).all()
    assert model.total_Q[-1] == 1
    assert (np.diff(model.total_Q) > 0).all()


def test_with_times_in_proportion_to_macs_both_budgets_give_one_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = cost(trace(tiny_plain()), {}).dense
    total = sum(dense.values())

    def proportional(engine: Engine) -> LatencyModel:
        names = tuple(op.name for op in engine.program.ops)
        share_QP = np.tile([[0.0], [1.0]], len(names))
        return LatencyModel(names, share_QP, share_QP * [dense.get(name, 0) / total for name in names], share_QP[:, 0])

    monkeypatch.setattr(sys.modules["cofire.estimate"], "latency_model", proportional)
    images = tiny_images(40).loader(20)
    by_macs = solve_ratio(tiny_plain(), FTWT(), images, macs=0.7)
    by_time = solve_ratio(tiny_plain(), FTWT(), images, latency_ms=0.7)
    assert by_time.config.ratio == pytest.approx(by_macs.config.ratio, abs=1e-6)
    assert by_time.measured_ms is not None
    assert by_time.measured_ms > 0
    assert by_macs.measured_ms is None
    assert "ms measured" in str(by_time)


def test_the_engine_whose_milliseconds_count_is_of_the_precision_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engine] = []

    def flat(engine: Engine) -> LatencyModel:
        engines.append(engine)
        names = tuple(op.name for op in engine.program.ops)
        return LatencyModel(names, np.zeros((2, len(names))), np.zeros((2, len(names))), np.array([0.0, 1.0]))

    monkeypatch.setattr(sys.modules["cofire.estimate"], "latency_model", flat)
    images = tiny_images(20).loader(20)
    for precision in ("float32", "int8"):
        found = solve_ratio(tiny_plain(), FTWT(), images, latency_ms=1.0, precision=precision)
        assert found.config.ratio == 1.0
    assert [bool(engine.program.quants) for engine in engines] == [False, True]
    with pytest.raises(ConfigError, match=r"precision='int8' changes milliseconds.*got macs=0\.5"):
        solve_ratio(tiny_plain(), FTWT(), images, macs=0.5, precision="int8")


@pytest.mark.parametrize("budget", [{"latency_ms": 1e-9}, {}, {"macs": 0.5, "latency_ms": 1.0}])
def test_a_budget_must_be_one_that_can_be_reached(budget: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"cannot be reached|takes one budget"):
        solve_ratio(tiny_plain(), FTWT(), tiny_images(20).loader(20), **budget)


def test_a_budget_that_every_ratio_meets_gives_the_largest() -> None:
    solution = solve_ratio(tiny_plain(), FTWT(), tiny_images(20).loader(20), latency_ms=1e9)
    assert solution.config.ratio == 1.0

"""Targets: Algorithm 1 against a brute-force oracle, the laws it obeys, and the presets' special cases."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import Net, conv, fc
from torch import Tensor

from cofire import FTWT, AbstractMethod, ConfigError, TrainingError, gate
from cofire.gates.pooling import peak, trough
from cofire.gates.targets import activity, mass_levels, mass_target, nested, top_target

ROWS = 4
RATIOS = [1e-6, 0.5, 0.999999, 1.0]
exhaustive = settings(max_examples=1000, deadline=None, derandomize=True)
usual = settings(max_examples=150, deadline=None, derandomize=True)

# Values that tie often and add up exactly, any float32, and values so small or large that careless sums lose them.
exact = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.0, 2.0, 3.0])
anything = st.floats(0.0, 1e6, width=32)
extreme = st.sampled_from([0.0, 1e-38, 1e-12, 1.0, 1.0 + 2**-23, 1e12])
floors = st.sampled_from([0, 1])
ratios = st.floats(1e-6, 1.0) | st.sampled_from([0.1, 0.25, 0.75, 0.9])


@st.composite
def batches(draw: st.DrawFn, rows: int = ROWS, max_filters: int = 10) -> Tensor:
    """(rows, O) activities; the last row is silent."""
    filters = draw(st.integers(1, max_filters))
    values = draw(st.sampled_from([exact, anything, extreme]))
    drawn = draw(st.lists(values, min_size=(rows - 1) * filters, max_size=(rows - 1) * filters))
    return torch.tensor(drawn + [0.0] * filters).reshape(rows, filters)


def by_hand(row: list[float], ratio: float, floor: int = 1, tolerance: float = 0.0) -> list[bool]:
    """Algorithm 1 for one sample in plain Python, written from the text and not from the code."""
    total = 0.0
    ranked: list[int] = []
    left = list(range(len(row)))
    while left:  # selection sort: the strongest, of equal ones the first
        best = left[0]
        for i in left:
            if row[i] > row[best]:
                best = i
        ranked.append(best)
        left.remove(best)
        total += row[best]
    keep = [False] * len(row)
    mass = 0.0
    for place, i in enumerate(ranked):
        mass += row[i]
        silent = row[i] <= (tolerance * total if ratio == 1.0 else 0.0)
        if place < floor or (mass <= (ratio + tolerance) * total and not silent):
            keep[i] = True
    return keep


@exhaustive
@given(batches(), ratios, st.sampled_from([0, 1]), st.sampled_from([0.0, 0.0, 1e-5, 0.01]))
def test_target_is_what_algorithm_1_gives_by_hand(a_BO: Tensor, ratio: float, floor: int, tolerance: float) -> None:
    # 1,000 examples of 4 samples at 5 ratios: 20,000 targets
    for r in [*RATIOS, ratio]:
        expected = [by_hand(row, r, floor, tolerance) for row in a_BO.tolist()]
        assert mass_target(a_BO, r, floor=floor, tolerance=tolerance).tolist() == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(100, 160), st.integers(0, 2**32 - 1), st.sampled_from(["ties", "spread", "signed zeros"]), ratios)
def test_target_of_many_filters_is_what_algorithm_1_gives_by_hand(
    filters: int, seed: int, kind: str, ratio: float
) -> None:
    a_BO = torch.randn(3, filters, generator=torch.Generator().manual_seed(seed)).abs()
    if kind == "ties":
        a_BO = (a_BO * 4).round() / 4
    elif kind == "spread":
        a_BO = (20 * a_BO - 20).exp()
    else:
        a_BO = torch.where(a_BO < 0.7, torch.where(a_BO < 0.3, 0.0, -0.0), a_BO)
    for r in [*RATIOS, ratio]:
        assert mass_target(a_BO, r).tolist() == [by_hand(row, r) for row in a_BO.tolist()]
    k = filters // 3
    for row, target in zip(a_BO.tolist(), top_target(a_BO, k).tolist(), strict=True):
        first = sorted(range(filters), key=lambda i, row=row: (-row[i], i))[:k]
        assert [i for i, kept in enumerate(target) if kept] == sorted(first)


@pytest.mark.parametrize(
    ("row", "ratio", "expected"),
    [
        ([5, 3, 2], 0.5, [1, 0, 0]),  # exactly at the ratio is kept
        ([5, 3, 2], 0.49, [1, 0, 0]),  # the first crosses at once, and the floor keeps it
        ([5, 3, 2], 0.79, [1, 0, 0]),
        ([5, 3, 2], 0.8, [1, 1, 0]),
        ([2, 3, 5], 0.8, [0, 1, 1]),
        ([1, 1, 1, 1], 0.5, [1, 1, 0, 0]),  # of equal filters the first ones
        ([0, 2, 2, 2], 0.7, [0, 1, 1, 0]),
        ([0, 0, 0], 0.9, [1, 0, 0]),
        ([0, 7, 0], 1.0, [0, 1, 0]),
        ([4], 1e-6, [1]),
    ],
)
def test_target_of_rows_worked_out_on_paper(row: list[int], ratio: float, expected: list[int]) -> None:
    assert mass_target(torch.tensor([row], dtype=torch.float32), ratio).int().tolist() == [expected]


@usual
@given(batches(), ratios, ratios)
def test_target_only_grows_with_the_ratio(a_BO: Tensor, one: float, other: float) -> None:
    low, high = mass_target(a_BO, min(one, other)), mass_target(a_BO, max(one, other))
    assert (low <= high).all()


@usual
@given(batches(), ratios, st.integers(-20, 20))
def test_target_is_unchanged_when_activities_are_scaled(a_BO: Tensor, ratio: float, power: int) -> None:
    a_BO = a_BO.double()  # so that scaling by a power of two loses no bit of the smallest values
    assert torch.equal(mass_target(a_BO, ratio), mass_target(a_BO * 2.0**power, ratio))


@usual
@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=10, unique=True), ratios, st.randoms(use_true_random=False))
def test_target_follows_a_permutation_of_different_filters(values: list[int], ratio: float, rng) -> None:
    a_BO = torch.tensor([values], dtype=torch.float64)
    order = list(range(len(values)))
    rng.shuffle(order)
    assert torch.equal(mass_target(a_BO[:, order], ratio), mass_target(a_BO, ratio)[:, order])


def test_target_follows_a_permutation_where_no_tie_meets_the_crossing() -> None:
    a_BO = torch.tensor([[1.0, 4.0, 4.0, 1.0, 0.0, 0.0]])  # 0.8 of the mass is in the two fours, both taken
    for order in ([1, 0, 3, 2, 5, 4], [5, 4, 3, 2, 1, 0], [2, 1, 0, 5, 4, 3]):
        assert torch.equal(mass_target(a_BO[:, order], 0.85), mass_target(a_BO, 0.85)[:, order])


@usual
@given(batches(), ratios)
def test_target_keeps_at_least_one_filter(a_BO: Tensor, ratio: float) -> None:
    assert (mass_target(a_BO, ratio).sum(1) >= 1).all()


@usual
@given(batches())
def test_ratio_one_keeps_exactly_the_filters_that_respond(a_BO: Tensor) -> None:
    assert torch.equal(mass_target(a_BO, 1.0, floor=0), a_BO > 0)


@usual
@given(batches())
def test_without_floor_a_silent_sample_keeps_nothing(a_BO: Tensor) -> None:
    for ratio in RATIOS:
        assert not mass_target(a_BO, ratio, floor=0)[-1].any()


def test_without_floor_a_filter_that_alone_passes_the_ratio_is_dropped() -> None:
    assert mass_target(torch.tensor([[9.0, 1.0]]), 0.5, floor=0).tolist() == [[False, False]]


def test_thousands_of_equal_filters_are_counted_exactly() -> None:
    a_BO = torch.full((1, 10_000), 0.1)  # summed in float32 these would be off by dozens of filters
    assert mass_target(a_BO, 0.75).sum() == 7_500
    assert mass_target(a_BO, 0.9999).sum() == 9_999


@usual
@given(batches(), st.lists(ratios | st.just(1.0), min_size=1, max_size=5), floors, st.sampled_from([0.0, 1e-5, 0.3]))
def test_many_ratios_at_once_give_the_target_of_each(
    a_BO: Tensor, some: list[float], floor: int, tolerance: float
) -> None:
    runs = nested(some, tolerance)
    assert [ratio for run in runs for ratio in run] == sorted(some)
    assert tolerance or len(runs) == 1
    for run in runs:
        level_BO = mass_levels(a_BO, run, floor=floor, tolerance=tolerance)
        assert level_BO.shape == a_BO.shape
        for i, ratio in enumerate(run):
            assert torch.equal(level_BO <= i, mass_target(a_BO, ratio, floor=floor, tolerance=tolerance))


@usual
@given(batches(), st.data())
def test_top_target_takes_the_strongest_and_of_equal_ones_the_first(a_BO: Tensor, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, a_BO.shape[1]))
    for row, target in zip(a_BO.tolist(), top_target(a_BO, k).tolist(), strict=True):
        stronger = [sum(b > a or (b == a and j < i) for j, b in enumerate(row)) for i, a in enumerate(row)]
        assert target == [above < k for above in stronger]


@pytest.mark.parametrize("k", [-1, 4])
def test_top_target_refuses_more_filters_than_there_are(k: int) -> None:
    with pytest.raises(ConfigError, match=rf"k must be in 0\.\.3, got {k}"):
        top_target(torch.ones(1, 3), k)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.0000001, math.nan, math.inf])
def test_ratio_out_of_range_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"ratio must be in \(0, 1\], got"):
        mass_target(torch.ones(1, 3), ratio)
    with pytest.raises(ConfigError, match=r"ratio must be in \(0, 1\], got"):
        FTWT(ratio=ratio)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_activations_that_are_not_finite_are_refused(bad: float) -> None:
    a_BO = torch.ones(2, 3)
    a_BO[1, 1] = bad
    with pytest.raises(TrainingError, match="activations must be finite"):
        mass_target(a_BO, 0.9)
    with pytest.raises(TrainingError, match="activations must be finite"):
        top_target(a_BO, 1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_pixel_of_a_map_is_noticed(bad: float) -> None:
    y_BOHW = torch.ones(1, 3, 2, 2)
    y_BOHW[0, 1, 1, 0] = bad
    with pytest.raises(TrainingError, match="activations must be finite"):
        mass_target(activity(y_BOHW), 0.9)


def test_large_but_finite_activations_are_accepted() -> None:
    assert mass_target(torch.full((1, 4), 3e38), 0.5).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 5), (3, 16, 8, 8), (1, 40, 3, 2), (2, 1, 7, 7), (2, 16, 1, 1), (0, 4, 3, 3)]
)
def test_peaks_and_troughs_are_the_same_in_every_layout(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    x_BCHW = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    laid_BCHW = x_BCHW.contiguous(memory_format=layout)
    numbers = x_BCHW.numpy()
    assert peak(laid_BCHW).tolist() == numbers.max(axis=(2, 3)).tolist()
    assert trough(laid_BCHW).tolist() == numbers.min(axis=(2, 3)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_activity_is_the_largest_absolute_response(dtype: torch.dtype) -> None:
    y_BOHW = torch.randn(3, 5, 4, 6, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    found = activity(y_BOHW)
    for b in range(3):
        for o in range(5):
            assert found[b, o].item() == max(abs(v) for row in y_BOHW[b, o].tolist() for v in row)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not found.requires_grad


def test_activity_of_a_map_that_is_negative_everywhere_is_positive() -> None:
    assert activity(torch.tensor([[[[-3.0, -1.0]], [[-0.5, 0.25]]]])).tolist() == [[3.0, 0.5]]


# The presets' rules, section 2 of the method's notes.


def method_of(config: FTWT, filters: int) -> AbstractMethod:
    net = Net(lambda m, x: m.logits(m.conv(x).abs()), conv=conv(3, filters), fc=fc(filters))
    return gate(net, config, input_shape=(3, 8, 8)).gates


def target_of(config: FTWT, row: list[float]) -> list[int]:
    """The target a gate makes of a map whose filters peak at ``row``, with a smaller pixel beside each peak."""
    y_BOHW = torch.stack([torch.tensor(row), torch.tensor(row) / 2], dim=1).reshape(1, len(row), 1, 2)
    method = method_of(config, len(row))
    target = method.target(method.sites["conv"], y_BOHW)
    assert target is not None
    return target.int().tolist()[0]


@pytest.mark.parametrize(("preset", "kept"), [("default", 1), ("paper", 0), ("official", 5)])
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_silent_map_keeps_one_filter_or_none_or_all_by_preset(preset: str, kept: int, ratio: float) -> None:
    assert sum(target_of(FTWT.preset(preset, ratio=ratio), [0.0] * 5)) == kept


@pytest.mark.parametrize(("preset", "expected"), [("default", [1, 0, 0]), ("paper", [0, 0, 0]), ("official", [0] * 3)])
def test_only_the_default_keeps_a_filter_that_alone_passes_the_ratio(preset: str, expected: list[int]) -> None:
    assert target_of(FTWT.preset(preset, ratio=0.5), [8.0, 1.0, 1.0]) == expected


def test_official_crosses_only_when_the_mass_passes_the_ratio_by_more_than_1e_5() -> None:
    # Of a total of 2**20 the first filter holds half plus a little: 8 parts are 0.76e-5, 12 parts are 1.14e-5.
    within, beyond = [[2.0**19 + more, 2.0**19 - more] for more in (8, 12)]
    assert target_of(FTWT.preset("official", ratio=0.5), within) == [1, 0]
    assert target_of(FTWT.preset("official", ratio=0.5), beyond) == [0, 0]
    assert target_of(FTWT.preset("paper", ratio=0.5), within) == [0, 0]


def test_official_at_ratio_one_keeps_normalised_maxima_above_1e_5() -> None:
    row = [2.0**20, 12.0, 9.0, 0.0]  # shares of about 1, 1.14e-5, 0.86e-5, 0
    assert target_of(FTWT.preset("official", ratio=1.0), row) == [1, 1, 0, 0]
    assert target_of(FTWT.preset("paper", ratio=1.0), row) == [1, 1, 1, 0]
    assert target_of(FTWT.preset("default", ratio=1.0), row) == [1, 1, 1, 0]


def test_a_signature_keeps_exactly_k_filters_of_every_map() -> None:
    config = FTWT(signature={"conv": 2}, ratio=1.0)
    assert target_of(config, [1.0, 3.0, 2.0, 3.0]) == [0, 1, 0, 1]
    assert target_of(config, [0.0, 0.0, 0.0, 0.0]) == [1, 1, 0, 0]

"""Brier score and calibration error against hand-computed values and scikit-learn's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cofire import ConfigError, DataError
from cofire.shift import brier, calibration_error


def probabilities(n: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(classes)
    logits_NK = 2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    return logits_NK.softmax(1), torch.randint(classes, (n,), generator=generator)


@pytest.fixture
def metrics() -> Any:
    return pytest.importorskip("sklearn.metrics", reason="scikit-learn is needed (extra demo)")


# Brier


@pytest.mark.parametrize(
    ("probability_K", "label", "score"),
    [
        ([1.0, 0.0, 0.0], 0, 0.0),
        ([1.0, 0.0, 0.0], 1, 2.0),
        ([0.25, 0.25, 0.25, 0.25], 2, 0.75),
        ([0.5, 0.3, 0.2], 0, 0.25 + 0.09 + 0.04),
        ([0.5, 0.3, 0.2], 2, 0.25 + 0.09 + 0.64),
    ],
)
def test_brier_is_the_sum_of_squared_errors(probability_K: list[float], label: int, score: float) -> None:
    found_N = brier(torch.tensor([probability_K]), torch.tensor([label]))
    assert found_N.tolist() == pytest.approx([score], abs=1e-6)
    assert found_N.dtype == torch.float64


def test_brier_of_many_classes_is_scikit_learn_s(metrics: Any) -> None:
    probability_NK, label_N = probabilities(200, 7)
    expected = metrics.brier_score_loss(label_N.numpy(), probability_NK.numpy(), labels=list(range(7)))
    assert float(brier(probability_NK, label_N).mean()) == pytest.approx(expected, rel=1e-12)


def test_brier_of_two_classes_is_twice_scikit_learn_s(metrics: Any) -> None:
    """For two classes scikit-learn counts the positive class alone; the other has the same error."""
    probability_NK, label_N = probabilities(200, 2)
    expected = 2 * metrics.brier_score_loss(label_N.numpy(), probability_NK[:, 1].numpy())
    assert float(brier(probability_NK, label_N).mean()) == pytest.approx(expected, rel=1e-12)


# Calibration error


def error(confidence: list[float], right: list[int], bins: int) -> float:
    return calibration_error(torch.tensor(confidence, dtype=torch.float64), torch.tensor(right).bool(), bins)


def test_the_calibration_error_by_hand() -> None:
    """Bin (0, 1/2]: confidence 0.4, none right. Bin (1/2, 1]: mean 0.8, two of three right."""
    found = error([0.4, 0.7, 0.8, 0.9], [0, 1, 0, 1], bins=2)
    assert found == pytest.approx(1 / 4 * 0.4 + 3 / 4 * abs(2 / 3 - 0.8))


def test_errors_within_a_bin_cancel_and_between_bins_do_not() -> None:
    assert error([0.5, 0.5], [0, 1], bins=1) == 0.0
    assert error([0.6, 0.8], [1, 0], bins=1) == pytest.approx(0.2)
    assert error([0.6, 0.8], [1, 0], bins=10) == pytest.approx((0.4 + 0.8) / 2)


def test_bins_are_closed_above() -> None:
    """0.5 belongs to (0, 1/2]: apart from 0.6, together with 0.4."""
    assert error([0.5, 0.6], [1, 0], bins=2) == pytest.approx((0.5 + 0.6) / 2)
    assert error([0.5, 0.4], [1, 0], bins=2) == pytest.approx(abs(0.5 - 0.45))


def test_certain_and_right_has_no_error_certain_and_wrong_has_all() -> None:
    assert error([1.0] * 4, [1] * 4, bins=15) == 0.0
    assert error([1.0] * 4, [0] * 4, bins=15) == 1.0


def test_the_calibration_error_follows_from_scikit_learn_s_curve(metrics: Any) -> None:
    calibration = pytest.importorskip("sklearn.calibration")
    probability_NK, label_N = probabilities(500, 5)
    confidence_N, predicted_N = probability_NK.max(1)
    right_N = predicted_N == label_N
    accuracy, confidence = calibration.calibration_curve(right_N.numpy(), confidence_N.numpy(), n_bins=15)
    counts = torch.histc(confidence_N, 15, 0, 1)
    counts = counts[counts > 0].numpy()
    expected = float((counts * abs(accuracy - confidence)).sum() / 500)
    assert calibration_error(confidence_N, right_N) == pytest.approx(expected, rel=1e-9)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="bins of the calibration error must be at least 1, got 0"):
        error([0.5], [1], bins=0)
    with pytest.raises(DataError, match="needs at least one sample"):
        error([], [], bins=15)

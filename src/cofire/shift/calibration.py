"""How right probabilities are: Brier score and expected calibration error.

Shapes: N samples, K classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cofire.errors import ConfigError, DataError


def brier(probability_NK: Tensor, label_N: Tensor) -> Tensor:
    """The Brier score of each sample, float64 (N,) in [0, 2]: the sum over classes of (probability - 1 or 0) squared.

    0 is certain and right, 2 certain and wrong, 1 - 1/K undecided between all K classes. A set's score is the mean.

    Args:
        probability_NK: rows that sum to 1.
        label_N: the right classes, int64.
    """
    right_NK = F.one_hot(label_N, probability_NK.shape[1])
    return (probability_NK.double() - right_NK).square().sum(1)


def calibration_error(confidence_N: Tensor, right_N: Tensor, bins: int = 15) -> float:
    """The expected calibration error, in [0, 1]: how far confidence is from accuracy.

    (0, 1] is cut into ``bins`` intervals of one width, closed above. Over the intervals, by their share of the samples,
    the mean of |accuracy - mean confidence| among the samples whose confidence lies there.

    Args:
        confidence_N: largest probability of each sample, in (0, 1].
        right_N: bool, whether the class of that probability is the label.
        bins: at least 1.
    """
    if bins < 1:
        raise ConfigError(f"bins of the calibration error must be at least 1, got {bins}")
    if len(confidence_N) == 0:
        raise DataError("the calibration error needs at least one sample, got none")
    confidence_N = confidence_N.double()
    edges = torch.arange(1, bins, dtype=torch.float64) / bins
    bin_N = torch.bucketize(confidence_N, edges)
    gap_N = right_N.double() - confidence_N
    return float(torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_N, gap_N).abs().sum() / len(confidence_N))

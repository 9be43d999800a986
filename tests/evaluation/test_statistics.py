"""Test the errors and intervals of evaluations against what repeated evaluations give."""

import numpy as np
import pytest
from scipy.stats import binomtest

from evaluation.statistics import mean_interval, mean_share_interval, ratio, share_interval

LEVELS = np.repeat([0.6, 1.3], 10)
"""Bits per byte of ten micro-batches of each of two sources."""
INTERVALS = [share_interval(right / 100, 100) for right in range(101)]


def test_the_error_of_a_mixture_is_the_standard_deviation_over_evaluations():
    random = np.random.default_rng(0)
    sizes = random.integers(3500, 4500, (4000, 20))
    sizes[:, 9] //= 5  # a source's last rows fill a part of their micro-batch
    bits = sizes * (LEVELS + 0.02 * random.standard_normal(sizes.shape))
    sources = [0] * 10 + [1] * 10
    results = [ratio(of.tolist(), by.tolist(), sources) for of, by in zip(bits, sizes)]
    means = [value - np.average(LEVELS, weights=by) for (value, _), by in zip(results, sizes)]
    errors = np.array([error for _, error in results])
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.05)
    assert np.mean(errors) < 0.1 * np.mean([ratio(of.tolist(), by.tolist())[1] for of, by in zip(bits, sizes)])


def test_a_source_with_a_single_part_has_no_error():
    assert ratio([1.0, 2.0, 3.0], [2, 2, 2], [0, 0, 1]) == (1.0, None)
    assert ratio([1.0], [2]) == (0.5, None)


@pytest.mark.parametrize("accuracies", [(0.02,), (0.5,), (0.99, 0.02, 0.3, 1.0)])
def test_intervals_of_tasks_cover_the_true_accuracy_also_near_0_and_1(accuracies):
    random = np.random.default_rng(0)
    covered = 0
    for right in random.binomial(100, accuracies, (1000, len(accuracies))).tolist():
        low, high = mean_interval([number / 100 for number in right], [INTERVALS[number] for number in right])
        covered += low <= np.mean(accuracies) <= high
    assert 0.92 <= covered / 1000 <= 0.99


def test_no_right_item_is_no_proof_of_accuracy_0():
    assert share_interval(0, 100) == pytest.approx([0, 0.037], abs=1e-4)
    assert share_interval(1, 100) == pytest.approx([0.963, 1], abs=1e-4)


def test_equal_shares_have_the_interval_of_as_many_answers():
    assert mean_share_interval(np.full(10, 1 / 3)) == pytest.approx(share_interval(1 / 3, 10))


@pytest.mark.parametrize("right", [0, 1, 37, 100])
def test_a_share_s_interval_is_scipy_s(right):
    expected = binomtest(right, 100).proportion_ci(0.95, "wilson")
    assert INTERVALS[right] == pytest.approx([expected.low, expected.high], abs=1e-12)

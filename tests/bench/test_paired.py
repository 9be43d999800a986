"""Test intervals and p-values on synthetic pairs with a known difference, stopped after any seed as bench.compare does.

Differences are in standard deviations of a pair's difference. Each share below is of 10,000 comparisons, so its
standard error is at most 0.3%.
"""

import numpy as np
import pytest
from scipy.stats import t

from bench.paired import LEVEL, holm, interval, p_value

DRAWS = 10_000


def stopped(values: np.ndarray, seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of seeds of each comparison [..., comparisons] of values [..., comparisons, seeds], and its
    corrected p-value: it gets no more seeds once this is at most 5%."""
    taken, corrected = np.zeros(values.shape[:-1], int), np.ones(values.shape[:-1])
    p_values = corrected.copy()
    for count in range(2, seeds + 1):
        running = corrected > LEVEL
        taken[running] = count
        p_values = np.where(running, p_value(values[..., :count], seeds), p_values)
        corrected = holm(p_values)
    return taken, corrected


def covered(values: np.ndarray, taken: np.ndarray, truth: float, seeds: int) -> float:
    """Return the share of the comparisons' intervals that cover the true difference."""
    inside = 0
    for count in range(2, seeds + 1):
        low, high = interval(values[taken == count][:, :count], seeds)
        inside += np.sum((low <= truth) & (truth <= high))
    return inside / taken.size


@pytest.mark.parametrize("seeds", [2, 5, 12])
@pytest.mark.parametrize("difference", [0.0, 0.15, 2.0])
def test_95_percent_of_intervals_cover_the_difference(seeds, difference):
    values = np.random.default_rng(1).normal(difference, 1.0, (DRAWS, 1, seeds))
    taken, _ = stopped(values, seeds)
    assert 0.93 < covered(values, taken, difference, seeds) < 0.97


@pytest.mark.parametrize("seeds", [2, 5, 12])
def test_5_percent_of_equal_recipes_are_found_to_differ_though_student_s_t_would_find_more(seeds):
    values = np.random.default_rng(2).standard_normal((DRAWS, 1, seeds))
    assert np.mean(stopped(values, seeds)[1] <= LEVEL) == pytest.approx(0.05, abs=0.009)
    every = [t.sf(abs(t_of(values[:, 0, :n])), n - 1) * 2 <= LEVEL for n in range(2, seeds + 1)]
    assert seeds == 2 or np.any(every, axis=0).mean() > 0.08


def t_of(values: np.ndarray) -> np.ndarray:
    """Return Student's t of the mean."""
    return values.mean(-1) / (values.std(-1, ddof=1) / np.sqrt(values.shape[-1]))


@pytest.mark.parametrize("different", [0, 3])
def test_5_percent_of_families_have_a_false_difference(different):
    generator, seeds, equal = np.random.default_rng(3), 5, 4
    shared = generator.standard_normal((DRAWS, 1, seeds))  # all are compared with one baseline
    values = (shared + generator.standard_normal((DRAWS, equal + different, seeds))) / np.sqrt(2)
    values[:, equal:] += 3.0
    taken, corrected = stopped(values, seeds)
    assert 0.01 < np.any(corrected[:, :equal] <= LEVEL, axis=1).mean() < 0.05
    assert covered(values[:, 0], taken[:, 0], 0.0, seeds) > 0.94
    if different:
        assert 0.93 < covered(values[:, -1], taken[:, -1], 3.0, seeds) < 0.98


@pytest.mark.parametrize("difference", [0.0, 2.0])
def test_an_axis_that_does_not_decide_the_end_is_covered_too(difference):
    values = np.random.default_rng(4).multivariate_normal([difference] * 2, [[1, 0.8], [0.8, 1]], (DRAWS, 8))
    taken, _ = stopped(values[:, None, :, 0], 8)
    assert 0.93 < covered(values[..., 1], taken[:, 0], difference, 8) < 0.99


def test_an_interval_excludes_zero_exactly_if_the_p_value_is_at_most_5_percent():
    values = np.random.default_rng(5).normal(1.0, 1.0, (DRAWS, 4))
    (low, high), p = interval(values, 6), p_value(values, 6)
    assert 0.05 < np.mean(p <= LEVEL) < 0.95 and np.array_equal((low > 0) | (high < 0), p <= LEVEL)


def test_holm_corrects_as_published():
    assert holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm(np.array([0.3])) == pytest.approx([0.3])


def test_two_seeds_give_student_s_interval_and_one_gives_none():
    low, high = interval(np.array([1.0, 2.0]), 2)
    assert (low, high) == pytest.approx(t.interval(0.95, 1, 1.5, 0.5), rel=0.02)  # the level is simulated
    assert interval(np.array([1.0]), 5) == (-np.inf, np.inf) and p_value(np.array([1.0]), 5) == 1
    assert interval(np.array([1.0, 1.0]), 2) == (1.0, 1.0)

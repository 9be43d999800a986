"""Test means, intervals, and decisions from them."""

import math

import numpy as np
import pytest

from tools.tune.statistics import better_half, critical_batch, difference, lowest_of_the_best, mean, slowdowns


def test_an_interval_is_student_s():
    value, low, high = mean([1.0, 2.0, 3.0, 4.0])
    assert value == 2.5 and high - 2.5 == pytest.approx(2.5 - low) == pytest.approx(3.182446 * 1.290994 / 2)


@pytest.mark.parametrize(
    ("values", "expected"), [([2.0], (2.0, -math.inf, math.inf)), ([1.0, math.inf], (math.inf,) * 3)]
)
def test_a_single_value_has_no_bounds_and_a_failed_run_loses(values, expected):
    assert tuple(mean(values)) == expected


def test_shared_noise_of_pairs_cancels():
    texts = np.random.default_rng(0).normal(4.0, 1.0, 32)
    more = difference(list(texts + 0.01), list(texts))
    assert more.value == pytest.approx(0.01) and more.high - more.low < 1e-6


def test_a_slow_minute_is_in_no_slowdown_and_dropped_ones_keep_their_rounds():
    machine = [1.0, 1.1, 5.0, 1.0]
    result = slowdowns({"a": machine, "b": [1.2 * s for s in machine], "dropped": [2.0, 2.2]})
    assert result["a"] == (0, 0, 0)
    assert result["b"].low == pytest.approx(0.2) == pytest.approx(result["b"].high)
    assert result["dropped"].value == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        ({0.5: [3.0], 1: [1.0], 2: [2.0], 4: [math.inf], 0.25: [4.0]}, [1, 2, 0.5]),
        ({1: [2.0, 2.0], 2: [1.0, 2.5]}, [2]),
        ({1: [math.inf], 2: [math.nan]}, []),
    ],
)
def test_the_better_half_is_kept(losses, kept):
    assert better_half(losses) == kept


def test_a_tie_is_decided_for_the_lower_rate():
    even, odd = [3.0, 3.2, 3.1, 3.3], [3.01, 3.18, 3.12, 3.28]  # means differ by 0.0025
    assert lowest_of_the_best({1.0: odd, 2.0: even, 4.0: [4.0] * 4})[0] == 1.0
    assert lowest_of_the_best({1.0: [x + 1 for x in even], 2.0: even})[0] == 2.0
    assert lowest_of_the_best({0.5: [math.inf] * 4, 2.0: even})[0] == 2.0


@pytest.mark.parametrize(
    ("means", "critical"),
    [
        ({"0.5 root": 3.0, "1 root": 3.005, "2 root": 3.009, "4 root": 3.1}, "2 root"),
        ({"0.5 root": 3.0, "1 root": 3.05, "2 root": 3.2, "4 root": 3.4}, "0.5 root"),
        ({"0.5 root": 3.2, "1 root": 3.1, "2 root": 3.05, "4 root": 3.0}, "4 root"),
        ({"1 root": 3.0, "4 root": math.inf, "4 linear": math.inf}, "1 root"),
        ({"1 root": 3.0, "2 root": 3.007, "2 linear": 3.004}, "2 linear"),
        # A batch that is level only under the rule that is always worse is no critical batch.
        ({"1 root": 3.0, "2 root": 3.3, "4 linear": 3.3, "0.5 linear": 3.3}, "1 root"),
    ],
)
def test_the_critical_batch_is_the_largest_that_loses_next_to_nothing(means, critical):
    key = lambda text: (float(text.split()[0]), text.split()[1])
    losses = {key(text): [loss, loss] for text, loss in means.items()}
    assert critical_batch(losses, 0.01)[0] == key(critical)

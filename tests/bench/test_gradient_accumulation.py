"""The page's claim that can be tested: optax's notebook through our step."""

import pytest

from bench.gradient_accumulation import notebook


@pytest.mark.medium
@pytest.mark.parametrize("schedule", ["constant", "warmup_cosine"])
def test_nine_examples_at_once_or_three_times_three(schedule):
    """Two updates of 9 rows through our step with K = 3, against MultiSteps(3) over the micro-batches' means."""
    assert notebook(schedule) < 1e-6

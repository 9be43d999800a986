"""Run optax's notebook on gradient accumulation through our step."""

import pytest

from bench.gradient_accumulation import notebook


@pytest.mark.medium
@pytest.mark.parametrize("schedule", ["constant", "warmup_cosine"])
def test_nine_examples_at_once_or_three_times_three(schedule):
    """Compare two updates of 9 rows with K = 3 in our step and MultiSteps(3) over means of micro-batches."""
    assert notebook(schedule) < 1e-6

"""Run optax's notebook on gradient accumulation through our step."""

import pytest

from bench.gradient_accumulation import notebook


@pytest.mark.medium
def test_nine_examples_at_once_or_three_times_three():
    """Compare two updates of 9 rows with K = 3 in our step and MultiSteps(3) over means of micro-batches."""
    assert notebook("warmup_cosine") < 1e-6

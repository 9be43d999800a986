"""The page's claims that can be tested: optax's notebook through our step, and the weights that stand for means."""

import jax.numpy as jnp
import numpy as np
import pytest

from bench.gradient_accumulation import means, notebook, ragged


@pytest.mark.medium
@pytest.mark.parametrize("schedule", ["constant", "warmup_cosine"])
def test_nine_examples_at_once_or_three_times_three(schedule):
    """Two updates of 9 rows through our step with K = 3, against MultiSteps(3) over the micro-batches' means."""
    assert notebook(schedule) < 1e-6


def test_the_reweighed_sum_is_the_mean_of_means():
    batch = ragged({"weights": np.ones((4, 2, 16), np.float32)}, seed=0, power=2.0)
    losses = jnp.asarray(np.random.default_rng(1).standard_normal((4, 2, 16)))
    counts = batch["weights"].sum((1, 2))
    assert len(set(counts.tolist())) > 1
    mean_of_means = jnp.mean((losses * batch["weights"]).sum((1, 2)) / counts)
    step_loss = (losses * means(batch)["weights"]).sum() / (means(batch)["weights"] != 0).sum()
    assert float(step_loss) == pytest.approx(float(mean_of_means), rel=1e-5)
    assert np.array_equal(means(batch)["weights"] != 0, batch["weights"] != 0)

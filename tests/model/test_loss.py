"""The loss and its gradient against float64, and what weights do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.loss import cross_entropy_sum

CAP = 15.0
GENERATOR = np.random.default_rng(0)
LOGITS = jnp.asarray(20 * GENERATOR.standard_normal((2, 8, 50), np.float32))  # far into the cap
TARGETS = jnp.asarray(GENERATOR.integers(0, 50, (2, 8), np.int32))
WEIGHTS = jnp.asarray(GENERATOR.integers(0, 3, (2, 8)), jnp.float32) / 2


def defined(logits):
    capped = CAP * jnp.tanh(logits / CAP)
    nats = -jnp.take_along_axis(jax.nn.log_softmax(capped), TARGETS[..., None], -1)[..., 0]
    return jnp.sum(WEIGHTS * nats)


def test_value_and_gradient():
    loss, gradient = jax.value_and_grad(cross_entropy_sum)(LOGITS, TARGETS, WEIGHTS, CAP)
    with jax.enable_x64(True):
        expected, expected_gradient = jax.value_and_grad(defined)(jnp.asarray(LOGITS, jnp.float64))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


def test_gradient_scales_with_what_follows():
    double = jax.grad(lambda x: 2 * cross_entropy_sum(x, TARGETS, WEIGHTS, CAP))(LOGITS)
    np.testing.assert_allclose(double, 2 * jax.grad(cross_entropy_sum)(LOGITS, TARGETS, WEIGHTS, CAP), rtol=1e-6)


def test_bfloat16_logits_get_a_bfloat16_gradient():
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    loss, gradient = jax.value_and_grad(cross_entropy_sum)(logits, TARGETS, WEIGHTS, CAP)
    wide_loss, wide = jax.value_and_grad(cross_entropy_sum)(logits.astype(jnp.float32), TARGETS, WEIGHTS, CAP)
    assert loss.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    assert float(loss) == pytest.approx(float(wide_loss), rel=1e-6)
    np.testing.assert_allclose(gradient.astype(jnp.float32), wide, rtol=8e-3, atol=1e-6)


def test_weight_zero_silences_a_position():
    other = jnp.where(WEIGHTS[..., None] == 0, LOGITS[::-1], LOGITS)
    loss, gradient = jax.value_and_grad(cross_entropy_sum)(other, TARGETS, WEIGHTS, CAP)
    assert float(loss) == pytest.approx(float(cross_entropy_sum(LOGITS, TARGETS, WEIGHTS, CAP)), rel=1e-6)
    assert np.all(np.asarray(gradient)[np.asarray(WEIGHTS) == 0] == 0)


def test_logits_at_the_cap_do_not_overflow():
    huge = jnp.full((1, 1, 70_000), 1e30)
    loss = cross_entropy_sum(huge, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)), CAP)
    assert float(loss) == pytest.approx(np.log(70_000), rel=1e-5)

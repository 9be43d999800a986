"""Compare the loss and its gradient with float64, for all weights and chunks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.loss import cross_entropy_and_gradient, head_loss
from options.schema import ModelConfig

CONFIG = ModelConfig(softcap=15.0)
GENERATOR = np.random.default_rng(0)
LOGITS = jnp.asarray(20 * GENERATOR.standard_normal((16, 50), np.float32))  # far beyond the cap
TARGETS = jnp.asarray(GENERATOR.integers(0, 50, 16, np.int32))
WEIGHTS = jnp.asarray(GENERATOR.integers(0, 3, 16), jnp.float32) / 2
X = jnp.asarray(GENERATOR.standard_normal((16, 8), np.float32))
KERNEL = jnp.asarray(9 * GENERATOR.standard_normal((8, 50), np.float32))
AXES = ("fsdp", "tensor")


def defined(logits):
    capped = CONFIG.softcap * jnp.tanh(logits / CONFIG.softcap)
    nats = -jnp.take_along_axis(jax.nn.log_softmax(capped), TARGETS[:, None], -1)[:, 0]
    return jnp.sum(WEIGHTS * nats)


def in_float64(function, *arrays):
    with jax.enable_x64(True):
        return function(*(jnp.asarray(array, jnp.float64) for array in arrays))


def test_value_and_gradient():
    loss, gradient = cross_entropy_and_gradient(LOGITS, TARGETS, WEIGHTS, CONFIG.softcap)
    expected, expected_gradient = in_float64(jax.value_and_grad(defined), LOGITS)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_head_s_gradients_do_not_depend_on_chunks(chunks):
    config = replace(CONFIG, loss_chunks=chunks)
    ours = lambda x, kernel: 3 * head_loss(x, kernel, TARGETS, WEIGHTS, AXES, config)
    loss, gradients = jax.jit(jax.value_and_grad(ours, (0, 1)))(X, KERNEL)
    plain = jax.value_and_grad(lambda x, kernel: 3 * defined(x @ kernel), (0, 1))
    expected, expected_gradients = in_float64(plain, X, KERNEL)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for gradient, of in zip(gradients, expected_gradients):
        np.testing.assert_allclose(gradient, of, rtol=1e-4, atol=1e-4)
    assert float(jax.jit(ours)(X, KERNEL)) == pytest.approx(float(expected), rel=1e-5)


def test_without_a_gradient_none_is_computed():
    product = 2 * X.shape[0] * KERNEL.size
    flops = lambda function: jax.jit(function).lower(X, KERNEL).compile().cost_analysis()["flops"]
    loss = lambda x, kernel: head_loss(x, kernel, TARGETS, WEIGHTS, AXES, CONFIG)
    assert product <= flops(loss) < 2 * product
    assert 3 * product <= flops(jax.value_and_grad(loss, (0, 1))) < 5 * product


def test_bfloat16_logits_get_a_bfloat16_gradient_and_the_head_a_float32_one():
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    loss, gradient = cross_entropy_and_gradient(logits, TARGETS, WEIGHTS, CONFIG.softcap)
    wide_loss, wide = cross_entropy_and_gradient(logits.astype(jnp.float32), TARGETS, WEIGHTS, CONFIG.softcap)
    assert loss.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    assert float(loss) == pytest.approx(float(wide_loss), rel=1e-6)
    np.testing.assert_allclose(gradient.astype(jnp.float32), wide, rtol=8e-3, atol=1e-6)
    narrow = lambda kernel: head_loss(jnp.asarray(X, jnp.bfloat16), kernel, TARGETS, WEIGHTS, AXES, CONFIG)
    dkernel = jax.grad(narrow)(KERNEL)
    assert np.any(np.asarray(dkernel.astype(jnp.bfloat16).astype(jnp.float32)) != np.asarray(dkernel))


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_cap_that_a_config_may_have_overflows_nothing(sign):
    """Put all logits near one end of the cap, so that every token has the same probability."""
    vocab, cap = 32768, 76.9  # the limit in tests/configs/test_schema.py
    logits, tokens = jnp.full((2, vocab), sign * 4 * cap), jnp.zeros(2, jnp.int32)
    loss, gradient = cross_entropy_and_gradient(logits, tokens, jnp.ones(2), cap)
    assert float(loss) == pytest.approx(2 * np.log(vocab), rel=1e-5)
    np.testing.assert_allclose(gradient[:, 1:], (1 - np.tanh(4) ** 2) / vocab, rtol=1e-3)

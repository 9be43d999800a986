"""The loss: sums over valid tokens, never means.

The logits are the largest array of a step. They are kept once, in the compute type and before the cap; both passes
widen and cap them inside one fusion. The cap bounds them, so exp() cannot overflow and no maximum is looked for.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.gpt import GPT


def softcap(logits: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """`cap * tanh(logits / cap)` in float32 (arXiv:2408.00118)."""
    return cap * jnp.tanh(logits.astype(jnp.float32) / cap)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy_sum(
    logits: Float[Array, "batch length vocab"],
    targets: Int[Array, "batch length"],
    weights: Float[Array, "batch length"],
    cap: float,
) -> Float[Array, ""]:
    """Sum over tokens of `weights * -log softmax(softcap(logits))[targets]`, in nats and float32."""
    return _forward(logits, targets, weights, cap)[0]


def _forward(logits: Array, targets: Array, weights: Array, cap: float) -> tuple[Array, tuple[Array, ...]]:
    log_sum = jnp.log(jnp.sum(jnp.exp(softcap(logits, cap)), axis=-1))
    target_logit = softcap(jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0], cap)
    return jnp.sum(weights * (log_sum - target_logit)), (logits, targets, weights, log_sum)


def _backward(cap: float, residuals: tuple[Array, ...], dloss: Array) -> tuple[Array, None, None]:
    logits, targets, weights, log_sum = residuals
    squashed = jnp.tanh(logits.astype(jnp.float32) / cap)
    probabilities = jnp.exp(cap * squashed - log_sum[..., None])
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    dlogits = (dloss * weights)[..., None] * (probabilities - is_target) * (1 - squashed * squashed)
    return dlogits.astype(logits.dtype), None, None


cross_entropy_sum.defvjp(_forward, _backward)


def loss_sums(
    model: GPT,
    inputs: Int[Array, "batch length"],
    targets: Int[Array, "batch length"],
    weights: Float[Array, "batch length"],
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """`(loss_sum, token_count)` of one micro-batch: nats, and how many targets have a weight other than 0."""
    logits, _ = model(inputs)
    return cross_entropy_sum(logits, targets, weights, model.config.softcap), jnp.sum(weights != 0, dtype=jnp.int32)

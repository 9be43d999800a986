"""The loss: sums over valid tokens, never means.

The logits are the largest array of a step. They are kept once, in the compute type and before the cap; both passes
widen and cap them inside one fusion. The cap bounds them, so exp() cannot overflow and no maximum is looked for.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.gpt import GPT
from model.parallel import join, tensor_index


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
    """Sum over tokens of `weights * -log softmax(softcap(logits))[targets]`, in nats and float32.

    In the step `logits` are this device's share of the vocabulary; two sums over `tensor` of a number a token suffice.
    """
    return _forward(logits, targets, weights, cap)[0]


def _forward(logits: Array, targets: Array, weights: Array, cap: float) -> tuple[Array, tuple[Array, ...]]:
    local, here = _own(targets, logits.shape[-1])
    log_sum = jnp.log(join(jnp.sum(jnp.exp(softcap(logits, cap)), axis=-1)))
    target_logit = jnp.take_along_axis(logits, local[..., None], axis=-1, mode="clip")[..., 0]
    target_logit = join(jnp.where(here, softcap(target_logit, cap), 0))
    return jnp.sum(weights * (log_sum - target_logit)), (logits, targets, weights, log_sum)


def _backward(cap: float, residuals: tuple[Array, ...], dloss: Array) -> tuple[Array, None, None]:
    logits, targets, weights, log_sum = residuals
    local, _ = _own(targets, logits.shape[-1])
    squashed = jnp.tanh(logits.astype(jnp.float32) / cap)
    probabilities = jnp.exp(cap * squashed - log_sum[..., None])
    is_target = jnp.arange(logits.shape[-1]) == local[..., None]
    dlogits = (dloss * weights)[..., None] * (probabilities - is_target) * (1 - squashed * squashed)
    return dlogits.astype(logits.dtype), None, None


def _own(targets: Array, share: int) -> tuple[Array, Array]:
    """The targets' places in this device's share of the vocabulary, and whether they are in it."""
    local = targets - tensor_index() * share
    return local, (local >= 0) & (local < share)


cross_entropy_sum.defvjp(_forward, _backward)


def loss_sums(
    model: GPT,
    inputs: Int[Array, "batch length"],
    targets: Int[Array, "batch length"],
    weights: Float[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """`(loss_sum, token_count)` of one micro-batch: nats, and how many targets have a weight other than 0."""
    logits, _ = model(inputs, segment_ids=segment_ids)
    return cross_entropy_sum(logits, targets, weights, model.config.softcap), jnp.sum(weights != 0, dtype=jnp.int32)

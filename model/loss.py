"""The loss, from the last activations: sums over valid tokens, never means.

The logits are the largest array of a step. The head, the loss and their gradients are computed together, one chunk of
tokens at a time, so only one chunk's logits exist at once. They are in the compute type, before the cap. The loss and
the gradient each read them once, in one fusion that widens and caps them. The cap bounds them, so exp() cannot overflow
and no maximum is needed.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from model.gpt import GPT
from model.parallel import (
    Axes,
    all_gather_fsdp,
    order_gradients,
    platform,
    psum_over_tensor,
    reduce_scatter_fsdp,
    tensor_index,
)
from options.schema import ModelConfig


def softcap(logits: Float[Array, "*shape"], cap: float) -> Float[Array, "*shape"]:
    """Return `cap * tanh(logits / cap)` in float32 (arXiv:2408.00118)."""
    return cap * jnp.tanh(logits.astype(jnp.float32) / cap)


def log_sum_and_target(
    logits: Float[Array, "*tokens vocab"], targets: Int[Array, "*tokens"], cap: float
) -> tuple[Float[Array, "*tokens"], Float[Array, "*tokens"]]:
    """Return the log-sum-exp of the capped logits and the target's logit, in float32. A token's loss is their
    difference.

    In the step `logits` are this device's share of the vocabulary; two sums over `tensor`, of one number per token,
    suffice.
    """
    capped = softcap(logits, cap)
    log_sum = jnp.log(psum_over_tensor(jnp.sum(jnp.exp(capped), axis=-1)))
    if platform() in ("gpu", "cuda"):  # instead of the gather, a sum would make XLA write the capped logits in float32
        local = targets - tensor_index() * logits.shape[-1]
        target = softcap(jnp.take_along_axis(logits, local[..., None], axis=-1, mode="clip")[..., 0], cap)
        return log_sum, psum_over_tensor(jnp.where((local >= 0) & (local < logits.shape[-1]), target, 0))
    return log_sum, psum_over_tensor(jnp.sum(jnp.where(is_target(logits, targets), capped, 0), axis=-1))


def is_target(logits: Float[Array, "*tokens vocab"], targets: Int[Array, "*tokens"]) -> Bool[Array, "*tokens vocab"]:
    """Return which of this device's logits are the targets'."""
    share = logits.shape[-1]
    return jnp.arange(share) == (targets - tensor_index() * share)[..., None]


def cross_entropy(
    log_sum: Float[Array, "tokens"],
    target_logit: Float[Array, "tokens"],
    weights: Float[Array, "tokens"],
) -> Float[Array, ""]:
    """Return the sum over tokens of `weights * -log softmax(softcap(logits))[targets]`, in nats and float32."""
    return jnp.sum(weights * (log_sum - target_logit))


def cross_entropy_and_gradient(
    logits: Float[Array, "tokens vocab"],
    targets: Int[Array, "tokens"],
    weights: Float[Array, "tokens"],
    cap: float,
) -> tuple[Float[Array, ""], Float[Array, "tokens vocab"]]:
    """Return `cross_entropy`, and its gradient with respect to the logits, in their type."""
    log_sum, target_logit = log_sum_and_target(logits, targets, cap)

    def slope_of(logits: Array) -> Array:
        """Return the slope of the exponential of the capped logits: their gradient without a factor."""
        squashed = jnp.tanh(logits.astype(jnp.float32) / cap)
        return jnp.exp(cap * squashed) * (1 - squashed * squashed)

    # On a GPU XLA writes the logits and recomputes the slope; without the barrier it would write float32. Other
    # platforms keep the slope instead of the logits: a TPU computes it at the end of their product.
    if platform() in ("gpu", "cuda"):
        slope = slope_of(jax.lax.optimization_barrier(logits))
    else:
        slope = jax.lax.optimization_barrier(slope_of(logits).astype(logits.dtype))
    probability = jnp.exp(target_logit - log_sum)
    at_target = (weights * probability - weights) * (1 - jnp.square(target_logit / cap))
    others = (weights * jnp.exp(-log_sum))[:, None] * slope
    dlogits = jnp.where(is_target(logits, targets), at_target[:, None], others)
    return cross_entropy(log_sum, target_logit, weights), dlogits.astype(logits.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def head_loss(
    x: Float[Array, "tokens width"],
    share: Float[Array, "w_share v_share"],
    targets: Int[Array, "tokens"],
    weights: Float[Array, "tokens"],
    axes: Axes,
    config: ModelConfig,
) -> Float[Array, ""]:
    """Return `cross_entropy` of the logits `x @ kernel`; `kernel` is gathered from the head's shares over `fsdp`. As in
    model/layers.py, this is the plain expression."""
    kernel = all_gather_fsdp(share.astype(x.dtype), axes)

    def chunk(rows: tuple[Array, Array, Array]) -> Array:
        x, targets, weights = rows
        return cross_entropy(*log_sum_and_target(x @ kernel, targets, config.softcap), weights)

    return jnp.sum(jax.lax.map(chunk, _chunks((x, targets, weights), config)))


def _chunks(arrays: tuple[Array, ...], config: ModelConfig) -> Any:
    """Return the arrays [tokens, ...] as [chunks, tokens of a chunk, ...]."""
    return jax.tree.map(lambda a: a.reshape(config.loss_chunks, -1, *a.shape[1:]), arrays)


def _forward(
    x: Array, share: Array, targets: Array, weights: Array, axes: Axes, config: ModelConfig
) -> tuple[Array, tuple[Array, Array]]:
    kernel = all_gather_fsdp(share.astype(x.dtype), axes)

    def chunk(dkernel: Array, rows: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        x, targets, weights = rows
        loss, dlogits = cross_entropy_and_gradient(x @ kernel, targets, weights, config.softcap)
        of_chunk = jax.lax.dot_general(x, dlogits, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        dx, of_chunk = order_gradients(dlogits @ kernel.T, of_chunk)
        return dkernel + of_chunk, (loss, dx)

    chunks = _chunks((x, targets, weights), config)
    dkernel, (losses, dx) = jax.lax.scan(chunk, jnp.zeros_like(kernel, jnp.float32), chunks)
    return jnp.sum(losses), (dx.reshape(x.shape), reduce_scatter_fsdp(dkernel, axes))


def _backward(axes: Axes, config: ModelConfig, gradients: tuple[Array, Array], dloss: Array) -> tuple:
    dx, dshare = gradients
    return (dloss * dx).astype(dx.dtype), dloss * dshare, None, None


head_loss.defvjp(_forward, _backward)


def loss_sums(
    model: GPT,
    inputs: Int[Array, "batch length"],
    targets: Int[Array, "batch length"],
    weights: Float[Array, "batch length"],
    segment_ids: Int[Array, "batch length"] | None = None,
    dropout_keys: Key[Array, "batch"] | None = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Return `(loss_sum, token_count)` of one micro-batch: the loss in nats, and the number of targets with a weight
    other than 0."""
    x, _ = model.activations(inputs, segment_ids=segment_ids, dropout_keys=dropout_keys)
    head = model.lm_head
    x, flat_targets, flat_weights = x.reshape(-1, x.shape[-1]), targets.ravel(), weights.ravel()
    loss: Any = head_loss(x, head.kernel[...], flat_targets, flat_weights, head.axes, model.config)
    return loss, jnp.sum(weights != 0, dtype=jnp.int32)

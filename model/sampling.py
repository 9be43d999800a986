"""Sampling: tokens drawn from logits, for rows with their own options."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from model.keys import random_key


class Sampling(NamedTuple):
    """Options of sampling: for one text, or arrays for several rows."""

    temperature: float | Float[Array, "rows"] = 0.8
    """0 takes the likeliest token; higher is more varied."""
    top_k: int | Int[Array, "rows"] = 50
    """Draw from this many likeliest tokens, and from all that are as likely as the last of them; 0 draws from all."""
    top_p: float | Float[Array, "rows"] = 1.0
    """Draw from the fewest likeliest tokens that have this probability together, after `top_k`, and from all that are
    as likely as the last of them."""
    seed: int | Int[Array, "rows"] = 0


def draw(logits: Float[Array, "rows vocab"], positions: Int[Array, "rows"], sampling: Sampling) -> Int[Array, "rows"]:
    """Return a token for each row, from float32 logits. It depends only on the row's own options, seed and position."""
    hot = sampling.temperature > 0

    def drawn() -> Int[Array, "rows"]:
        # The likeliest token has 0, and the share 1, whatever is rounded: a low temperature makes numbers large.
        scaled = (logits - jnp.max(logits, axis=1, keepdims=True)) / jnp.where(hot, sampling.temperature, 1)[:, None]
        order = ordered(scaled)
        most = jnp.where(sampling.top_k == 0, jnp.inf, sampling.top_k)
        lowest = threshold(order, jnp.ones_like(scaled), most)
        shares = jnp.where(order >= lowest, jnp.exp(scaled), 0)

        def of_top_p() -> UInt32[Array, "rows 1"]:
            enough = jnp.where(sampling.top_p < 1, jnp.maximum(sampling.top_p, 1e-9) * jnp.sum(shares, axis=1), jnp.inf)
            return threshold(order, shares, enough)

        lowest = jax.lax.cond(jnp.any(sampling.top_p < 1), of_top_p, lambda: jnp.zeros_like(lowest))
        shares = jnp.where(order >= lowest, shares, 0)

        def uniform(seed: int | Array, position: Array) -> Array:
            return jax.random.uniform(jax.random.fold_in(random_key(seed), position))

        point = jax.vmap(uniform)(sampling.seed, positions) * sums(shares)[:, 0]
        return token_at(shares, point)

    likeliest = jnp.argmax(logits, axis=1)
    draws = jax.lax.cond(jnp.any(hot), drawn, lambda: likeliest)
    return jnp.where(hot, draws, likeliest)


def ordered(x: Float[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Return integers in the order of float32 numbers."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(1 << 31))


def threshold(
    order: UInt32[Array, "rows vocab"], weights: Float[Array, "rows vocab"], enough: Float[Array, "rows"]
) -> UInt32[Array, "rows 1"]:
    """Return the highest number for which the weights of all in `order` from it on sum to `enough`, otherwise 0.

    It is found bit by bit: a sort would take longer, and `jax.lax.top_k` needs the largest `top_k` to be compiled."""

    def with_bit(i: Array, low: Array) -> Array:
        high = low | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(sums(jnp.where(order >= high, weights, 0)) >= enough[:, None], high, low)

    return jax.lax.fori_loop(0, 32, with_bit, jnp.zeros_like(order[:, :1]))


def token_at(shares: Float[Array, "rows vocab"], points: Float[Array, "rows"]) -> Int[Array, "rows"]:
    """Return the token at each point, if tokens follow each other with their shares as lengths. It is also found bit by
    bit. Sums of fewer tokens have the same order, so no token with an empty share is chosen."""
    vocab = shares.shape[1]
    token, most = jnp.arange(vocab), 1 << (vocab - 1).bit_length()

    def with_bit(i: Array, low: Array) -> Array:
        high = low + (most >> (i + 1))
        return jnp.where(sums(jnp.where(token < high, shares, 0)) <= points[:, None], high, low)

    return jax.lax.fori_loop(0, most.bit_length() - 1, with_bit, jnp.zeros_like(shares[:, :1], int))[:, 0]


def sums(x: Float[Array, "rows vocab"]) -> Float[Array, "rows 1"]:
    """Return the sum of each row by a product, which takes a CPU half the time of `jnp.sum`."""
    return jnp.matmul(x, jnp.ones((x.shape[1], 1)), precision=jax.lax.Precision.HIGHEST)

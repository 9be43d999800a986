"""Rotary positions (arXiv:2104.09864), in nanochat's convention: halves of a head, turned by minus the angle."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotary_angles(
    positions: Int[Array, "length"], head_dim: int, base: float
) -> tuple[Float[Array, "length half"], Float[Array, "length half"]]:
    """(cos, sin) of `position * base^(-2i / head_dim)`, in float32."""
    frequencies = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "batch length heads head_dim"],
    angles: tuple[Float[Array, "length half"], Float[Array, "length half"]],
) -> Float[Array, "batch length heads head_dim"]:
    """Turns each pair (x[i], x[i + head_dim / 2]) by its position's angle, in float32; returned in x's type."""
    cos, sin = (a[None, :, None, :] for a in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1).astype(x.dtype)

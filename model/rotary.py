"""Rotary position embedding (arXiv:2104.09864), in nanochat's convention: the two halves of a head are the pairs."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.layers import EPSILON, saved
from model.parallel import platform

Angles = tuple[Float[Array, "*rows length head_dim"], Float[Array, "*rows length head_dim"]]
"""cos and sin for every channel; the sin of a pair's second channel is negative."""


def rotary_angles(positions: Int[Array, "*rows length"], head_dim: int, base: float) -> Angles:
    """Return cos and sin of the angles `position * base^(-2i / head_dim)`, in float32."""
    frequencies = base ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([sin, -sin], axis=-1)


def rotate(
    x: Float[Array, "batch length heads head_dim"], angles: Angles
) -> Float[Array, "batch length heads head_dim"]:
    """Rotate each pair (x[i], x[i + head_dim / 2]) by its position's angle, in float32."""
    cos, sin = (a[..., None, :] for a in angles)
    return x.astype(jnp.float32) * cos + _swap_halves(x) * sin


def _swap_halves(x: Array) -> Array:
    """Swap [a, b] to [b, a], in float32. On a TPU moving channels takes passes over memory. A product with a
    permutation matrix is as exact, and costs a hundredth of the network's other products."""
    half = x.shape[-1] // 2
    if platform() != "tpu":
        return jnp.roll(x, half, axis=-1).astype(jnp.float32)
    swap = jnp.roll(jnp.eye(2 * half, dtype=x.dtype), half, axis=0)
    return jnp.matmul(x, swap, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _sums_over_heads(a: Array, b: Array) -> Float[Array, "batch length heads 1"]:
    """Return the sum over each head's channels of a * b, in float32. On a TPU a sum along the lanes takes nine times
    the cycles of a product with ones. That product is as exact: HIGH splits 16-bit products of two bfloat16 into two of
    8 bits."""
    products = a.astype(jnp.float32) * b.astype(jnp.float32)
    if platform() != "tpu":
        return jnp.sum(products, axis=-1, keepdims=True)
    heads, channels = a.shape[2:]
    ones = jnp.repeat(jnp.eye(heads, dtype=jnp.float32), channels, axis=0)  # ones for a head's channels, in its column
    precision = jax.lax.Precision.HIGH if a.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.matmul(products.reshape(*a.shape[:2], -1), ones, precision=precision)[..., None]


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rotate_and_norm(
    x: Float[Array, "batch length heads head_dim"], angles: Angles, scale: float
) -> Float[Array, "batch length heads head_dim"]:
    """Return `scale * rms_norm(rotate(x))`, in float32 and rounded once to x's type. As in model/layers.py, this is the
    plain expression. The backward pass reads the result, which attention keeps anyway, but not x."""
    return (rotate(x, angles) * _factor(x, scale)).astype(x.dtype)


def _factor(x: Array, scale: float) -> Float[Array, "batch length heads 1"]:
    """Return the scale over the root mean square of x itself, since rotation keeps lengths."""
    return scale * jax.lax.rsqrt(_sums_over_heads(x, x) / x.shape[-1] + EPSILON)


def _forward(x: Array, angles: Angles, scale: float) -> tuple[Array, tuple[Array, Array, Angles]]:
    factor = saved(_factor(x, scale))
    y = saved((rotate(x, angles) * factor).astype(x.dtype))
    return y, (y, factor, angles)


def _backward(scale: float, residuals: tuple[Array, Array, Angles], dy: Array) -> tuple[Array, None]:
    y, factor, (cos, sin) = residuals
    along = _sums_over_heads(y, dy) / y.shape[-1] / scale**2
    dx = factor * (rotate(dy, (cos, -sin)) - along * rotate(y, (cos, -sin)))
    return dx.astype(dy.dtype), None


rotate_and_norm.defvjp(_forward, _backward)

"""The layers with parameters, and the norm without.

Parameters are float32 `nnx.Param`s; a product casts its matrix to the activations' type. Its backward pass is written
by hand so that, in bfloat16 compute, a matrix's gradient leaves the product in float32: left to itself, JAX would give
it the type of the cast matrix, and round every micro-batch's gradient to 8 bits before it is summed. A matrix's shares
are gathered where it is read, forward and backward, and so are never all held at once.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.parallel import gather, scatter, tensor_index


def rms_norm(x: Float[Array, "*shape channels"]) -> Float[Array, "*shape channels"]:
    """Root-mean-square norm (arXiv:1910.07467) over channels, without parameters, computed in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(
    x: Float[Array, "*shape i"], share: Float[Array, "i_share o_share"], width_axis: int
) -> Float[Array, "*shape o"]:
    """`x @ kernel` in x's type, `kernel` being the shares along `width_axis` made whole.

    The gradient to `share` (float32) is accumulated, summed over shares, and returned in float32.
    """
    return x @ gather(share.astype(x.dtype), width_axis)


def _matmul_forward(x: Array, share: Array, width_axis: int) -> tuple[Array, tuple[Array, Array]]:
    share = share.astype(x.dtype)
    return x @ gather(share, width_axis), (x, share)


def _matmul_backward(width_axis: int, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, share = residuals
    rows = tuple(range(x.ndim - 1))
    dkernel = jax.lax.dot_general(x, dy, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
    return dy @ gather(share, width_axis).T, scatter(dkernel, width_axis)


matmul.defvjp(_matmul_forward, _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(
    tokens: Int[Array, "*shape"], share: Float[Array, "v_share w_share"], dtype: jnp.dtype
) -> Float[Array, "*shape width"]:
    """The tokens' rows of the table, in `dtype`; zeros for those whose rows lie on another device along `tensor`.

    The gradient to `share` (float32) is accumulated in float32.
    """
    local = tokens - tensor_index() * share.shape[0]
    here = (local >= 0) & (local < share.shape[0])
    return jnp.where(here[..., None], gather(share.astype(dtype), 1)[local], 0)


def _embed_forward(tokens: Array, share: Array, dtype: jnp.dtype) -> tuple[Array, tuple[Array, Array]]:
    return embed(tokens, share, dtype), (tokens, share)


def _embed_backward(dtype: jnp.dtype, residuals: tuple[Array, Array], dy: Array) -> tuple[None, Array]:
    tokens, share = residuals
    local = tokens - tensor_index() * share.shape[0]
    local = jnp.where(local < 0, share.shape[0], local)  # beyond the end, as those past it: dropped
    table = jnp.zeros((share.shape[0], dy.shape[-1]), jnp.float32)
    return None, scatter(table.at[local].add(dy.astype(jnp.float32), mode="drop"), 1)


embed.defvjp(_embed_forward, _embed_backward)


class Linear(nnx.Module):
    """A matrix without bias, one of whose dimensions (`width_axis`) is the residual stream's width."""

    def __init__(self, inputs: int, outputs: int, init: nnx.Initializer, *, width_axis: int, rngs: nnx.Rngs):
        self.width_axis = width_axis
        self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs), jnp.float32), width_axis=width_axis)

    def __call__(self, x: Float[Array, "*shape i"]) -> Float[Array, "*shape o"]:
        return matmul(x, self.kernel[...], self.width_axis)


class Embedding(nnx.Module):
    """A table of a vector a token."""

    def __init__(self, vocab_size: int, width: int, init: nnx.Initializer, *, rngs: nnx.Rngs):
        self.table = nnx.Param(init(rngs.params(), (vocab_size, width), jnp.float32), width_axis=1)

    def __call__(self, tokens: Int[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape width"]:
        return embed(tokens, self.table[...], dtype)

"""The layers with parameters, and the norm without.

Parameters are float32 `nnx.Param`s; a product casts its matrix to the activations' type. Its backward pass is written
by hand so that, in bfloat16 compute, a matrix's gradient leaves the product in float32: left to itself, JAX would give
it the type of the cast matrix, and round every micro-batch's gradient to 8 bits before it is summed.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


def rms_norm(x: Float[Array, "*shape channels"]) -> Float[Array, "*shape channels"]:
    """Root-mean-square norm (arXiv:1910.07467) over channels, without parameters, computed in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


@jax.custom_vjp
def matmul(x: Float[Array, "*shape i"], kernel: Float[Array, "i o"]) -> Float[Array, "*shape o"]:
    """`x @ kernel` in x's type; the gradient to `kernel` (float32) is accumulated and returned in float32."""
    return x @ kernel.astype(x.dtype)


def _matmul_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    kernel = kernel.astype(x.dtype)
    return x @ kernel, (x, kernel)


def _matmul_backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    rows = tuple(range(x.ndim - 1))
    dkernel = jax.lax.dot_general(x, dy, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
    return dy @ kernel.T, dkernel


matmul.defvjp(_matmul_forward, _matmul_backward)


class Linear(nnx.Module):
    """A matrix without bias."""

    def __init__(self, inputs: int, outputs: int, init: nnx.Initializer, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs), jnp.float32))

    def __call__(self, x: Float[Array, "*shape i"]) -> Float[Array, "*shape o"]:
        return matmul(x, self.kernel[...])


class Embedding(nnx.Module):
    """A table of a vector a token."""

    def __init__(self, vocab_size: int, width: int, init: nnx.Initializer, *, rngs: nnx.Rngs):
        self.table = nnx.Param(init(rngs.params(), (vocab_size, width), jnp.float32))

    def __call__(self, tokens: Int[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape width"]:
        # Gathered before the cast, so that the gradient is scattered and summed in float32.
        return self.table[...][tokens].astype(dtype)

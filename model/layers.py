"""The layers with parameters, and the norm without.

Parameters are float32 `nnx.Param`s; a product casts its matrix to the activations' type. Its backward pass is written
by hand so that, in bfloat16 compute, a matrix's gradient leaves the product in float32. Automatic differentiation would
give it the type of the cast matrix, and round every micro-batch's gradient to 8 bits before the sum. A matrix is
all-gathered at each use, forward and backward, so only one gathered matrix exists at a time.

The function under each `jax.custom_vjp` is the plain expression. The backward pass below it equals its automatic
derivative: tests/training/test_step.py compares updates with a float64 reference.
"""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from model.parallel import Axes, all_gather_fsdp, order_gradients, platform, reduce_scatter_fsdp, tensor_index

EPSILON = 1e-6  # every norm adds it to the mean square
SAVED = "saved"
SEGMENT_BLOCK = 128  # rows in a block of `segment_sum`


def saved(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return the array, marked to be saved with `remat=products` (model.gpt.rematerialized)."""
    return checkpoint_name(x, SAVED)


@jax.custom_vjp
def rms_norm(x: Float[Array, "*shape channels"]) -> Float[Array, "*shape channels"]:
    """Return the root-mean-square norm (arXiv:1910.07467) over channels, without parameters; in float32.

    The backward pass reads the result, which the next operation keeps anyway, and one number per vector, but not x.
    """
    return (x.astype(jnp.float32) * inverse_rms(x)).astype(x.dtype)


def inverse_rms(x: Float[Array, "*shape channels"]) -> Float[Array, "*shape 1"]:
    """Return the factor of rms_norm."""
    return jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + EPSILON)


def _rms_norm_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    factor = inverse_rms(x)
    y = saved((x.astype(jnp.float32) * factor).astype(x.dtype))
    return y, (y, saved(factor))


def _rms_norm_backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array]:
    y, factor = residuals
    y, wide = y.astype(jnp.float32), dy.astype(jnp.float32)
    return ((factor * (wide - y * jnp.mean(y * wide, axis=-1, keepdims=True))).astype(dy.dtype),)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@jax.custom_vjp
def relu_squared(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return `max(x, 0)^2` (arXiv:2109.08668). The backward pass reads the root of the result, which the next product
    keeps anyway, but not x."""
    return jnp.square(jax.nn.relu(x))


def _relu_squared_forward(x: Array) -> tuple[Array, Array]:
    y = relu_squared(x)
    return y, y


def _relu_squared_backward(y: Array, dy: Array) -> tuple[Array]:
    return ((2 * jnp.sqrt(y.astype(jnp.float32)) * dy).astype(dy.dtype),)


relu_squared.defvjp(_relu_squared_forward, _relu_squared_backward)


def symmetric_uniform(bound: float) -> nnx.Initializer:
    """Return an initializer, uniform between minus and plus `bound`."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


Cut = tuple[int | None, int | None]
"""Channels of a head, for the inputs and the outputs of a product. That side of x, of the kernel and of the result is
[heads, channels]. None: one dimension. This keeps a head's channels along a TPU's lanes; a reshape after the product
would copy them (bench/LOG.md)."""


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def matmul(
    x: Float[Array, "*shape_and_inputs"], share: Float[Array, "i_share o_share"], axes: Axes, cut: Cut = (None, None)
) -> Float[Array, "*shape_and_outputs"]:
    """Return `x @ kernel` in x's type; `kernel` is gathered from the shares over `fsdp`. `cut` gives the sides with
    heads.

    The gradient with respect to `share` (float32) is accumulated, reduce-scattered and returned in float32.
    """
    return jnp.tensordot(x, _gathered_kernel(share.astype(x.dtype), axes, cut), 1 if cut[0] is None else 2)


def _gathered_kernel(share: Array, axes: Axes, cut: Cut) -> Array:
    """Return the kernel [*inputs, *outputs]. A share smaller than a head is a part of one."""
    kernel = all_gather_fsdp(share, axes)

    def sizes(size: int, head: int | None) -> tuple[int, ...]:
        return (size,) if head is None else (max(size // head, 1), min(size, head))

    return kernel.reshape(*sizes(kernel.shape[0], cut[0]), *sizes(kernel.shape[1], cut[1]))


def _matmul_forward(x: Array, share: Array, axes: Axes, cut: Cut) -> tuple[Array, tuple[Array, Array]]:
    share = share.astype(x.dtype)
    return matmul(x, share, axes, cut), (x, share)


def _matmul_backward(axes: Axes, cut: Cut, residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, share = residuals
    kernel = _gathered_kernel(share, axes, cut)
    outputs = 1 if cut[1] is None else 2
    rows = tuple(range(dy.ndim - outputs))
    dkernel = jax.lax.dot_general(x, dy, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
    of_outputs = tuple(range(dy.ndim - outputs, dy.ndim)), tuple(range(kernel.ndim - outputs, kernel.ndim))
    dx = jax.lax.dot_general(dy, kernel, (of_outputs, ((), ())))
    dx, dkernel = order_gradients(dx, dkernel.reshape(-1, math.prod(dy.shape[len(rows) :])))
    return dx, reduce_scatter_fsdp(dkernel, axes)


matmul.defvjp(_matmul_forward, _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embed(
    tokens: Int[Array, "*shape"], share: Float[Array, "v_share w_share"], axes: Axes, dtype: jnp.dtype
) -> Float[Array, "*shape width"]:
    """Return the tokens' rows of the table, in `dtype`; zeros for rows on another device along `tensor`.

    The gradient with respect to `share` (float32) is summed over the tokens in float32.
    """
    table = all_gather_fsdp(share.astype(dtype), axes)
    row = _row(tokens, table.shape[0], axes)
    return jnp.where((row < table.shape[0])[..., None], table.at[row].get(mode="clip"), 0)


def _embed_forward(tokens: Array, share: Array, axes: Axes, dtype: jnp.dtype) -> tuple[Array, tuple[Array, Array]]:
    return embed(tokens, share, axes, dtype), (tokens, share)


def _embed_backward(axes: Axes, dtype: jnp.dtype, residuals: tuple[Array, Array], dy: Array) -> tuple[None, Array]:
    tokens, share = residuals
    shape = jax.eval_shape(lambda: all_gather_fsdp(share, axes)).shape
    row = _row(tokens, shape[0], axes)
    if platform() in ("gpu", "cuda"):
        gradient = segment_sum(dy.reshape(-1, dy.shape[-1]), row.ravel(), shape[0])
    else:
        gradient = jnp.zeros(shape, jnp.float32).at[row].add(dy.astype(jnp.float32), mode="drop")
    return None, reduce_scatter_fsdp(gradient, axes)


def segment_sum(
    rows: Float[Array, "n width"], number: Int[Array, "n"], segments: int
) -> Float[Array, "segments width"]:
    """Return `result[number[i]] += rows[i]`, in float32. Numbers of `segments` or more are ignored; none may be
    negative.

    On GPUs XLA's scatter-add has no fixed order, so two runs would differ in their last bits. XLA's own remedy
    (`ScatterDeterminismExpander`) sorts every element of every row, and passes over all for each power of two.
    Here `number` alone determines the order. Rows are sorted by it and divided into blocks. A product with
    the mask "same number" sums within each block; one with the mask "number of this block's first row" adds the ends of
    other blocks.
    """
    fill = -len(number) % SEGMENT_BLOCK
    number = jnp.pad(number, (0, fill), constant_values=segments)
    # A stable sort by key: equal numbers stay in the order of their rows.
    number, order = jax.lax.sort_key_val(number, jnp.arange(len(number)))
    blocks = rows.at[order].get(mode="fill", fill_value=0).reshape(-1, SEGMENT_BLOCK, rows.shape[1])
    numbers = number.reshape(-1, SEGMENT_BLOCK)
    same = (numbers[:, :, None] == numbers[:, None, :]).astype(rows.dtype)
    exact = jax.lax.Precision.HIGHEST
    sums = jnp.einsum("brs,bsw->brw", same, blocks, precision=exact, preferred_element_type=jnp.float32)
    first, last = numbers[:, 0], numbers[:, -1]
    before = jnp.tril(first[:, None] == last[None, :], k=-1).astype(jnp.float32)
    carried = jnp.einsum("bc,cw->bw", before, sums[:, -1], precision=exact)
    # The position of each number's last row, which has its sum. None is written twice, so their order does not matter.
    here = jnp.arange(len(number))
    ends = jnp.append(number[1:] != number[:-1], True)
    last_row = (
        jnp.full(segments, -1).at[jnp.where(ends, number, segments + here)].set(here, mode="drop", unique_indices=True)
    )
    result = sums.reshape(-1, rows.shape[1])[last_row] + jnp.where(
        (first[last_row // SEGMENT_BLOCK] == jnp.arange(segments))[:, None], carried[last_row // SEGMENT_BLOCK], 0
    )
    return jnp.where((last_row >= 0)[:, None], result, 0)


def _row(tokens: Array, rows: int, axes: Axes) -> Array:
    """Return the tokens' row numbers in this device's share of the table. Rows on other devices get the number of
    rows."""
    if axes[0] != "tensor":
        return tokens
    local = tokens - tensor_index() * rows
    return jnp.where(local < 0, rows, local)


embed.defvjp(_embed_forward, _embed_backward)


def parameter(
    init: nnx.Initializer, shape: tuple[int, ...], *, axes: Axes, group: str, rngs: nnx.Rngs | None
) -> nnx.Param:
    """Return a float32 parameter. It declares the mesh axes that divide its dimensions, and its group, a field of
    options.schema.OptimizerConfig. Without `rngs` it is only a shape and a type."""
    value = jax.ShapeDtypeStruct(shape, jnp.float32) if rngs is None else init(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, axes=axes, group=group)


class Linear(nnx.Module):
    """A matrix without bias: a `parameter` [inputs, outputs]."""

    def __init__(
        self,
        shape: tuple[int, int],
        init: nnx.Initializer,
        *,
        axes: Axes,
        group: str,
        rngs: nnx.Rngs | None,
        cut: Cut = (None, None),
    ):
        self.axes, self.cut = axes, cut
        self.kernel = parameter(init, shape, axes=axes, group=group, rngs=rngs)

    def __call__(self, x: Float[Array, "*shape_and_inputs"]) -> Float[Array, "*shape_and_outputs"]:
        return matmul(x, self.kernel[...], self.axes, self.cut)


class Embedding(nnx.Module):
    """A table with one vector per token: a `parameter` [vocab_size, width]."""

    def __init__(
        self, vocab_size: int, width: int, init: nnx.Initializer, *, axes: Axes, group: str, rngs: nnx.Rngs | None
    ):
        self.axes = axes
        self.table = parameter(init, (vocab_size, width), axes=axes, group=group, rngs=rngs)

    def __call__(self, tokens: Int[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape width"]:
        return embed(tokens, self.table[...], self.axes, dtype)


def dropout(
    x: Float[Array, "batch length width"], rate: float, keys: Key[Array, "batch"] | None, number: int
) -> Float[Array, "batch length width"]:
    """Return x with a share `rate` of its elements set to zero and the others divided by `1 - rate`; without `keys`, x.
    A row's mask is a function of its key and of this dropout's `number` in the network."""
    if keys is None:
        return x
    mask = jax.vmap(lambda key: jax.random.bernoulli(jax.random.fold_in(key, number), 1 - rate, x.shape[1:]))(keys)
    return jnp.where(mask, x / (1 - rate), 0)


class Scalars(nnx.Module):
    """Numbers that multiply the residual stream, equal on every device."""

    def __init__(self, values: Sequence[float] | np.ndarray, *, group: str, rngs: nnx.Rngs | None):
        init = jax.nn.initializers.constant(np.asarray(values))
        self.values = parameter(init, (len(values),), axes=(None,), group=group, rngs=rngs)

    def times(self, i: int, x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Return x times the i-th number, in float32."""
        return self.values[...][i] * x.astype(jnp.float32)

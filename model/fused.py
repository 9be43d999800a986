"""The residual addition and the norm after it in one pass over memory, on GPUs and TPUs (Pallas). XLA writes the sum,
and reads it again after its mean square is known. Rows are computed by the same lines on both; only how they are
loaded differs."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jaxtyping import Array, Float

from model.kernels import unchecked
from model.layers import EPSILON, rms_norm, saved
from model.parallel import varying_as

Device = Literal["gpu", "tpu"]
TPU_ROWS = 128  # in a block
GPU_ROWS = 8  # that a block of 128 threads computes, one after the other
GPU_LANES = 128  # threads, which divide a row's channels


def plain_add_and_norm(
    x: Float[Array, "batch length width"], y: Float[Array, "batch length width"]
) -> tuple[Float[Array, "batch length width"], Float[Array, "batch length width"]]:
    """Return x + y and its norm: the plain expression of `add_and_norm`."""
    return x + y, rms_norm(x + y)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def add_and_norm(
    x: Float[Array, "batch length width"],
    y: Float[Array, "batch length width"],
    device: Device,
    interpret: bool = False,
) -> tuple[Float[Array, "batch length width"], Float[Array, "batch length width"]]:
    """Return x + y and its norm. The backward pass reads the norm and a number per row, as `rms_norm`'s does, and
    rounds once. `interpret` runs it anywhere, slowly."""
    return _forward(x, y, device, interpret)[0]


def forward_rows(spread: Callable, x: Array, y: Array) -> tuple[Array, Array, Array]:
    """Return the sums, their norms and the factor of each row. `spread` gives a row's number to its channels."""
    total = (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
    wide = total.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1) / x.shape[-1] + EPSILON)
    return total, (wide * spread(factor)).astype(x.dtype), factor


def backward_rows(spread: Callable, dtotal: Array, dnormed: Array, normed: Array, factor: Array) -> tuple[Array]:
    """Return the gradient of x, and of y, which is the same."""
    wide, normed = dnormed.astype(jnp.float32), normed.astype(jnp.float32)
    along = jnp.sum(normed * wide, axis=-1) / normed.shape[-1]
    dx = dtotal.astype(jnp.float32) + spread(factor) * (wide - normed * spread(along))
    return (dx.astype(dtotal.dtype),)


def _forward(x: Array, y: Array, device: Device, interpret: bool) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    run = partial(on_gpu if device == "gpu" else on_tpu, forward_rows, interpret, (True, True, False))
    total, normed, factor = varying_as(x, unchecked(run)(x, y))
    normed, factor = saved(normed), saved(factor)
    return (total, normed), (normed, factor)


def _backward(
    device: Device, interpret: bool, residuals: tuple[Array, Array], gradients: tuple[Array, Array]
) -> tuple[Array, Array]:
    run = partial(on_gpu if device == "gpu" else on_tpu, backward_rows, interpret, (True,))
    (dx,) = varying_as(gradients[0], unchecked(run)(*gradients, *residuals))
    return dx, dx


add_and_norm.defvjp(_forward, _backward)


def on_tpu(of_rows: Callable, interpret: bool, whole: tuple[bool, ...], *arrays: Array) -> tuple[Array, ...]:
    """Return `of_rows` of all rows, in blocks. For each result `whole` says whether a row has all channels or one
    number; those numbers are along the lanes, since a column would take 128 times the memory."""
    batch, length, width = arrays[0].shape
    rows, block = batch * length, min(TPU_ROWS, batch * length)

    def kernel(*refs: Any) -> None:
        values = [ref[...] if ref.shape[0] == block else ref[0] for ref in refs[: len(arrays)]]
        for ref, value in zip(refs[len(arrays) :], of_rows(lambda number: number[:, None], *values)):
            ref[...] = value if value.ndim == 2 else value[None]

    matrix, vector = pl.BlockSpec((block, width), lambda i: (i, 0)), pl.BlockSpec((1, block), lambda i: (0, i))
    results = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, block),),
        in_specs=[matrix if x.ndim == 3 else vector for x in arrays],
        out_specs=[matrix if full else vector for full in whole],
        out_shape=[
            jax.ShapeDtypeStruct((rows, width), arrays[0].dtype)
            if full
            else jax.ShapeDtypeStruct((1, rows), jnp.float32)
            for full in whole
        ],
        name=of_rows.__name__,
        interpret=interpret,
    )(*(x.reshape(rows, width) if x.ndim == 3 else x.reshape(1, rows) for x in arrays))
    return tuple(x.reshape((batch, length, width) if full else (batch, length)) for x, full in zip(results, whole))


def on_gpu(of_rows: Callable, interpret: bool, whole: tuple[bool, ...], *arrays: Array) -> tuple[Array, ...]:
    """Return `of_rows` of all rows, as `on_tpu` does. A row's channels stay in a warpgroup's registers."""
    from model.blocks import gpu

    batch, length, width = arrays[0].shape
    rows = batch * length

    def kernel(*refs: Any) -> None:
        first = jax.lax.axis_index("block") * GPU_ROWS

        def of_row(i: Array, _: None) -> None:
            results = of_rows(lambda number: number, *(ref[i] for ref in refs[: len(arrays)]))
            for ref, value in zip(refs[len(arrays) :], results):
                ref[i] = value

        jax.lax.fori_loop(first, jax.lax.min(first + GPU_ROWS, rows), of_row, None)

    results = gpu.kernel(
        kernel,
        out_type=tuple(
            jax.ShapeDtypeStruct((rows, width), arrays[0].dtype) if full else jax.ShapeDtypeStruct((rows,), jnp.float32)
            for full in whole
        ),
        grid=(pl.cdiv(rows, GPU_ROWS),),
        grid_names=("block",),
        kernel_name=of_rows.__name__,
        interpret=gpu.InterpretGPUParams() if interpret else None,
    )(*(x.reshape(rows, *x.shape[2:]) for x in arrays))
    return tuple(x.reshape((batch, length, width) if full else (batch, length)) for x, full in zip(results, whole))

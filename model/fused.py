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
from model.layers import EPSILON, saved
from model.parallel import varying_as

Device = Literal["gpu", "tpu"]
TPU_ROWS = 128  # in a block
GPU_ROWS = 8  # that a block of 128 threads computes, one after the other


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def add_and_norm(
    x: Float[Array, "batch length width"],
    y: Float[Array, "batch length width"],
    device: Device,
    interpret: bool = False,
) -> tuple[Float[Array, "batch length width"], Float[Array, "batch length width"]]:
    """Return x + y and its norm (`x + y, rms_norm(x + y)`). The backward pass reads the norm and a number per row, as
    `rms_norm`'s does, and rounds once. `interpret` runs it anywhere, slowly."""
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
    total, normed, factor = of_all_rows(forward_rows, device, interpret, x, y)
    normed, factor = saved(normed), saved(factor)
    return (total, normed), (normed, factor)


def _backward(device: Device, interpret: bool, residuals: tuple, gradients: tuple) -> tuple[Array, Array]:
    (dx,) = of_all_rows(backward_rows, device, interpret, *gradients, *residuals)
    return dx, dx


add_and_norm.defvjp(_forward, _backward)


def of_all_rows(of_rows: Callable, device: Device, interpret: bool, *arrays: Array) -> tuple[Array, ...]:
    """Return `of_rows` of all positions, on a device."""
    batch, length, width = arrays[0].shape
    matrix = jax.ShapeDtypeStruct((batch * length, width), arrays[0].dtype)
    vector = jax.ShapeDtypeStruct((batch * length,), jnp.float32)
    results = (matrix, matrix, vector) if of_rows is forward_rows else (matrix,)

    def run(*arrays: Array) -> tuple[Array, ...]:
        flat = [x.reshape(-1, *x.shape[2:]) for x in arrays]
        outputs = (on_gpu if device == "gpu" else on_tpu)(of_rows, results, interpret, *flat)
        return tuple(x.reshape(batch, length, *like.shape[1:]) for x, like in zip(outputs, results))

    return varying_as(arrays[0], unchecked(run)(*arrays))


def on_tpu(of_rows: Callable, results: tuple, interpret: bool, *arrays: Array) -> tuple[Array, ...]:
    """Return `of_rows` in blocks of rows. Numbers are along the lanes: a column would take 128 times the memory."""
    rows, width = arrays[0].shape
    block = min(TPU_ROWS, rows)

    def kernel(*refs: Any) -> None:
        values = [ref[...] if x.ndim == 2 else ref[0] for ref, x in zip(refs, arrays)]
        for ref, value in zip(refs[len(arrays) :], of_rows(lambda number: number[:, None], *values)):
            ref[...] = value if value.ndim == 2 else value[None]

    specs = {2: pl.BlockSpec((block, width), lambda i: (i, 0)), 1: pl.BlockSpec((1, block), lambda i: (0, i))}
    shape = lambda x: x.shape if x.ndim == 2 else (1, rows)
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, block),),
        in_specs=[specs[x.ndim] for x in arrays],
        out_specs=[specs[x.ndim] for x in results],
        out_shape=[jax.ShapeDtypeStruct(shape(x), x.dtype) for x in results],
        name=of_rows.__name__,
        interpret=interpret,
    )(*(x.reshape(shape(x)) for x in arrays))


def on_gpu(of_rows: Callable, results: tuple, interpret: bool, *arrays: Array) -> tuple[Array, ...]:
    """Return `of_rows` row by row. A row's channels stay in the registers of one warpgroup."""
    from model.blocks import gpu

    rows = len(arrays[0])

    def kernel(*refs: Any) -> None:
        first = jax.lax.axis_index("block") * GPU_ROWS

        def of_row(i: Array, _: None) -> None:
            values = of_rows(lambda number: number, *(ref[i] for ref in refs[: len(arrays)]))
            for ref, value in zip(refs[len(arrays) :], values):
                ref[i] = value

        jax.lax.fori_loop(first, jax.lax.min(first + GPU_ROWS, rows), of_row, None)

    return gpu.kernel(
        kernel,
        out_type=results,
        grid=(pl.cdiv(rows, GPU_ROWS),),
        grid_names=("block",),
        kernel_name=of_rows.__name__,
        interpret=gpu.InterpretGPUParams() if interpret else None,
    )(*arrays)

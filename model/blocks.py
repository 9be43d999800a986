"""Operations of a Hopper GPU's warpgroup on blocks in registers and in shared memory, for model/hopper.py: thin names
for those of Pallas (Mosaic GPU)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as mosaic_gpu
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

gpu: Any = mosaic_gpu  # pyright reads the older JAX, whose names differ
ROWS = 64  # of a block: the tensor cores multiply as many at a time
WARPGROUPS = 2  # that compute; another one copies
STAGES = 2  # steps whose blocks are in shared memory
BLOCK, OF_ROWS, OF_COLUMNS = gpu.Layout.WGMMA, gpu.Layout.WGMMA.reduce(1), gpu.Layout.WGMMA.reduce(0)  # in registers


def pipeline(step: Callable, compute: Callable, grid: tuple, blocks: list) -> Callable:
    """Return a function of references. It runs `compute`, whose argument carries values through the steps of `grid`,
    while another warpgroup copies the blocks of the next step."""
    return gpu.emit_pipeline_warp_specialized(
        step,
        grid=grid,
        in_specs=blocks,
        max_concurrent_steps=STAGES,
        memory_registers=40,
        wg_axis="warpgroup",
        num_compute_wgs=WARPGROUPS,
        manual_consumed_barriers=True,
        compute_context=compute,
    )


def tiling(like: Any) -> tuple:
    """Return how the tensor cores read a matrix of this type in shared memory."""
    return gpu.TilingTransform((8, 128 // like.dtype.itemsize)), gpu.SwizzleTransform(128)


def matrices(like: Any) -> Any:
    """Return shared memory for ROWS positions of each warpgroup."""
    return gpu.SMEM((WARPGROUPS, ROWS, like.shape[-1]), like.dtype, transforms=tiling(like))


def vector(ref: Any) -> Array:
    """Read a number for each row of a block."""
    return gpu.load(ref, layout=OF_ROWS, optimized=False)


def zeros(columns: int) -> Float[Array, "rows columns"]:
    return gpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), BLOCK)


def numbers() -> Int[Array, "rows"]:
    """Return the numbers of a block's rows."""
    return gpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=OF_ROWS)


def along_rows(x: Array, shape: tuple[int, ...]) -> Array:
    """Return a block with one number in each row."""
    return jax.lax.broadcast_in_dim(x, shape, [0])


def masked(
    x: Float[Array, "rows columns"], value: float, partly: Bool[Array, ""], low: Array, high: Array
) -> Float[Array, "rows columns"]:
    """Return a block with `value` in the columns outside `low` to `high`, numbers for each row. Only a block that is
    `partly` hidden takes the time."""

    def mask() -> Array:
        column = gpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=BLOCK)
        return jnp.where((column >= along_rows(low, x.shape)) & (column <= along_rows(high, x.shape)), x, value)

    return jax.lax.cond(partly, mask, lambda: x)


def product(a: Any, b: Any, shape: tuple[int, int]) -> Float[Array, "rows columns"]:
    """Return the product of two blocks in shared memory, in float32."""

    def multiply(sum: Any) -> Array:
        gpu.wgmma(sum, a, b)
        return sum[...]

    return pl.run_scoped(multiply, gpu.ACC(shape, jnp.float32))


def add_product(sum: Array, a: Array, b: Any, interpret: bool) -> Float[Array, "rows columns"]:
    """Return `sum + a b`, with `b` in shared memory. JAX's interpreter lacks this instruction."""
    if interpret:
        return sum + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda sum: gpu.wgmma(sum, a, b))(gpu.ACC.init(sum))

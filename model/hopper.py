"""Attention for Hopper GPUs, which skips the blocks of scores that a window or documents hide, forward and backward.

cuDNN computes what a window hides, and takes no documents. These kernels (Pallas, Mosaic GPU) have the structure of
FlashAttention 3 (arXiv:2407.08608): a warpgroup copies blocks into shared memory, and others multiply them. One
warpgroup sums each gradient, in a fixed order: equal runs have equal bits. `model.attention.plain_attention` is the
plain expression.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.blocks import (
    OF_COLUMNS,
    OF_ROWS,
    ROWS,
    WARPGROUPS,
    add_product,
    along_rows,
    gpu,
    masked,
    matrices,
    numbers,
    pipeline,
    product,
    tiling,
    vector,
    zeros,
)
from model.kernels import unchecked
from model.layers import saved
from model.parallel import varying_as

TILE = ROWS * WARPGROUPS  # queries, or keys, of a block of threads; rows are padded to a multiple
KEYS = 128  # in a step of the forward pass
STEP = 64  # keys, or queries, in a step of the backward pass
HIDDEN = -1e30  # a hidden score. It is finite, so a block in which a query sees no key leaves no NaN
PLACE = ("row", "head", "tile", "warpgroup")  # of a thread
LOG2E = math.log2(math.e)  # GPUs compute powers of 2


def attention(
    q: Float[Array, "batch length heads head_dim"],
    k: Float[Array, "batch length kv_heads head_dim"],
    v: Float[Array, "batch length kv_heads head_dim"],
    segment_ids: Int[Array, "batch length"] | None,
    window: int | None,
    interpret: bool = False,
) -> Float[Array, "batch length heads head_dim"]:
    """Return causal attention of scaled queries. Each document of `segment_ids` is one run of equal ids. `interpret`
    runs it anywhere, slowly."""
    length = q.shape[1]

    def padded(x: Array, mode: str = "constant") -> Array:
        return jnp.pad(x, [(0, -length % TILE if i == 1 else 0) for i in range(x.ndim)], mode)

    ids = None if segment_ids is None else padded(segment_ids, "edge")
    y: Array = _attention(padded(q), padded(k), padded(v), ids, window, interpret)
    return y[:, :length]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None, interpret: bool) -> Array:
    return _forward(q, k, v, segment_ids, window, interpret)[0]


def _forward(
    q: Array, k: Array, v: Array, segment_ids: Array | None, window: int | None, interpret: bool
) -> tuple[Array, tuple]:
    def run(q: Array, k: Array, v: Array, segment_ids: Array | None) -> tuple[Array, Array]:
        first, _ = bounds(segment_ids, window, q.shape[:2])
        sums = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
        scratch = matrices(q), gpu.SMEM((WARPGROUPS, ROWS), jnp.float32), gpu.Barrier(num_barriers=WARPGROUPS)
        return launch(forward_kernel, q.shape, (q, sums), scratch, interpret)(q, k, v, first)

    y, sums = varying_as(q, unchecked(run)(q, k, v, segment_ids))
    y, sums = saved(y), saved(sums)
    return y, (q, k, v, segment_ids, y, sums)


def _backward(window: int | None, interpret: bool, residuals: tuple, dy: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, segment_ids, y, sums = residuals
    along = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1).swapaxes(1, 2)

    def run(segment_ids: Array | None, *arrays: Array) -> tuple[Array, Array, Array]:
        first, last = bounds(segment_ids, window, q.shape[:2])
        scratch = matrices(q), matrices(q), gpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS)
        dk, dv = launch(keys_kernel, k.shape, (k, v), scratch, interpret)(*arrays, last)
        (dq,) = launch(queries_kernel, q.shape, (q,), scratch, interpret)(*arrays, first)
        return dq, dk, dv

    return *varying_as(dy, unchecked(run)(segment_ids, q, k, v, dy, sums, along)), None


_attention.defvjp(_forward, _backward)


def bounds(
    segment_ids: Int[Array, "batch length"] | None, window: int | None, shape: tuple[int, ...]
) -> tuple[Int[Array, "batch length"], Int[Array, "batch length"]]:
    """Return the first key that each query sees, and the last query that sees each key. Neither decreases along a row,
    so those of a block's first and last position are the block's."""
    here, end = jnp.broadcast_to(jnp.arange(shape[1]), shape), shape[1] - 1
    first, last = jnp.zeros_like(here), jnp.full_like(here, end)
    if window is not None:
        first, last = jnp.maximum(first, here - window), jnp.minimum(last, here + window)
    if segment_ids is not None:
        starts = jnp.diff(segment_ids, prepend=segment_ids[:, :1]) != 0
        ends = jnp.diff(segment_ids, append=segment_ids[:, -1:]) != 0
        first = jnp.maximum(first, jax.lax.cummax(jnp.where(starts, here, 0), axis=1))
        last = jnp.minimum(last, jax.lax.cummin(jnp.where(ends, here, end), axis=1, reverse=True))
    return first, last


def launch(kernel: Callable, shape: tuple[int, ...], outputs: tuple, scratch: tuple, interpret: bool) -> Callable:
    """Return a function of arrays. It runs the kernel in a block of threads for each tile, head and row of `shape`."""
    batch, length, heads, _ = shape
    return gpu.kernel(
        partial(kernel, interpret),
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs),
        scratch_types=scratch,
        grid=(heads, length // TILE, batch),
        grid_names=("head", "tile", "row"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=kernel.__name__,
        compiler_params=gpu.CompilerParams(approx_math=True),
        interpret=gpu.InterpretGPUParams() if interpret else None,
    )


def forward_kernel(interpret: bool, *refs: Any) -> None:
    """Write y, and the log2 of the sum of each query's exponentials."""
    q_ref, k_ref, v_ref, first_ref, y_ref, sums_ref, q_smem, sums_smem, arrived = refs
    row, head, tile, warpgroup = map(jax.lax.axis_index, PLACE)
    _, length, heads, head_dim = q_ref.shape
    start = length - TILE * (tile + 1)  # the tiles with most keys come first
    queries = start + warpgroup * ROWS
    rows = pl.ds(queries, ROWS)
    low = jax.lax.div(first_ref[row, start], KEYS)

    def compute(over_keys: Callable) -> None:
        gpu.copy_gmem_to_smem(q_ref.at[row, rows, head], q_smem.at[warpgroup], arrived.at[warpgroup])
        first = vector(first_ref.at[row, rows])
        most = gpu.layout_cast(jnp.full((ROWS,), HIDDEN, jnp.float32), OF_ROWS)
        gpu.barrier_wait(arrived.at[warpgroup])
        y, most, total, _ = over_keys((zeros(head_dim), most, most * 0, first))
        q_smem[warpgroup] = (y / along_rows(total, y.shape)).astype(q_smem.dtype)
        sums_smem[warpgroup] = most + jnp.log(total) * LOG2E
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(q_smem.at[warpgroup], y_ref.at[row, rows, head])
        gpu.copy_smem_to_gmem(sums_smem.at[warpgroup], sums_ref.at[row, head, rows])
        gpu.wait_smem_to_gmem(0)

    def of_step(index: tuple, k_smem: Any, v_smem: Any, k_read: Any, v_read: Any, carry: tuple) -> tuple:
        y, most, total, first = carry
        keys = (low + index[0]) * KEYS
        scores = product(q_smem.at[warpgroup], k_smem.T, (ROWS, KEYS)) * LOG2E
        gpu.barrier_arrive(k_read)
        partly = (keys + KEYS - 1 > queries) | (keys < first_ref[row, queries + ROWS - 1])
        scores = masked(scores, HIDDEN, partly, first - keys, numbers() + (queries - keys))
        new = jnp.maximum(most, scores.max(axis=1))
        shares, shrunk = jnp.exp2(scores - along_rows(new, scores.shape)), jnp.exp2(most - new)
        total = total * shrunk + shares.sum(axis=1)
        y = add_product(y * along_rows(shrunk, y.shape), shares.astype(v_smem.dtype), v_smem, interpret)
        gpu.barrier_arrive(v_read)
        return y, new, total, first

    blocks = [gpu.BlockSpec((KEYS, head_dim), lambda i: (low + i, 0), transforms=tiling(k_ref)) for _ in "kv"]
    k_ref, v_ref = (ref.at[row, :, jax.lax.div(head, heads // k_ref.shape[2])] for ref in (k_ref, v_ref))
    pipeline(of_step, compute, (pl.cdiv(start + TILE, KEYS) - low,), blocks)(k_ref, v_ref)


def queries_kernel(interpret: bool, *refs: Any) -> None:
    """Write the gradient of the queries."""
    q_ref, k_ref, v_ref, dy_ref, sums_ref, along_ref, first_ref, dq_ref, q_smem, dy_smem, arrived = refs
    row, head, tile, warpgroup = map(jax.lax.axis_index, PLACE)
    _, length, heads, head_dim = q_ref.shape
    start = length - TILE * (tile + 1)
    queries = start + warpgroup * ROWS
    rows = pl.ds(queries, ROWS)
    low = jax.lax.div(first_ref[row, start], STEP)

    def compute(over_keys: Callable) -> None:
        for ref, smem in ((q_ref, q_smem), (dy_ref, dy_smem)):
            gpu.copy_gmem_to_smem(ref.at[row, rows, head], smem.at[warpgroup], arrived.at[warpgroup])
        of_rows = vector(sums_ref.at[row, head, rows]), vector(along_ref.at[row, head, rows])
        first = vector(first_ref.at[row, rows])
        gpu.barrier_wait(arrived.at[warpgroup])
        dq, *_ = over_keys((zeros(head_dim), *of_rows, first))
        q_smem[warpgroup] = dq.astype(q_smem.dtype)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(q_smem.at[warpgroup], dq_ref.at[row, rows, head])
        gpu.wait_smem_to_gmem(0)

    def of_step(index: tuple, k_smem: Any, v_smem: Any, k_read: Any, v_read: Any, carry: tuple) -> tuple:
        dq, sums, along, first = carry
        keys = (low + index[0]) * STEP
        scores = product(q_smem.at[warpgroup], k_smem.T, (ROWS, STEP)) * LOG2E
        dshares = product(dy_smem.at[warpgroup], v_smem.T, (ROWS, STEP))
        gpu.barrier_arrive(v_read)
        partly = (keys + STEP - 1 > queries) | (keys < first_ref[row, queries + ROWS - 1])
        scores = masked(scores, HIDDEN, partly, first - keys, numbers() + (queries - keys))
        dscores = jnp.exp2(scores - along_rows(sums, scores.shape)) * (dshares - along_rows(along, scores.shape))
        dq = add_product(dq, dscores.astype(k_smem.dtype), k_smem, interpret)
        gpu.barrier_arrive(k_read)
        return dq, sums, along, first

    blocks = [gpu.BlockSpec((STEP, head_dim), lambda i: (low + i, 0), transforms=tiling(k_ref)) for _ in "kv"]
    k_ref, v_ref = (ref.at[row, :, jax.lax.div(head, heads // k_ref.shape[2])] for ref in (k_ref, v_ref))
    pipeline(of_step, compute, (pl.cdiv(start + TILE, STEP) - low,), blocks)(k_ref, v_ref)


def keys_kernel(interpret: bool, *refs: Any) -> None:
    """Write the gradients of keys and values: sums over the queries that see them, of all heads of their group. Rows of
    the scores are keys here, and columns are queries."""
    q_ref, k_ref, v_ref, dy_ref, sums_ref, along_ref, last_ref, dk_ref, dv_ref, k_smem, v_smem, arrived = refs
    row, head, tile, warpgroup = map(jax.lax.axis_index, PLACE)
    head_dim, group = q_ref.shape[3], q_ref.shape[2] // k_ref.shape[2]
    keys = tile * TILE + warpgroup * ROWS
    rows = pl.ds(keys, ROWS)
    low = tile * (TILE // STEP)
    high = jax.lax.div(last_ref[row, tile * TILE + TILE - 1], STEP) + 1

    def compute(over_queries: Callable) -> None:
        for ref, smem in ((k_ref, k_smem), (v_ref, v_smem)):
            gpu.copy_gmem_to_smem(ref.at[row, rows, head], smem.at[warpgroup], arrived.at[warpgroup])
        last = vector(last_ref.at[row, rows])
        gpu.barrier_wait(arrived.at[warpgroup])
        dk, dv, _ = over_queries((zeros(head_dim), zeros(head_dim), last))
        k_smem[warpgroup], v_smem[warpgroup] = dk.astype(k_smem.dtype), dv.astype(v_smem.dtype)
        gpu.commit_smem()
        for smem, ref in ((k_smem, dk_ref), (v_smem, dv_ref)):
            gpu.copy_smem_to_gmem(smem.at[warpgroup], ref.at[row, rows, head])
        gpu.wait_smem_to_gmem(0)

    def of_step(index: tuple, *arguments: Any) -> tuple:
        q_smem, dy_smem, sums_smem, along_smem, q_read, dy_read, sums_read, along_read, (dk, dv, last) = arguments
        shape, queries = (ROWS, STEP), (low + index[1]) * STEP
        along_columns = lambda smem: jax.lax.broadcast_in_dim(gpu.load(smem, layout=OF_COLUMNS), shape, [1])
        scores = product(k_smem.at[warpgroup], q_smem.T, shape) * LOG2E
        partly = (keys + ROWS - 1 > queries) | (queries + STEP - 1 > last_ref[row, keys])
        scores = masked(scores, HIDDEN, partly, numbers() + (keys - queries), last - queries)
        shares = jnp.exp2(scores - along_columns(sums_smem))
        gpu.barrier_arrive(sums_read)
        dv = add_product(dv, shares.astype(dy_smem.dtype), dy_smem, interpret)
        dshares = product(v_smem.at[warpgroup], dy_smem.T, shape)
        gpu.barrier_arrive(dy_read)
        dscores = shares * (dshares - along_columns(along_smem))
        gpu.barrier_arrive(along_read)
        dk = add_product(dk, dscores.astype(q_smem.dtype), q_smem, interpret)
        gpu.barrier_arrive(q_read)
        return dk, dv, last

    shape, of_head = (STEP, None, head_dim), lambda i: head * group + i
    blocks = [gpu.BlockSpec(shape, lambda i, j: (low + j, of_head(i), 0), transforms=tiling(q_ref)) for _ in "qd"]
    vectors = [gpu.BlockSpec((None, STEP), lambda i, j: (of_head(i), low + j)) for _ in "sa"]
    of_row = (ref.at[row] for ref in (q_ref, dy_ref, sums_ref, along_ref))
    pipeline(of_step, compute, (group, high - low), blocks + vectors)(*of_row)

"""Sums of rows by their number without a scatter-add, for GPUs. XLA's scatter-add has no fixed order there, so two runs
differ in their last bits. XLA's own remedy (`ScatterDeterminismExpander`) sorts every element of every row, and passes
over all of them for each power of two. This module sorts only the rows' numbers, and sums by products.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 128


def segment_sum(
    rows: Float[Array, "n width"], number: Int[Array, "n"], segments: int
) -> Float[Array, "segments width"]:
    """Return `result[number[i]] += rows[i]`, in float32. Numbers of `segments` or more are ignored; none may be
    negative.

    `number` alone determines the order of the additions. Rows are sorted by it and divided into blocks. A product with
    the mask "same number" sums within each block; one with the mask "number of this block's first row" adds the ends of
    other blocks.
    """
    fill = -len(number) % BLOCK
    number = jnp.pad(number, (0, fill), constant_values=segments)
    # A stable sort by key: equal numbers stay in the order of their rows.
    number, order = jax.lax.sort_key_val(number, jnp.arange(len(number)))
    blocks = rows.at[order].get(mode="fill", fill_value=0).reshape(-1, BLOCK, rows.shape[1])
    numbers = number.reshape(-1, BLOCK)
    same = (numbers[:, :, None] == numbers[:, None, :]).astype(rows.dtype)
    exact = jax.lax.Precision.HIGHEST
    sums = jnp.einsum("brs,bsw->brw", same, blocks, precision=exact, preferred_element_type=jnp.float32)
    first, last = numbers[:, 0], numbers[:, -1]
    before = jnp.tril(first[:, None] == last[None, :], k=-1).astype(jnp.float32)
    carried = jnp.einsum("bc,cw->bw", before, sums[:, -1], precision=exact)
    # The place of each number's last row, which has its sum. None is written twice, so their order does not matter.
    here = jnp.arange(len(number))
    ends = jnp.append(number[1:] != number[:-1], True)
    place = (
        jnp.full(segments, -1).at[jnp.where(ends, number, segments + here)].set(here, mode="drop", unique_indices=True)
    )
    result = sums.reshape(-1, rows.shape[1])[place] + jnp.where(
        (first[place // BLOCK] == jnp.arange(segments))[:, None], carried[place // BLOCK], 0
    )
    return jnp.where((place >= 0)[:, None], result, 0)

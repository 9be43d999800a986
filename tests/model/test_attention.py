"""Compare attention with its definition."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import Places, attend, attention_in_blocks

QUERIES = 32  # instead of 256: short rows have many blocks


@pytest.mark.parametrize(
    ("length", "window", "segments", "kernel"),
    [(200, None, False, "plain"), (200, 70, True, "plain"), (232, None, True, "blocks"), (232, 100, False, "blocks")],
)
def test_blocks_of_queries_change_neither_values_nor_gradients(length, window, segments, kernel, monkeypatch):
    """Compare with jax.nn.dot_product_attention at lengths that blocks do not divide."""
    monkeypatch.setattr("model.attention.QUERIES", QUERIES)
    generator = np.random.default_rng(0)
    q = jnp.asarray(generator.standard_normal((2, length, 4, 8)), jnp.float32)
    k, v = (jnp.asarray(generator.standard_normal((2, length, 2, 8)), jnp.float32) for _ in range(2))
    weights = generator.standard_normal(q.shape, np.float32)
    ids = jnp.asarray(np.sort(generator.integers(0, 5, (2, length)), axis=1), jnp.int32) if segments else None
    mask = None if ids is None else (ids[:, :, None] == ids[:, None, :])[:, None]
    window_size = None if window is None else (window, 0)

    def theirs(q, k, v):
        y = jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=1.0, is_causal=True, local_window_size=window_size, implementation="xla"
        )
        return jnp.sum(y * weights)

    def ours(q, k, v):
        if kernel == "plain":
            return jnp.sum(attend(q, k, v, segment_ids=ids, window=window) * weights)
        return jnp.sum(attention_in_blocks(q, k, v, Places(jnp.arange(length), ids), window) * weights)

    for mine, other in zip(
        *(jax.tree.leaves(jax.jit(jax.value_and_grad(f, (0, 1, 2)))(q, k, v)) for f in (ours, theirs))
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=2e-5)


def test_queries_and_their_gradients_are_not_multiplied_after_they_were_rounded():
    """Scale queries in float32, in `rotate_and_norm`, before they are rounded to bfloat16."""
    q = jax.ShapeDtypeStruct((2, 6, 4, 8), jnp.bfloat16)
    program = jax.make_jaxpr(lambda q, k, v: jax.vjp(attend, q, k, v)[1](q))(q, q, q)
    assert " = dot_general" in str(program) and not re.search(r":bf16\[[\d,]*\] = mul", str(program))


def temporaries(length):
    """Return the bytes of a gradient's temporaries, with a document mask."""
    q = jax.ShapeDtypeStruct((1, length, 2, 32), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)
    loss = lambda q, k, v, ids: jnp.sum(jnp.sin(attend(q, k, v, segment_ids=ids)))
    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, q, q, ids).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.medium
def test_without_a_kernel_memory_is_linear_in_the_length():
    """Only a CPU keeps scores, of up to 2,048 positions (test_kernels.py)."""
    assert temporaries(8192) <= 2.05 * temporaries(4096)


def test_its_gradients_are_those_of_float64_in_bfloat16_too(monkeypatch):
    """Gradients of keys and values sum over many blocks of queries. They must be rounded once, not per block."""
    monkeypatch.setattr("model.attention.QUERIES", QUERIES)
    generator = np.random.default_rng(0)
    length = 32 * QUERIES
    draw = lambda heads: jnp.asarray(generator.standard_normal((1, length, heads, 16)), jnp.bfloat16)
    q, k, v, weights = draw(2), draw(1), draw(1), draw(2)
    places = Places(jnp.arange(length), None)

    def gradient(dtype):
        loss = lambda v: jnp.sum(
            (attention_in_blocks(*(x.astype(dtype) for x in (q, k, v)), places, None)).astype(jnp.float32) * weights
        )
        return jax.jit(jax.grad(loss))(v).astype(jnp.float32)

    exact, ours = gradient(jnp.float32), gradient(jnp.bfloat16)
    assert jnp.linalg.norm(ours - exact) < 0.006 * jnp.linalg.norm(exact)


@pytest.mark.parametrize(("window", "share"), [(None, 0.6), (256, 0.25)])
def test_masked_scores_are_not_computed(window, share):
    length, heads, head_dim = 2048, 2, 64
    q = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.float32)
    cost = jax.jit(lambda q: attend(q, q, q, window=window)).lower(q).cost_analysis()
    assert cost["flops"] < share * (4 * head_dim + 8) * heads * length**2  # two products, and some work per score

"""Compare attention for Hopper GPUs, interpreted, with the plain expression, and compile it for an H100."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model import fused
from model.attention import Places, plain_attention
from model.gpt import GPT
from model.kernels import HAS_PALLAS, attention_kernel
from model.loss import loss_sums
from tests.helpers import distance, perturbed, random_rows, tiny_config

if not HAS_PALLAS:
    pytest.skip("this JAX's Pallas for GPUs has other names", allow_module_level=True)

from model import hopper
from model.hopper import attention, bounds


def random(heads: int, shape: tuple[int, int], dtype=jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((*shape, heads, 64)) / 64**0.25, dtype)


def documents(shape: tuple[int, int]) -> jax.Array:
    return jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, shape), axis=1), jnp.int32)


@pytest.mark.parametrize(("ids", "window"), [(False, None), (False, 9), (True, None), (True, 9)])
def test_bounds_are_those_of_the_mask(ids, window):
    shape = (3, 41)
    segments = documents(shape) if ids else None
    places = Places(jnp.arange(41), segments)
    seen = np.broadcast_to(places.see(places, window)[:, 0], (3, 41, 41))
    first, last = bounds(segments, window, shape)
    assert np.array_equal(first, seen.argmax(axis=2))
    assert np.array_equal(last, 40 - seen[:, ::-1].argmax(axis=1))
    assert (np.diff(first) >= 0).all() and (np.diff(last) >= 0).all()


def value_and_gradients(function, q, k, v, dy, ids=None):
    def of(q, k, v, dy, ids):
        y, backward = jax.vjp(lambda q, k, v: function(q, k, v, ids), q, k, v)
        return y, *backward(dy)

    return jax.jit(of)(q, k, v, dy, ids)


@pytest.mark.slow
def test_values_and_gradients_are_the_plain_expressions():
    """Neither tiles nor blocks divide 201 positions, and two query heads share a key head. A row alone has the bits of
    the row in a batch, so micro-batches change nothing."""
    shape, window = (2, 201), 70
    q, dy, k, v = (random(heads, shape, seed=seed) for seed, heads in enumerate((2, 2, 1, 1)))
    ids = documents(shape)

    def plain(q, k, v, ids):
        places = Places(jnp.arange(201), ids)
        return plain_attention(q, k, v, places.see(places, window))

    ours = lambda q, k, v, ids: attention(q, k, v, ids, window, interpret=True)
    batch = value_and_gradients(ours, q, k, v, dy, ids)
    for mine, expected in zip(batch, value_and_gradients(plain, q, k, v, dy, ids), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=2e-5)
    alone = value_and_gradients(ours, *(x[1:] for x in (q, k, v, dy, ids)))
    assert all(np.array_equal(a, b[1:]) for a, b in zip(alone, batch, strict=True))


@pytest.mark.slow
def test_hidden_blocks_are_not_read():
    """NaN in a block that a window of 70 hides from the last 128 positions would reach them through a product."""
    shape = (1, 384)
    q, dy, k, v = (random(1, shape, seed=seed) for seed in range(4))
    spoil = lambda x, rows: x.at[:, rows].set(jnp.nan)
    ours = lambda q, k, v, ids: attention(q, k, v, ids, 70, interpret=True)
    y, dq, dk, dv = value_and_gradients(
        ours, spoil(q, slice(0, 128)), spoil(k, slice(0, 128)), spoil(v, slice(0, 128)), dy
    )
    for x in (y, dq, dk, dv):
        assert not np.isfinite(x[:, :128]).all() and np.isfinite(x[:, 256:]).all()


@pytest.mark.slow
def test_a_network_with_every_kernel_has_the_plain_gradients_however_its_rows_are_divided(monkeypatch):
    monkeypatch.setattr("model.attention.attention_kernel", lambda *_: "hopper" if _[-1] else "plain")
    monkeypatch.setattr("model.gpt.norm_kernel", lambda *_: "gpu")
    for module, name in ((hopper, "attention"), (fused, "add_and_norm")):
        monkeypatch.setattr(module, name, partial(getattr(module, name), interpret=True))
    weights = np.ones((2, 65), np.float32)
    weights[0, 7:] = 0
    sizes = {"depth": 1, "width": 128, "heads": 1, "kv_heads": 1, "head_dim": 64}

    def gradients(kernels, rows):
        config = tiny_config(2, 2, 65, kernels=kernels, **sizes)
        graph, params = nnx.split(GPT(config.model, jnp.dtype("float32"), rngs=nnx.Rngs(0)), nnx.Param)
        arrays = [random_rows(config, 0, weights)[name][rows] for name in ("inputs", "targets", "weights")]
        loss = lambda params, *arrays: loss_sums(nnx.merge(graph, params), *arrays)[0]
        return jax.jit(jax.grad(loss))(perturbed(params), *arrays)

    ours = partial(gradients, ("attention", "add_and_norm"))
    whole, parts = ours(slice(0, 2)), jax.tree.map(jnp.add, ours(slice(0, 1)), ours(slice(1, 2)))
    assert distance(parts, whole) < 1e-6
    assert distance(whole, gradients((), slice(0, 2))) < 1e-5


def test_where_it_runs():
    kernel = partial(attention_kernel, own=True)
    assert kernel("cuda", 9.0, "bfloat16", 2048, 128, True) == "hopper"
    assert (
        kernel("cuda", 9.0, "bfloat16", 2048, 256, False) == kernel("gpu", 10.0, "bfloat16", 64, 128, False) == "cudnn"
    )


COMPILE = """
from tools.programs.topologies import devices_of
from tools.programs.compiled import compile_step
from training.build import build
from tests.helpers import tiny_config
import sys
kernels = ("attention", "add_and_norm")
sizes = {"width": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": "bfloat16", "short_window": 128}
config = tiny_config(4, 1, 512, window_pattern="S", kernels=kernels, **sizes)
text = compile_step(build(config, devices_of(sys.argv[1]))).as_text()
print(text.count('custom_call_target="mosaic_gpu_v2"'), text.count('custom_call_target="tpu_custom_call"'))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "compiler", "calls"), [("h100:2", "jax_cuda13_plugin", 2 * 5), ("v5e:2x2", "libtpu", 0)]
)
def test_a_step_with_every_kernel_compiles_for_devices_that_are_not_here(topology, compiler, calls):
    """A layer has three attention kernels, and two of addition and norm; on a TPU splash attention's own."""
    pytest.importorskip(compiler)
    done = subprocess.run([sys.executable, "-c", COMPILE, topology], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    of_gpu, of_tpu = map(int, done.stdout.split()[-2:])
    assert of_gpu == calls and (of_tpu > 0) == (topology != "h100:2")

"""Compare attention for Hopper GPUs, interpreted, with the plain expression, and compile it for an H100."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import CheckpointConfig, with_options
from model import fused
from model.attention import Places, plain_attention
from model.gpt import parameter_shapes
from model.kernels import HAS_PALLAS, attention_kernel
from run.saver import Saver
from tests.helpers import built_on, distance, placed, random_rows, run_steps, states, tiny_config

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
def test_with_every_switch_on_runs_are_exact_and_continue_with_the_same_bits(monkeypatch, tmp_path):
    """Train two steps with our kernels, gradients in splits, chunks of the loss and Muon's fewer passes. The plain
    network is the same. A run that continues from a checkpoint has the bits of one that was not interrupted."""
    monkeypatch.setattr("model.attention.attention_kernel", lambda *_: "hopper" if _[-1] else "plain")
    monkeypatch.setattr("model.gpt.norm_kernel", lambda *_: "gpu")
    for module, name in ((hopper, "attention"), (fused, "add_and_norm")):
        monkeypatch.setattr(module, name, partial(getattr(module, name), interpret=True))
    sizes = {"depth": 1, "heads": 1, "kv_heads": 1, "head_dim": 64, "window_pattern": "S", "short_window": 9}
    plain = tiny_config(2, 1, 20, **sizes)
    weights = np.ones((2, 20), np.float32)
    weights[0, 7:] = 0
    rows = [random_rows(plain, seed, weights) for seed in range(2)]
    plain = with_options(plain, {"optimizer.matrices.kind": "muon"})
    expected, _ = run_steps(plain, rows)

    monkeypatch.setattr("model.layers.platform", lambda: "gpu")
    monkeypatch.setattr("model.layers.GRADIENT_SPLITS", 4)
    switches = {"model.kernels": ("attention", "add_and_norm"), "model.loss_chunks": 2}
    config = with_options(plain, switches | {"optimizer.muon.products": "fewer_passes"})
    params, metrics = run_steps(config, rows)
    assert distance(params, expected) < 1e-5

    built, abstract = built_on(config, 1), built_on(config, 1).abstract_state
    with Saver(tmp_path, CheckpointConfig()) as saver:
        saver.save_last(1, next(states(config, rows))[0], {"shapes": parameter_shapes(config.model)})
        state, _ = saver.restore_newest(abstract)
    state, last = built.train_step(state, placed(built, rows[1]))
    assert all(np.array_equal(metrics[1][name], last[name]) for name in ("loss", "grad_norm"))
    assert all(map(np.array_equal, *map(jax.tree.leaves, (params, state.params))))


def test_where_it_runs():
    kernel = partial(attention_kernel, own_kernel=True)
    assert kernel("cuda", 9.0, "bfloat16", 2048, 128, True) == "hopper"
    assert (
        kernel("cuda", 9.0, "bfloat16", 2048, 256, False) == kernel("gpu", 10.0, "bfloat16", 64, 128, False) == "cudnn"
    )


COMPILE = """
from tools.programs.topologies import devices_of
from tools.programs.compiled import compile_step
from training.build import build
from tests.helpers import tiny_config
kernels = ("attention", "add_and_norm")
sizes = {"depth": 1, "width": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": "bfloat16", "short_window": 128}
config = tiny_config(4, 1, 512, window_pattern="S", kernels=kernels, **sizes)
text = compile_step(build(config, devices_of("h100:2"))).as_text()
print(text.count('custom_call_target="mosaic_gpu_v2"'))
"""


@pytest.mark.slow
def test_a_step_with_every_kernel_compiles_for_gpus_that_are_not_here():
    """A layer has three attention kernels, and two of addition and norm."""
    pytest.importorskip("jax_cuda13_plugin")
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) == 5

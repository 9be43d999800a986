"""Test Muon's schedules and updates, on a mesh and on one device, and count what it sends.

nanochat_muon.json has two matrices of each of SHAPES after three updates of nanochat's MuonAdamW (92d63d4, float32),
with the constants of its training script."""

import json
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from options.schema import MeshConfig, MuonConfig, ScheduleConfig, with_options
from tests.helpers import ALL_FEATURES, tiny_config
from tools.programs.compiled import collectives, compile_step
from training.build import build
from training.mesh import make_mesh, resized, sizes_of
from training.muon import MuonState, momentum_at, muon
from training.sharded import spec_of
from training.shares import on_each_device, shard_layout, summed_layout

CONFIG, CONSTANT = MuonConfig(), ScheduleConfig("constant")


ONE = make_mesh(MeshConfig(data=1), jax.devices()[:1])


def random(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def two_updates(matrices, axes, mesh):
    """Return matrices after two updates on a mesh, each by the gradient that is the matrix, and their second
    moments, both with the mesh's padding, and the layouts."""
    layouts = [shard_layout(matrix.shape, names, mesh.shape) for matrix, names in zip(matrices, axes)]
    transform = muon(MuonConfig(weight_decay=0.3), CONSTANT, lambda step: jnp.float32(0.02), 10, layouts, mesh)
    seconds = [summed_layout(of, n.shape, mesh.shape) for of, n in zip(layouts, transform.init(matrices).nu)]
    specs = [spec_of(of) for of in layouts], MuonState([spec_of(of) for of in layouts], [spec_of(of) for of in seconds])

    def on_device(params, state):
        for step in range(2):
            updates, state = transform.update(params, state, params, step=jnp.array(step))
            params = [param + update for param, update in zip(params, updates)]
        return params, state

    def place(arrays, layouts):
        return [
            jax.device_put(resized(array, of.stored), jax.NamedSharding(mesh, spec_of(of)))
            for array, of in zip(arrays, layouts)
        ]

    state = transform.init(matrices)
    state = MuonState(place(state.mu, layouts), place(state.nu, seconds))
    update = jax.jit(on_each_device(on_device, mesh, jnp.dtype("float32"), specs, specs))
    params, state = update(place(matrices, layouts), state)
    return params, state.nu, layouts


@pytest.mark.medium
def test_matrices_of_one_shape_are_stacked_turned_or_not_and_come_back_in_their_order():
    matrices = [random((8, 4), 0), random((4, 8), 1), random((4, 4), 2), random((8, 4), 3), random((10, 6), 4)]
    axes = [("fsdp", "tensor"), ("tensor", "fsdp"), ("fsdp", "tensor"), (None, "tensor"), ("tensor", "fsdp")]
    expected, expected_seconds, _ = two_updates(matrices, axes, ONE)
    for mesh in (make_mesh(MeshConfig(2, 2, 2)), make_mesh(MeshConfig(3, 2, 1), jax.devices()[:6])):
        params, seconds, layouts = two_updates(matrices, axes, mesh)
        assert any(of.stored != of.shape for of in layouts)  # the axes do not divide the last one
        for result, second, param, of_param in zip(params, seconds, expected, expected_seconds):
            # The five iterations amplify a rounding of 6e-8 in a small singular value by up to 991.
            np.testing.assert_allclose(resized(result, param.shape), param, atol=6e-5)
            np.testing.assert_allclose(resized(second, of_param.shape), of_param, atol=6e-5)
            for padded, shape in ((result, param.shape), (second, of_param.shape)):
                assert not np.any(padded[shape[0] :]) and not np.any(padded[:, shape[1] :])


SHAPES = [(6, 6), (4, 12), (12, 4)]


@pytest.mark.parametrize(("number", "shape"), enumerate(SHAPES))
def test_three_updates_are_nanochat_s(number, shape):
    """Take them with rate, momentum, decay and second moment."""
    generator = np.random.default_rng(0)
    draw = lambda: {i: jnp.asarray(generator.standard_normal(shape), jnp.float32) for i in range(2)}
    layouts, rate = [shard_layout(shape, (None, None), ONE.shape)] * 2, lambda step: jnp.float32(0.02)
    transform, params = muon(MuonConfig(weight_decay=0.3), CONSTANT, rate, 10, layouts, ONE), draw()
    state = transform.init(params)
    for step in range(3):
        updates, state = transform.update(draw(), state, params, step=jnp.array(step))
        params = jax.tree.map(jnp.add, params, updates)
    theirs = json.loads(Path(__file__).with_name("nanochat_muon.json").read_text())[number]
    for ours, expected in zip(params.values(), theirs, strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_momentum_rises_stays_and_falls():
    falls = ScheduleConfig(warmdown=0.5)
    momentum = lambda step: float(momentum_at(CONFIG, falls, step, 2000))
    assert [momentum(step) for step in (0, 200, 400, 1000)] == pytest.approx([0.85, 0.91, 0.97, 0.97])
    assert [momentum(step) for step in (1500, 2000)] == pytest.approx([0.935, 0.9])
    assert float(momentum_at(CONFIG, CONSTANT, 2000, 2000)) == pytest.approx(0.97)
    for steps in (300, 500):  # too short for both: it falls from its current value, without a jump
        course = [float(momentum_at(CONFIG, ScheduleConfig(), step, steps)) for step in range(0, steps + 1, 5)]
        assert np.abs(np.diff(course)).max() < 0.003 and course[-1] == pytest.approx(0.9)


def crossings(depth: int, mesh: MeshConfig) -> Counter[str]:
    """Return how many collectives of each kind a step with Muon has, besides those in the scan, and require that the
    code names all of them."""
    config = with_options(
        tiny_config(**ALL_FEATURES | {"depth": depth}),
        {"optimizer.matrices.kind": "muon", "mesh": mesh, "batch.rows_per_device": 2},
    )
    built = build(config, jax.devices()[:8])
    found = collectives(compile_step(built).as_text(), sizes_of(built.mesh))
    assert all(c.written for c in found), [c for c in found if not c.written]
    return Counter(c.kind for c in found if not c.in_loop)


@pytest.mark.medium
def test_an_update_s_collectives_do_not_grow_with_the_depth():
    """Matrices of attention (those of queries and of keys), of the MLP, and gates are dealt and collected, and so are
    their second moments. All-reduces are of losses, tokens, norms, and gradients that are not scattered."""
    shallow, deep = crossings(2, MeshConfig(8)), crossings(4, MeshConfig(8))
    assert shallow["all-to-all"] == deep["all-to-all"] == 4 * 4
    assert shallow["all-reduce"] == deep["all-reduce"] <= 3
    assert "collective-permute" not in deep

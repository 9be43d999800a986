"""Test Muon's orthogonalisation, schedules and updates. (test_step.py compares meshes, test_hlo_collectives.py counts
what it sends.)

nanochat_muon.json has two matrices of each of SHAPES after three updates of nanochat's MuonAdamW (92d63d4, float32),
with the constants of its training script."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from options.schema import MeshConfig, MuonConfig, ScheduleConfig
from training.mesh import make_mesh, resized
from training.muon import momentum_at, muon, orthogonalise_all
from training.sharded import spec_of
from training.shares import shard_layout

CONFIG, CONSTANT = MuonConfig(), ScheduleConfig("constant")


ONE = make_mesh(MeshConfig(data=1), jax.devices()[:1])


def on_one(*matrices):
    """Orthogonalise the matrices on one device."""
    layouts = [shard_layout(m.shape, (None, None), ONE.shape) for m in matrices]
    return jax.jit(lambda *matrices: orthogonalise_all(list(matrices), layouts, ONE))(*matrices)


def random(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.medium
def test_matrices_of_one_shape_are_stacked_turned_or_not_and_come_back_in_their_order():
    matrices = [random((8, 4), 0), random((4, 8), 1), random((4, 4), 2), random((8, 4), 3), random((10, 6), 4)]
    axes = [("fsdp", "tensor"), ("tensor", "fsdp"), ("fsdp", "tensor"), (None, "tensor"), ("tensor", "fsdp")]
    for mesh in (ONE, make_mesh(MeshConfig(2, 2, 2)), make_mesh(MeshConfig(3, 2, 1), jax.devices()[:6])):
        layouts = [shard_layout(matrix.shape, names, mesh.shape) for matrix, names in zip(matrices, axes)]
        assert mesh is ONE or any(of.stored != of.shape for of in layouts)  # the axes do not divide the last one
        stored = [
            jax.device_put(resized(matrix, of.stored), jax.NamedSharding(mesh, spec_of(of)))
            for matrix, of in zip(matrices, layouts)
        ]
        orthogonalised = jax.jit(
            lambda matrices, layouts=layouts, mesh=mesh: orthogonalise_all(matrices, layouts, mesh)
        )
        for matrix, result in zip(matrices, orthogonalised(stored)):
            # The five iterations amplify a rounding of 6e-8 in a small singular value by up to 991.
            np.testing.assert_allclose(resized(result, matrix.shape), on_one(matrix)[0], atol=6e-5)
            assert not np.any(result[matrix.shape[0] :]) and not np.any(result[:, matrix.shape[1] :])


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

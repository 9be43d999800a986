"""Muon: what orthogonalisation gives, the schedules, and that each matrix is worked on once. (That it is nanochat's:
tests/interchange/test_nanochat.py; that its update is the same on every mesh: test_step.py.)"""

from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs.schema import MeshConfig, MuonConfig, ScheduleConfig
from program.collectives import collectives
from training.mesh import make_mesh, parameter_spec
from training.muon import momentum_at, muon, orthogonalise_all

CONFIG = MuonConfig(schedule=ScheduleConfig("constant"))


def random(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("shape", [(48, 48), (32, 128), (128, 32)])
def test_singular_values_come_near_one_and_directions_stay(shape):
    (found,) = orthogonalise_all([random(shape)], None)
    left, values, right = np.linalg.svd(found, full_matrices=False)
    assert values.min() > 0.8 and values.max() < 1.2
    assert np.linalg.norm(found) == pytest.approx(min(shape) ** 0.5, rel=1e-5)
    equal = np.asarray(random(shape))  # each output's column at one norm
    equal = equal / np.linalg.norm(equal, axis=0)
    left, _, right = np.linalg.svd(equal, full_matrices=False)
    assert np.sum(found * (left @ right)) / min(shape) > 0.95


def test_a_matrix_of_zeros_stays():
    assert not np.any(orthogonalise_all([jnp.zeros((8, 4)), random((8, 4))], None)[0])


@pytest.mark.medium
def test_matrices_of_one_shape_are_stacked_turned_or_not_and_come_back_in_their_order():
    matrices = [random((8, 4), 0), random((4, 8), 1), random((4, 4), 2), random((8, 4), 3)]
    mesh = make_mesh(MeshConfig(2, 2, 2))
    axes = [("fsdp", "tensor"), ("tensor", "fsdp"), (("fsdp", "data"), "tensor"), (None, "tensor")]
    placed = [NamedSharding(mesh, PartitionSpec(*names)) for names in axes]
    for shardings in (None, placed):
        for matrix, found in zip(matrices, orthogonalise_all(matrices, shardings)):
            np.testing.assert_allclose(found, orthogonalise_all([matrix], None)[0], atol=1e-5)


def test_momentum_rises_stays_and_falls():
    config = MuonConfig(schedule=ScheduleConfig(warmdown=0.5))
    momentum = lambda step: float(momentum_at(config, step, 2000))
    assert [momentum(step) for step in (0, 200, 400, 1000)] == pytest.approx([0.85, 0.91, 0.97, 0.97])
    assert [momentum(step) for step in (1500, 2000)] == pytest.approx([0.935, 0.9])
    assert float(momentum_at(CONFIG, 2000, 2000)) == pytest.approx(0.97)


def test_decay_falls_on_what_the_update_shrinks_and_fades():
    transform = muon(CONFIG, lambda step: jnp.float32(0.1), 10, None)
    without = muon(MuonConfig(weight_decay=0.0, schedule=CONFIG.schedule), lambda step: jnp.float32(0.1), 10, None)
    params, gradient = {"w": random((8, 8), 1)}, {"w": random((8, 8), 2)}
    for step, factor in ((0, 1.0), (5, 0.5), (10, 0.0)):
        moved, plain = (
            t.update(gradient, t.init(params), params, step=jnp.array(step))[0]["w"] for t in (transform, without)
        )
        shrinks = plain * params["w"] <= 0
        expected = np.where(shrinks, -0.1 * 0.28 * factor * params["w"], 0)
        np.testing.assert_allclose(moved - plain, expected, atol=1e-6)
        assert 0.2 < np.mean(shrinks) < 0.8


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2)])
def test_no_matrix_is_worked_on_twice_nor_sent_whole(sizes):
    """Of 16 matrices each of eight devices multiplies two: an eighth of the work of one device alone. Over each axis of
    the mesh a device's share of them goes there and back, and nothing else but norms is sent."""
    mesh = make_mesh(MeshConfig(*sizes))
    divided = NamedSharding(mesh, parameter_spec((64, 64), ("fsdp", "tensor"), mesh))
    flops = []
    for placed in (None, divided):
        transform = muon(CONFIG, lambda step: jnp.float32(0.1), 10, placed and [placed] * 16)
        params = {i: jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=placed) for i in range(16)}
        state = jax.tree.map(
            lambda leaf, placed=placed: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=placed if leaf.shape == (64, 64) else None
            ),
            jax.eval_shape(transform.init, params),
        )
        update = jax.jit(lambda g, s, p, transform=transform: transform.update(g, s, p, step=jnp.array(3)))
        compiled = update.lower(params, state, params).compile()
        flops.append(compiled.cost_analysis()["flops"])
    assert flops[1] < 0.15 * flops[0]
    sent = defaultdict(int)
    for collective in collectives(compiled.as_text(), dict(mesh.shape)):
        sent[collective.kind == "all-to-all"] += collective.times * collective.bytes_each
    matrix = 4 * 64 * 64
    assert sent[True] == 2 * sum(size > 1 for size in sizes) * 16 * matrix / 8
    assert sent[False] < 2 * matrix

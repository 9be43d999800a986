"""Test that the state is the same on every mesh, and divided over it."""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from tests.helpers import tiny_config
from training.mesh import make_mesh
from training.optimizer import make_optimizer
from training.state import abstract_state, compute_dtype, create_state, params_sha256


@cache
def state_on(devices, seed=0):
    """Return a state on `devices` devices, its shapes, and their mesh. It is cached: never donate it."""
    config = tiny_config()
    mesh = make_mesh(config.mesh, jax.devices()[:devices])
    optimizer, _ = make_optimizer(config.optimizer, config.model, 8, mesh)
    return create_state(config.model, optimizer, mesh, seed), abstract_state(config.model, optimizer, mesh), mesh


def test_the_seed_decides_the_parameters_and_the_mesh_does_not():
    of = lambda devices, seed: params_sha256(state_on(devices, seed)[0].params, tiny_config().model)
    one, eight, other = of(1, 0), of(8, 0), of(8, 1)
    assert one == eight != other


def test_parameters_and_moments_are_divided_over_the_replicas():
    state, abstract, _ = state_on(8)
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        here = leaf.addressable_shards[0].data.size
        assert here == leaf.size // (8 if leaf.ndim else 1)
        assert leaf.dtype == np.float32
    jax.tree.map(
        lambda leaf, shape: (leaf.shape, leaf.sharding) == (shape.shape, shape.sharding) or 1 / 0, state, abstract
    )


def test_sha256_sees_every_parameter():
    params = jax.tree.map(lambda leaf: leaf, state_on(1)[0].params)  # copies of the dictionaries
    sha256 = lambda: params_sha256(params, tiny_config().model)
    before = sha256()
    params["blocks"][1]["mlp"]["down"]["kernel"] = params["blocks"][1]["mlp"]["down"]["kernel"].at[0, 0].set(1e-30)
    assert sha256() != before


@pytest.mark.parametrize(
    ("configured", "platform", "jax_version", "expected"),
    [
        ("auto", "cpu", (0, 11, 2), "float32"),
        ("auto", "cpu", (0, 12, 0), "bfloat16"),
        ("auto", "gpu", (0, 11, 2), "bfloat16"),
        ("auto", "tpu", (0, 11, 2), "bfloat16"),
        ("float32", "gpu", (0, 12, 0), "float32"),
    ],
)
def test_compute_dtype(configured, platform, jax_version, expected, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", jax_version)
    assert compute_dtype(replace(tiny_config().model, dtype=configured), platform) == expected


@pytest.mark.parametrize(("capability", "expected"), [(7.0, "float32"), (7.5, "float32"), (8.0, "bfloat16")])
def test_auto_is_float32_on_gpus_without_bfloat16(capability, expected, monkeypatch):
    monkeypatch.setattr("training.state.compute_capability", lambda: capability)
    assert compute_dtype(replace(tiny_config().model, dtype="auto"), "gpu") == expected

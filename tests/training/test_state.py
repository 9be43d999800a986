"""Test that the initial state is the same on every mesh, and that the last steps' parameters are averaged."""

import math
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest

from configs.schema import with_options
from tests.helpers import random_rows, states, tiny_config
from training.build import build
from training.state import average_begins, compute_dtype, params_sha256


@cache
def params_on(devices, seed=0):
    """Return the parameters of a state on `devices` devices."""
    return build(replace(tiny_config(), seed=seed), jax.devices()[:devices]).create_state().params


def test_the_seed_decides_the_parameters_and_the_mesh_does_not():
    of = lambda devices, seed: params_sha256(params_on(devices, seed), tiny_config().model)
    one, eight, other = of(1, 0), of(8, 0), of(8, 1)
    assert one == eight != other


def test_sha256_sees_every_parameter():
    params = jax.tree.map(lambda leaf: leaf, params_on(1))  # copies of the dictionaries
    sha256 = lambda: params_sha256(params, tiny_config().model)
    before = sha256()
    params["blocks"][1]["mlp"]["down"]["kernel"] = params["blocks"][1]["mlp"]["down"]["kernel"].at[0, 0].set(1e-30)
    assert sha256() != before


@pytest.mark.parametrize(
    ("configured", "platform", "version", "capability", "expected"),
    [
        ("auto", "cpu", (0, 11, 2), 9.0, "float32"),
        ("auto", "cpu", (0, 12, 0), 9.0, "bfloat16"),
        ("auto", "gpu", (0, 11, 2), 8.0, "bfloat16"),
        ("auto", "gpu", (0, 12, 0), 7.5, "float32"),
        ("auto", "tpu", (0, 11, 2), 9.0, "bfloat16"),
        ("float32", "gpu", (0, 12, 0), 9.0, "float32"),
    ],
)
def test_compute_dtype(configured, platform, version, capability, expected, monkeypatch):
    """GPUs before Ampere have no bfloat16, and CPUs gain nothing from it with JAX before 0.12."""
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr("training.state.compute_capability", lambda: capability)
    assert compute_dtype(replace(tiny_config().model, dtype=configured), platform) == expected


STEPS = 8
SKIPPED = 6  # a step without a valid token


def courses(sizes: tuple[int, int, int]) -> tuple[list, list]:
    """Return the parameters and the average after each step, from the perturbed start."""
    options = {"optimizer.average": 0.6, "batch.rows_per_device": 2}
    options |= dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), sizes))
    config = with_options(tiny_config(kv_heads=4), options)
    rows = [random_rows(config, n, np.full((16, 16), n != SKIPPED, np.float32)) for n in range(1, STEPS + 1)]
    params, averages = [], []
    for state, _ in states(config, rows, math.prod(sizes)):
        params.append(jax.device_get(state.params))
        averages.append(jax.device_get(state.average))
        for leaf, like in zip(jax.tree.leaves(state.average), jax.tree.leaves(state.params)):
            assert leaf.dtype == np.float32 and leaf.sharding == like.sharding
    return params, averages


@pytest.mark.parametrize(("average", "first"), [(0.1, 8), (0.6, 4), (1.0, 1)])
def test_the_last_share_of_the_steps_counts(average, first):
    assert average_begins(with_options(tiny_config(), {"optimizer.average": average})) == first - 1


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2)], ids=str)
def test_the_average_is_the_mean(sizes):
    params, averages = courses(sizes)
    for step in range(1, STEPS + 1):
        counted = params[3:step] or [params[step - 1]]  # the last five steps; before them the newest
        mean = jax.tree.map(lambda *of: np.mean(of, axis=0, dtype=np.float64), *counted)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), averages[step - 1], mean)
    assert not np.array_equal(averages[-1]["embed"]["table"], params[-1]["embed"]["table"])

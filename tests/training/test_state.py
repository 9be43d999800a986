"""Test that the initial state is the same on every mesh."""

from dataclasses import replace
from functools import cache

import jax
import pytest

from tests.helpers import tiny_config
from training.build import build
from training.state import params_sha256


@cache
def params_on(devices, seed=0):
    """Return the parameters of a state on `devices` devices."""
    return build(replace(tiny_config(), seed=seed), jax.devices()[:devices]).create_state().params


@pytest.mark.medium
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

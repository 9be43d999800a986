"""Test that random numbers do not depend on the environment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.sampling import Sampling, draw
from tests.helpers import tiny_config
from training.build import build
from training.state import params_sha256
from training.step import dropout_keys

CONFIG = tiny_config(depth=1)


def numbers() -> tuple[str, list, list]:
    """Return the first parameters' hash, dropout's keys and drawn tokens."""
    params = build(CONFIG, jax.devices()[:1]).create_state().params
    keys = jax.random.key_data(dropout_keys(0, jnp.int32(3), (2, 4)))
    of_rows = (np.full(8, option) for option in (np.float32(1), 0, np.float32(1), 5))
    tokens = draw(jnp.zeros((8, 300)), jnp.arange(8), Sampling(*of_rows))
    return params_sha256(params, CONFIG.model), keys.tolist(), tokens.tolist()


@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_a_generator_chosen_in_the_environment_draws_nothing(generator):
    """JAX reads JAX_DEFAULT_PRNG_IMPL into this option when it is imported."""
    expected = numbers()
    with jax.default_prng_impl(generator):
        assert numbers() == expected

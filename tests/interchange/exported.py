"""Networks to export, and a comparison of parameters."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs.schema import Config
from interchange.convert import read_network
from interchange.folders import IN_HF, REMOTE
from model.gpt import GPT
from tests.helpers import FEATURES, TINY, perturbed

EXPORTED = {name: options for name, options in FEATURES.items() if options.keys() <= IN_HF | REMOTE}
"""The features that the modeling file computes, too."""


def network(model=TINY, **options):
    """Return the config of a run, and parameters for it."""
    config = Config(name="one", model=replace(model, **options))
    return config, perturbed(nnx.to_pure_dict(nnx.state(GPT(config.model, jnp.dtype("float32"), rngs=nnx.Rngs(0)))))


def require_params(folder, expected):
    """Require exactly these parameters in a folder, with a config of their network."""
    _, config, params = read_network(folder)
    jax.tree.map(np.testing.assert_array_equal, expected, jax.device_get(params))
    return config

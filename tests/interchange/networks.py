"""Networks to export, and what is read back."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from interchange.convert import read_network
from interchange.folders import IN_HF, REMOTE
from model.gpt import GPT
from options.schema import Config, ModelConfig
from tests.helpers import FEATURES, TINY, perturbed, together

EXPORTED = {name: options for name, options in FEATURES.items() if options.keys() <= IN_HF | REMOTE}
"""The features that the modeling file computes, too."""
ALL_EXPORTED = together(EXPORTED)


def network(model: ModelConfig = TINY, **options: object) -> tuple[Config, dict]:
    """Return the config of a run, and parameters for it."""
    config = Config(name="one", model=replace(model, **options))
    return config, perturbed(nnx.to_pure_dict(nnx.state(GPT(config.model, jnp.dtype("float32"), rngs=nnx.Rngs(0)))))


def require_params(folder: Path, expected: dict) -> Config:
    """Require exactly these parameters in a folder, with a config of their network."""
    _, config, params = read_network(folder)
    jax.tree.map(np.testing.assert_array_equal, expected, jax.device_get(params))
    return config

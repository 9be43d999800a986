"""Small networks that draw text, and prompts for them."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import jax
import numpy as np

from data.prepare.selection import train_tokenizer
from model.sampling import Sampling
from run.network import Network
from tests.evaluation.core_bundle import network_of, off_zero
from tests.helpers import ALL_FEATURES, TINY

LENGTH = 192
TOKENIZER = train_tokenizer(["to be or not to be " * 20], 272)
SPECIAL = TOKENIZER.special_tokens
GREEDY, DRAWN = Sampling(0.0, 0), Sampling(1.0, 20, seed=3)
DRAW = np.random.default_rng(0)
PROMPTS = [[0, *DRAW.integers(9, 272, size=size).tolist()] for size in (2, 31, 32, 150)]


@cache
def network(devices=1, **options) -> Network:
    """Return a network with all of nanochat's features, unless `options` change them."""
    model = replace(TINY, **(options or ALL_FEATURES | {"depth": 2}))
    return network_of(model, off_zero(model), TOKENIZER, LENGTH, devices)


def chain(*tokens) -> Network:
    """Return a network that follows each of these tokens by the next one."""
    ours = network(depth=1, width=128, heads=4, head_dim=32)
    params = jax.tree.map(np.zeros_like, jax.device_get(ours.params))
    vectors = np.random.default_rng(0).standard_normal((272, 128)).astype(np.float32)
    params["embed"]["table"] = vectors
    for token, after in pairwise(tokens):
        params["lm_head"]["kernel"][:, after] += vectors[token]
    return replace(ours, params=jax.device_put(params))

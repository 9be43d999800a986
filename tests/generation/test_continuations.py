"""Test continuations of prompts: they compile once, and hold no memory between calls."""

import jax
import pytest

from data.prompts import encode_prompts
from generation.continuations import continuations
from generation.engine import Engine
from model.sampling import Sampling
from system.errors import UserError
from tests.generation.networks import TOKENIZER, network


@pytest.mark.medium
def test_continuations_compile_once_and_do_not_depend_on_the_mesh_or_on_each_other():
    prompts = encode_prompts(TOKENIZER, ["to be", ""], 16)
    engine, drawn = Engine(network(), 2), Sampling(seed=5)
    first = continuations(engine, prompts, 5, drawn)
    assert first[0].startswith("to be") and len(first) == 2
    engine.unload()
    assert not engine.params and engine.cache is None
    engine.load(jax.tree.map(lambda p: p + 0.0, network().params))
    assert continuations(engine, prompts, 5, drawn) == first
    engine.load(jax.tree.map(lambda p: p + 1.0, network().params))
    assert continuations(engine, prompts, 5, drawn) != first
    assert (engine._read._cache_size(), engine._write._cache_size()) == (1, 1)
    assert continuations(Engine(network(8), 2), prompts, 5, drawn) == first
    assert continuations(Engine(network(), 1), prompts[:1], 5, drawn) == first[:1]
    assert continuations(engine, [], 5, drawn) == []
    with pytest.raises(UserError, match="the network's sequence has 4, so at most 3"):
        encode_prompts(TOKENIZER, ["that is not"], 4)

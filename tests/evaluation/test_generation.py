"""Test sampling on a mesh: it gives one device's tokens, compiles once, and gathers no parameter that `tensor` or
`fsdp` divides."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import MeshConfig, ModelConfig, UserError
from evaluation.generation import continuations, encode_prompts, make_generate
from tests.evaluation.test_engine import TOKENIZER, network
from tools.programs.compiled import collectives
from tools.programs.topologies import devices_of
from training.mesh import make_mesh, sizes_of
from training.state import abstract_params

FLOAT32 = jnp.dtype("float32")
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
GREEDY = {"temperature": 0.0, "top_k": 0}


@pytest.mark.medium
def test_a_mesh_of_all_axes_gives_the_tokens_of_one_device():
    """test_engine.py compares greedy tokens."""
    buffer, seeds = np.zeros((len(PROMPTS), 12), np.int32), np.arange(len(PROMPTS), dtype=np.int32)
    for row, prompt in zip(buffer, PROMPTS):
        row[: len(prompt)] = prompt
    lengths, tokens = np.array([len(prompt) for prompt in PROMPTS], np.int32), []
    for ours in network(8), network():
        tokens.append(
            np.asarray(ours.generate()(ours.params, buffer, lengths, seeds, prefill=1, temperature=1.0, top_k=20))
        )
    np.testing.assert_array_equal(*tokens)


def test_parameters_divided_by_tensor_are_never_gathered():
    """Keep heads, MLP width, vocabulary and the cache's heads divided along `tensor`."""
    config = ModelConfig(depth=2, width=64, heads=8, kv_heads=8, head_dim=24, vocab_size=2048)
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    params, of = abstract_params(config, mesh), lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)
    generate = make_generate(config, FLOAT32, mesh)
    compiled = generate.lower(params, of(2, 16), of(2), of(2), prefill=1, **GREEDY).compile()
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())}
    whole = {leaf.shape for leaf in jax.tree.leaves(params)}
    assert not (shapes | {shape[::-1] for shape in shapes}) & whole
    assert (2, 2, 16, 24) in shapes and (2, 8, 16, 24) not in shapes
    arguments = sum(4 * leaf.size for leaf in jax.tree.leaves(params)) / 8
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(arguments, rel=0.01)


def test_on_a_tpu_slice_fsdp_gathers_one_matrix_at_a_time():
    pytest.importorskip("libtpu")
    config = ModelConfig(depth=2, width=512, heads=8, kv_heads=8, head_dim=64, vocab_size=512)
    mesh = make_mesh(MeshConfig(fsdp=4), devices_of("v5e:2x2"))
    params, of = abstract_params(config, mesh), lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)
    generate = make_generate(config, jnp.dtype("bfloat16"), mesh)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = generate.lower(params, of(2, 6), of(2), of(2), prefill=1, **GREEDY).compile()
    whole = sum(2 * leaf.size for leaf in jax.tree.leaves(params))
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 2
    traffic = collectives(compiled.as_text(), sizes_of(mesh))
    a_token = sum(c.bytes_each * c.times for c in traffic if c.kind == "all-gather" and c.in_loop) / 4
    assert a_token == pytest.approx(whole, rel=0.01)  # each of the loop's 4 passes reads the network once


def test_continuations_compile_once():
    generate, params = network().generate(), network().params
    prompts = encode_prompts(TOKENIZER, ["to be", ""], 16)
    sample = lambda params: continuations(generate, params, TOKENIZER, prompts, tokens=5, capacity=16)
    first = sample(params)
    assert sample(jax.tree.map(lambda p: p + 0.0, params)) == first and first[0].startswith("to be")
    assert sample(jax.tree.map(lambda p: p + 1.0, params)) != first
    assert generate._cache_size() == 1
    assert continuations(generate, params, TOKENIZER, encode_prompts(TOKENIZER, (), 16), tokens=5, capacity=16) == []
    with pytest.raises(UserError, match="the network's sequence has 4, so at most 3"):
        encode_prompts(TOKENIZER, ["that is not"], 4)

"""Test the compiled programs of the engine: they gather no parameter that `tensor` or `fsdp` divides."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding

from generation.engine import AHEAD, CACHE, Engine, compute_params
from options.schema import BatchConfig, Config, MeshConfig, ModelConfig
from run.network import Network
from tests.generation.networks import TOKENIZER
from tools.programs.compiled import collectives
from tools.programs.topologies import devices_of
from training.mesh import make_mesh, sizes_of
from training.sharded import shard_network


def compiled_for(mesh: Mesh, model: ModelConfig, dtype: str, length: int) -> tuple[Any, list]:
    """Return the compiled program that draws tokens of two rows, and the parameters' shapes."""
    on_mesh = shard_network(model, jnp.dtype(dtype), mesh)
    config = Config("tiny", model=model, batch=BatchConfig(length, length, 1))
    engine = Engine(Network(config, TOKENIZER, {}, on_mesh), 2)
    shapes = on_mesh.abstract_params()
    in_compute_type = jax.eval_shape(lambda params: compute_params(params, on_mesh.dtype), shapes)
    params = jax.tree.map(lambda leaf, stored: leaf.update(sharding=stored.sharding), in_compute_type, shapes)
    cache = jax.tree.map(
        lambda leaf: leaf.update(sharding=NamedSharding(mesh, CACHE)), jax.eval_shape(engine._empty, params)
    )
    parts = engine.parts({}, len(engine.slots), 1)
    return engine._write.lower(params, cache, parts).compile(), jax.tree.leaves(params)


@pytest.mark.medium
def test_parameters_divided_by_tensor_are_never_gathered():
    """Keep heads, MLP width, vocabulary and the cache's heads divided along `tensor`."""
    model = ModelConfig(depth=2, width=64, heads=8, kv_heads=8, head_dim=24, vocab_size=2048)
    compiled, leaves = compiled_for(make_mesh(MeshConfig(fsdp=2, tensor=4)), model, "float32", 16)
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())}
    whole = {leaf.shape for leaf in leaves}
    assert not (shapes | {shape[::-1] for shape in shapes}) & whole
    assert (1, 2, 16, 24) in shapes and (1, 8, 16, 24) not in shapes


@pytest.mark.medium
def test_on_a_tpu_slice_fsdp_gathers_one_matrix_at_a_time():
    pytest.importorskip("libtpu")
    model = ModelConfig(depth=2, width=512, heads=8, kv_heads=8, head_dim=64, vocab_size=512)
    mesh = make_mesh(MeshConfig(fsdp=4), devices_of("v5e:2x2"))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled, leaves = compiled_for(mesh, model, "bfloat16", 6)
    whole = sum(2 * leaf.size for leaf in leaves)
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 2
    traffic = collectives(compiled.as_text(), sizes_of(mesh))
    a_token = sum(c.bytes_each * c.times for c in traffic if c.kind == "all-gather" and c.in_loop) / AHEAD
    assert a_token == pytest.approx(whole, rel=0.01)  # each pass of the loop reads the network once

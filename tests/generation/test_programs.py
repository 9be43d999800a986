"""Test the compiled programs of the engine: what they gather, and when."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding

from generation.engine import AHEAD, CACHE, SHORT, Engine
from options.schema import BatchConfig, Config, MeshConfig, ModelConfig
from run.network import Network
from tests.generation.networks import TOKENIZER
from tools.programs.compiled import collectives
from tools.programs.topologies import devices_of
from training.build import device_bytes
from training.mesh import make_mesh, sizes_of
from training.sharded import shard_network


def engine_for(mesh: Mesh, model: ModelConfig, dtype: str, length: int) -> tuple[Engine, dict, Any]:
    """Return an engine of two rows, and the shapes of its parameters and cache."""
    sharded = shard_network(model, jnp.dtype(dtype), mesh)
    config = Config("tiny", model=model, batch=BatchConfig(length, length, 1))
    engine, params = Engine(Network(config, TOKENIZER, {}, sharded), 2), sharded.abstract_gathered()
    cache = jax.tree.map(
        lambda leaf: leaf.update(sharding=NamedSharding(mesh, CACHE)), jax.eval_shape(engine._empty, params)
    )
    return engine, params, cache


def compiled_for(mesh: Mesh, model: ModelConfig, dtype: str, length: int) -> tuple[Any, list]:
    """Return the compiled program that draws tokens of two rows, and the parameters' shapes."""
    engine, params, cache = engine_for(mesh, model, dtype, length)
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
@pytest.mark.parametrize("sizes", [MeshConfig(), MeshConfig(fsdp=2, tensor=2)])
def test_parameters_are_gathered_over_data_once_and_not_in_the_programs_that_draw(sizes):
    mesh = make_mesh(sizes)
    model = ModelConfig(depth=1, width=64, heads=8, kv_heads=8, head_dim=24, vocab_size=2048)
    engine, params, cache = engine_for(mesh, model, "float32", 2 * SHORT)

    def over_data(program: Any, *arguments: Any) -> int:
        """Return the bytes that cross `data` in each call."""
        traffic = collectives(program.lower(*arguments).compile().as_text(), sizes_of(mesh))
        return sum(one.times * one.bytes_each for one in traffic if "data" in one.axes)

    drawing = engine._write, params, cache, engine.parts({}, len(engine.slots), 1)
    reading = engine._read, params, cache, engine.parts({}, engine.devices, SHORT)
    new_tokens = 4 * AHEAD * len(engine.slots)
    assert over_data(*drawing) <= new_tokens and over_data(*reading) <= new_tokens
    stored = shard_network(model, jnp.dtype("float32"), mesh).abstract_params()
    assert over_data(engine._gather, stored) == pytest.approx(device_bytes(params), rel=0.01)


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

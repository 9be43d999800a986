"""Test the standard error of bits per byte, and continuations: they compile once, and gather no parameter that `tensor`
or `fsdp` divides. test_engine.py tests that a mesh gives one device's tokens."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from configs.schema import MeshConfig, ModelConfig
from evaluation.evaluator import continuations, encode_prompts, evaluate, make_generate
from system.errors import UserError
from tests.evaluation.test_engine import TOKENIZER, network
from tools.programs.compiled import collectives
from tools.programs.topologies import devices_of
from training.mesh import make_mesh, sizes_of
from training.sharded import shard_network


def of_sums(losses: np.ndarray, counts: np.ndarray, text_bytes: np.ndarray, names: tuple[str, ...] = ()) -> dict:
    """Evaluate batches with these sums, by batch and micro-batch."""
    batches = [{"losses": of, "counts": by} for of, by in zip(losses, counts)]
    eval_step = lambda params, batch: (batch["losses"], batch["counts"])
    return evaluate(eval_step, {}, batches, np.atleast_2d(text_bytes), names=names)  # pyright: ignore


def test_the_error_is_the_standard_deviation_over_evaluations():
    """Compare it with the standard deviation over evaluations of five batches of ten micro-batches of unequal sizes."""
    random = np.random.default_rng(0)
    sizes = random.integers(100, 5000, (2000, 50))
    losses = sizes * 1.1 + random.standard_normal(sizes.shape) * np.sqrt(sizes) * 3
    results = [of_sums(of.reshape(5, 10), by.reshape(5, 10) // 4, by) for of, by in zip(losses, sizes)]
    values, errors = ([result[name] for result in results] for name in ("val_bpb", "val_bpb_stderr"))
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.05)


def test_a_single_micro_batch_has_no_error_and_empty_ones_do_not_count():
    result = of_sums(np.array([[5.0, 0.0]]), np.array([[4, 0]]), np.array([10, 0]))
    assert result["val_bpb_stderr"] is None and result["val_loss"] == 5 / 4


def test_the_variance_between_the_sources_of_a_mixture_is_no_error():
    losses, sizes = np.array([[6.0, 6.2, 13.0, 13.2]]), np.array([[10, 10, 0, 0], [0, 0, 10, 10]])
    result = of_sums(losses, np.full((1, 4), 4), sizes, ("low", "high"))
    assert result["val_bpb_stderr"] == pytest.approx(math.sqrt(0.08) / 40 / math.log(2))
    few = of_sums(losses[:, :3], np.full((1, 3), 4), sizes[:, :3], ("low", "high"))
    assert few["val_bpb_stderr"] is None  # nothing is known of the variance of `high`


def test_each_dataset_of_a_mixture_has_its_bits_per_byte():
    losses, sizes = np.array([[4.0, 6.0, 3.0, 0.0]]), np.array([[10, 20, 0, 0], [0, 0, 30, 0], [0, 0, 0, 0]])
    result = of_sums(losses, np.array([[4, 4, 4, 0]]), sizes, ("a", "b", "none"))
    assert result["val_bpb_of"] == pytest.approx({"a": 10 / 30 / math.log(2), "b": 0.1 / math.log(2), "none": None})
    assert result["val_bpb"] == pytest.approx(13 / 60 / math.log(2))


def compiled_for(mesh: Mesh, config: ModelConfig, dtype: str, length: int):
    """Return the compiled function of two greedy continuations, and the parameters' shapes."""
    on_mesh = shard_network(config, jnp.dtype(dtype), mesh)
    params, of = on_mesh.abstract_params(), lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)
    generate, options = make_generate(on_mesh), {"temperature": 0.0, "top_k": 0}
    return generate.lower(params, of(2, length), of(2), of(2), prefill=1, **options).compile(), jax.tree.leaves(params)


def test_parameters_divided_by_tensor_are_never_gathered():
    """Keep heads, MLP width, vocabulary and the cache's heads divided along `tensor`."""
    config = ModelConfig(depth=2, width=64, heads=8, kv_heads=8, head_dim=24, vocab_size=2048)
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    compiled, leaves = compiled_for(mesh, config, "float32", 16)
    shapes = {tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())}
    whole = {leaf.shape for leaf in leaves}
    assert not (shapes | {shape[::-1] for shape in shapes}) & whole
    assert (2, 2, 16, 24) in shapes and (2, 8, 16, 24) not in shapes
    arguments = sum(4 * leaf.size for leaf in leaves) / 8
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(arguments, rel=0.01)


@pytest.mark.medium
def test_on_a_tpu_slice_fsdp_gathers_one_matrix_at_a_time():
    pytest.importorskip("libtpu")
    config = ModelConfig(depth=2, width=512, heads=8, kv_heads=8, head_dim=64, vocab_size=512)
    mesh = make_mesh(MeshConfig(fsdp=4), devices_of("v5e:2x2"))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled, leaves = compiled_for(mesh, config, "bfloat16", 6)
    whole = sum(2 * leaf.size for leaf in leaves)
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

"""Trace every program at the largest documented depth, without compilation or arrays."""

import jax
import jax.numpy as jnp
import pytest

from configs.schema import BatchConfig, Config, DiagnosticsConfig, MeshConfig, ModelConfig
from evaluation.evaluator import make_generate
from tests.helpers import ALL_FEATURES
from training.build import build


@pytest.mark.medium
def test_every_program_of_depth_48_is_traced():
    """Its parameter counts exceed 32 bits."""
    sizes = {"depth": 48, "width": 3072, "heads": 24, "kv_heads": 24, "head_dim": 128, "vocab_size": 32768}
    model = ModelConfig(**ALL_FEATURES | sizes)
    built = build(
        Config(
            name="deep",
            model=model,
            batch=BatchConfig(sequence_length=128, tokens_per_step=1024, rows_per_device=1),
            mesh=MeshConfig(data=4, fsdp=2),
            diagnostics=DiagnosticsConfig(every_steps=1),
        ),
        jax.devices()[:8],
    )
    state, batch = built.abstract_state, built.abstract_batch()
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) > 2**31
    _, metrics = jax.eval_shape(built.train_step, state, batch)
    _, measured = jax.eval_shape(built.measuring_step, state, batch)
    assert measured.keys() - metrics.keys() == {"diagnostics"}
    losses, tokens = jax.eval_shape(built.eval_step, state.params, batch)
    assert (losses.dtype, tokens.dtype) == (jnp.float32, jnp.int32)
    prompts, numbers = jax.ShapeDtypeStruct((2, 24), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    generate = make_generate(built.config.model, built.dtype, built.mesh)
    options = {"prefill": 8, "temperature": 0.8, "top_k": 50}
    assert generate.eval_shape(state.params, prompts, numbers, numbers, **options).shape == prompts.shape

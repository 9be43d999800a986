"""Test that dropout depends on seed, step, row and layer only, and exists in training only."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.attention import Inputs
from model.gpt import GPT
from model.rotary import rotary_angles
from options.schema import MeshConfig, with_options
from tests.helpers import TINY, built_on, distance, random_rows, run_steps, tiny_config
from training.step import dropout_keys

CONFIG = tiny_config(dropout=0.3, kv_heads=4)
X = jnp.asarray(np.random.default_rng(0).uniform(1, 2, (2, 64, 32)), jnp.float32)


@pytest.mark.medium
def test_another_split_mesh_and_recomputation_give_the_same_update():
    """Take two steps. Without the same masks the parameters would differ by percents."""
    rows = [random_rows(CONFIG, step) for step in range(2)]
    expected, expected_metrics = run_steps(CONFIG, rows)
    options = {"batch.rows_per_device": 1, "model.remat": "products", "mesh": MeshConfig(2, 2, 2)}
    params, metrics = run_steps(with_options(CONFIG, options), rows, 8)
    assert distance(params, expected) < 1e-6
    losses, expected_losses = ([float(m["loss"]) for m in each] for each in (metrics, expected_metrics))
    assert losses == pytest.approx(expected_losses, rel=1e-6)


def test_keys_follow_seed_step_and_row_in_the_global_order():
    data = lambda *arguments: np.asarray(jax.random.key_data(dropout_keys(*arguments))).reshape(-1, 2)
    whole = data(3, jnp.int32(7), (1, 16))
    for shape in ((2, 8), (4, 4), (16, 1)):
        assert (data(3, jnp.int32(7), shape) == whole).all()
    together = np.concatenate([whole, data(3, jnp.int32(8), (1, 16)), data(4, jnp.int32(7), (1, 16))])
    assert len(np.unique(together, axis=0)) == 48


def test_only_outputs_of_attention_and_mlp_are_dropped_by_masks_of_their_own():
    model = GPT(replace(TINY, dropout=0.25), jnp.dtype("float32"), rngs=nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(1), 2)
    inputs = Inputs(jnp.zeros((2, 64), jnp.int32), None, rotary_angles(jnp.arange(64), 8, 1e5), None)
    masks = []
    for block in model.blocks:
        for used, unused in ((block.attention.out, block.mlp.down), (block.mlp.down, block.attention.out)):
            used.kernel[...], unused.kernel[...] = jnp.ones_like(used.kernel[...]), jnp.zeros_like(unused.kernel[...])
            added, kept = (block(X, i, None)[0] - X for i in (inputs, inputs._replace(dropout_keys=keys)))
            masks.append(np.asarray(kept != 0))
            np.testing.assert_allclose(kept, np.where(masks[-1], added / 0.75, 0), rtol=1e-4, atol=1e-4)
    rows = np.stack(masks).reshape(8, -1)  # two layers, two layouts, two rows
    agreement = (rows[:, None] == rows).mean(axis=-1)
    np.testing.assert_allclose(agreement, 0.625 + 0.375 * np.eye(8), atol=0.06)


@pytest.mark.medium
def test_programs_without_dropout_draw_no_number_and_evaluation_never_does():
    """Compare the text of the programs."""
    texts = {}
    for rate in (0.0, 0.3):
        built = built_on(with_options(CONFIG, {"model.dropout": rate}), 1)
        state, batch = built.abstract_state, built.abstract_batch()
        train, evaluate = built.train_step.lower(state, batch), built.eval_step.lower(state.params, batch)  # pyright: ignore
        texts[rate] = train.as_text(), evaluate.as_text()
    assert "threefry" in texts[0.3][0] and "threefry" not in texts[0.0][0]
    assert texts[0.3][1] == texts[0.0][1]

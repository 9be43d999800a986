"""Test that bench/fine_tuning.py compares the rules that docs/fine-tuning.md names."""

import os
from dataclasses import replace

import jax
import numpy as np
import pytest

from bench.fine_tuning import Ours, Theirs, each_alone, gradient_errors, means, split
from configs.schema import DataConfig
from tests.helpers import ALL_FEATURES, perturbed, random_rows, tiny_config
from training.build import build

BOS, ROWS = 0, 8


def rows_of_conversations() -> dict[str, np.ndarray]:
    """Return 8 rows of 32 tokens, of which 1 to 31 are valid."""
    valid = np.geomspace(1, 31, ROWS).astype(int)
    weights = (np.arange(32) < np.random.default_rng(0).permutation(valid)[:, None]).astype(np.float32)
    return random_rows(tiny_config(rows=ROWS, length=32), seed=0, weights=weights)


@pytest.fixture(scope="module")
def ours() -> Ours:
    # nanochat's gates read 24 and 12 channels, and its vocabulary is a multiple of 64.
    sizes = {"width": 64, "head_dim": 16, "kv_heads": 4, "vocab_size": 320, "qk_scale": 1.2, "window_pattern": "L"}
    config = tiny_config(rows=ROWS, rows_per_device=ROWS, length=32, **ALL_FEATURES | sizes | {"short_window": None})
    built = build(replace(config, data=DataConfig()), jax.devices()[:1])
    return Ours(built, perturbed(built.create_state().params))


@pytest.mark.medium
def test_our_gradient_is_the_same_for_every_split_and_the_mean_of_means_differs(ours):
    rows = rows_of_conversations()
    assert max(gradient_errors(ours.summed, rows, ROWS).values()) < 1e-5
    errors = gradient_errors(ours.multi_steps, rows, ROWS)
    assert list(errors) == [2, 4, 8] and errors[2] > 0.01 and errors[8] > 0.2


@pytest.mark.medium
@pytest.mark.parametrize("micro_batches", [2, 8])
def test_the_reweighed_sum_is_what_multi_steps_makes_of_means(ours, micro_batches):
    batch = split(rows_of_conversations(), micro_batches)
    theirs = ours.multi_steps(batch)
    assert np.linalg.norm(ours.summed(means(batch)) - theirs) < 1e-5 * np.linalg.norm(theirs)
    empty = batch | {"weights": np.zeros_like(batch["weights"])}
    assert not means(empty)["weights"].any()


@pytest.mark.medium
@pytest.mark.skipif("NANOCHAT_DIR" not in os.environ, reason="NANOCHAT_DIR names no checkout of nanochat")
def test_nanochat_s_loop_has_the_error_of_means(ours):
    rows = rows_of_conversations()
    theirs = Theirs(ours.built.config, ours.params)
    expected = gradient_errors(ours.multi_steps, rows, ROWS)
    assert gradient_errors(theirs.gradient, rows, ROWS) == pytest.approx(expected, rel=1e-3)
    loss = ours.loss(ours.params, rows)
    assert theirs.loss(theirs.network(), rows) == pytest.approx(loss, rel=1e-4)


def test_each_conversation_of_packed_rows_gets_a_row():
    packed = {
        "inputs": np.array([[BOS, 1, 2, BOS, 3, 4], [BOS, 5, BOS, BOS, BOS, BOS]], np.int32),
        "targets": np.array([[1, 2, BOS, 3, 4, BOS], [5, BOS, BOS, BOS, BOS, BOS]], np.int32),
        "weights": np.array([[0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]], np.float32),
    }
    alone = each_alone(packed, BOS)
    assert alone["inputs"].tolist() == [[BOS, 1, 2, BOS, BOS, BOS], [BOS, 3, 4, BOS, BOS, BOS]]
    assert alone["targets"].tolist() == [[1, 2, BOS, BOS, BOS, BOS], [3, 4, BOS, BOS, BOS, BOS]]
    assert alone["weights"].tolist() == [[0, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]]

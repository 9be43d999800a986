"""Test nanochat's recipe for its own network on our batches: its schedules and its evaluation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench.nanochat import Schedules, scaled, summed
from evaluation.evaluator import evaluate
from model.loss import softcap
from tests.helpers import tiny_config
from training.build import build
from training.state import split_model


def test_schedules_have_the_values_worked_out_by_hand():
    """Expect a warmdown of 650 steps after 350, which the warmup of the momentum outlasts by 50."""
    of = Schedules(1000)
    assert [of.rate(step) for step in (0, 19, 39, 40, 350)] == pytest.approx([0.025, 0.5, 1, 1, 1])
    assert [of.rate(step) for step in (675, 1000)] == pytest.approx([0.525, 0.05])
    assert [of.momentum(step) for step in (0, 200, 399)] == pytest.approx([0.85, 0.91, 0.9697])
    assert [of.momentum(step) for step in (415, 675, 1000)] == pytest.approx([0.963, 0.935, 0.9])
    assert [of.decay(step) for step in (0, 250, 500, 1000)] == pytest.approx([1, (2 + math.sqrt(2)) / 4, 0.5, 0])
    assert Schedules(30).rate(29) == pytest.approx(0.75)  # the warmup comes first


def test_rates_and_decay_scale_with_the_batch_and_the_network():
    """Take a batch of 1/64 of the reference's, and a twentieth of its parameters."""
    rates = {"unembedding_lr": 0.001, "embedding_lr": 0.0375, "scalar_lr": 0.0625, "matrix_lr": 0.0025}
    assert scaled(5, 100, 2**13) == pytest.approx(rates | {"weight_decay": 0.7})


def test_bits_per_byte_are_those_of_our_evaluation():
    torch = pytest.importorskip("torch")
    built = build(tiny_config(rows=6, rows_per_device=3), jax.devices()[:1])
    graphdef, _ = split_model(built.config.model, built.dtype)
    params, generator = built.create_state().params, np.random.default_rng(0)
    tokens = generator.integers(0, built.config.model.vocab_size, (2, *built.batch_shape), np.int32)
    weights = generator.integers(0, 2, built.batch_shape).astype(np.float32)
    batch = {"inputs": tokens[0], "targets": tokens[1], "weights": weights}

    def network(inputs, targets, loss_reduction):
        logits = softcap(nnx.merge(graphdef, params)(jnp.asarray(inputs.int().numpy()))[0], built.config.model.softcap)
        logits = torch.tensor(np.asarray(logits)).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction=loss_reduction)

    sizes = np.array([[70, 50]])
    theirs = evaluate(lambda _, batch: summed(network, batch, "cpu"), {}, [batch], sizes)
    ours = evaluate(built.eval_step, params, [jax.device_put(batch, built.batch_sharding)], sizes)
    assert theirs == pytest.approx(ours, rel=1e-6)

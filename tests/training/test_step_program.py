"""Test the compiled step's memory and sums, and how often it is compiled."""

import logging

import jax
import numpy as np
import pytest

from model.gpt import parameter_counts
from options.schema import MeshConfig, with_options
from tests.helpers import built_on, distance, random_rows, run_steps, tiny_config
from tools.programs.compiled import compile_step

# Activations, logits and parameters are large enough to matter in the sum.
SIZES = {"depth": 1, "width": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "vocab_size": 1024}


def memory(micro_batches: int) -> int:
    """Return the bytes of temporaries per device, for micro-batches of 4 rows of 128 tokens on each of two."""
    config = tiny_config(4 * micro_batches * 2, 4, 128, **SIZES)
    return compile_step(built_on(config, 2)).memory_analysis().temp_size_in_bytes


@pytest.mark.medium
def test_memory_does_not_grow_with_the_number_of_micro_batches():
    one, two, many = (memory(k) for k in (1, 2, 32))
    assert many == pytest.approx(two, rel=0.02)
    accumulator = 4 * sum(parameter_counts(tiny_config(**SIZES).model).values())
    # XLA on CPU also hoists a transposed copy of the head out of the loop, which K = 1 lacks.
    assert two <= one + accumulator + 0.02 * one


@pytest.mark.medium
def test_chunks_and_recomputation_on_a_mesh_equal_one_device_and_the_whole():
    config = tiny_config(rows_per_device=4)
    rows = [random_rows(config, step) for step in range(2)]
    params, metrics = run_steps(config, rows)
    options = {"model.remat": "block", "model.loss_chunks": 4, "mesh": MeshConfig(2, 2, 2)}
    other_params, others = run_steps(with_options(config, options), rows, 8)
    assert distance(other_params, params) < 1e-6
    for ours, expected in zip(others, metrics, strict=True):
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.medium
def test_bfloat16_gradients_are_summed_in_float32():
    """Repeat one micro-batch 256 times. A sum in bfloat16 would stop at a fraction of it."""
    config = tiny_config(rows=256, rows_per_device=1, dtype="bfloat16")
    row = {name: array[:1] for name, array in random_rows(config, 0).items()}
    many = {name: np.repeat(array, 256, axis=0) for name, array in row.items()}
    _, (metrics,) = run_steps(config, [many])
    many["weights"][1:] = 0
    _, (expected,) = run_steps(config, [many])
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_run_compiles_its_step_once(caplog):
    config = tiny_config(rows_per_device=4, softcap=14.0)  # a new network, which no test compiled before
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        run_steps(config, [random_rows(config, step) for step in range(5)])
    compiled = [record.message for record in caplog.records if "Finished XLA compilation of" in record.message]
    assert sum("train_step" in message for message in compiled) == 1, compiled

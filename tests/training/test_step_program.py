"""Test the compiled step's memory, and how often it is compiled."""

import logging
from dataclasses import replace

import jax
import numpy as np
import pytest

from configs import plain
from configs.schema import BatchConfig, Config, MeshConfig
from model.shapes import parameter_counts
from tests.helpers import distance, random_rows, run_steps, step_of, tiny_config
from tools.programs.compiled import compile_step
from training.build import build
from training.mesh import batch_shape, batch_sharding

# Activations, logits and parameters are large enough to matter in the sum.
SIZES = {"depth": 2, "width": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "vocab_size": 1024}


def memory(micro_batches: int, mesh: MeshConfig = MeshConfig(), devices: int = 1, **model) -> int:  # noqa: B008
    """Return the bytes of temporaries per device, for micro-batches of 4 rows of 128 tokens on each."""
    config = tiny_config(length=128, **SIZES | model)
    rows = 4 * micro_batches * devices
    batch = BatchConfig(sequence_length=128, tokens_per_step=128 * rows, rows_per_device=4)
    config = replace(config, batch=batch, mesh=mesh)
    return temporaries(config, devices)


def temporaries(config: Config, devices: int) -> int:
    compiled = compile_step(build(config, jax.devices()[:devices]))
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.medium
def test_memory_of_the_plain_config():
    """Measured when written: 324 MiB (attention's scores are stored once, logits in quarters)."""
    assert temporaries(plain.get_config(), 1) < 340 * 2**20


@pytest.mark.medium
@pytest.mark.parametrize("devices", [1, 8])
def test_memory_does_not_grow_with_the_number_of_micro_batches(devices):
    one, two, many = (memory(k, devices=devices) for k in (1, 2, 32))
    assert many == pytest.approx(two, rel=0.02)
    accumulator = 4 * sum(parameter_counts(tiny_config(**SIZES).model).values())
    # XLA on CPU also hoists a transposed copy of the head out of the loop, which K = 1 lacks.
    assert two <= one + accumulator + 0.02 * one


@pytest.mark.medium
@pytest.mark.parametrize("option", [{"remat": "products", "loss_chunks": 4}, {"remat": "block"}])
def test_options_that_save_memory_do_not_change_the_result(option):
    config = tiny_config(rows_per_device=4)
    rows = [random_rows(config, step) for step in range(2)]
    params, metrics = run_steps(replace(config, model=replace(config.model, **option)), rows)
    expected, expected_metrics = run_steps(config, rows)
    assert distance(params, expected) < 1e-6
    assert [float(t["loss"]) for t in metrics] == pytest.approx([float(t["loss"]) for t in expected_metrics], rel=1e-6)


@pytest.mark.medium
def test_chunks_and_z_loss_on_a_mesh_equal_one_device_and_the_whole():
    config = tiny_config(rows_per_device=4)
    config = replace(config, model=replace(config.model, z_loss=0.01))
    rows = [random_rows(config, step) for step in range(2)]
    chunks = replace(config, model=replace(config.model, loss_chunks=4), mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    params, metrics = run_steps(config, rows)
    mesh_params, mesh_metrics = run_steps(chunks, rows, devices=8)
    assert distance(mesh_params, params) < 1e-6
    assert mesh_metrics[1]["loss"] == pytest.approx(metrics[1]["loss"], rel=1e-6)
    assert mesh_metrics[1]["z_loss"] == pytest.approx(metrics[1]["z_loss"], rel=1e-5)
    without = replace(config, model=replace(config.model, z_loss=0.0))
    _, (plain, _) = run_steps(without, rows)
    assert metrics[0]["loss"] == plain["loss"] and "z_loss" not in plain
    assert metrics[0]["z_loss"] == pytest.approx(0.01 * np.log(272) ** 2, rel=0.1)
    assert metrics[0]["grad_norm"] > 1.001 * plain["grad_norm"]


def test_memory_of_chunks():
    whole, parts = memory(2), memory(2, loss_chunks=8)
    logits = 4 * 4 * 128 * SIZES["vocab_size"]
    assert parts < whole - logits


@pytest.mark.medium
def test_bfloat16_gradients_are_summed_in_float32():
    """Repeat one micro-batch 256 times. A sum in bfloat16 would stop at a fraction of it."""
    config = tiny_config(rows=256, rows_per_device=1, dtype="bfloat16")
    row = {name: array[:1] for name, array in random_rows(config, 0).items()}
    many = {name: np.repeat(array, 256, axis=0) for name, array in row.items()}
    alone = replace(config, batch=replace(config.batch, tokens_per_step=16))
    _, (metrics,) = run_steps(config, [many])
    _, (expected,) = run_steps(alone, [row])
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_a_run_compiles_its_step_once(caplog):
    config = tiny_config(rows_per_device=4, softcap=14.0)  # a new network, which no test compiled before
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        run_steps(config, [random_rows(config, step) for step in range(5)])
    compiled = [record.message for record in caplog.records if "Finished XLA compilation of" in record.message]
    assert sum("train_step" in message for message in compiled) == 1, compiled


@pytest.mark.medium
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)])
def test_the_state_keeps_its_sharding(mesh):
    """A compiled step rejects a state stored elsewhere. XLA would choose another place for Muon's second moments."""
    matrices = replace(tiny_config().optimizer.matrices, kind="muon")
    config = replace(tiny_config(rows_per_device=1), mesh=mesh)
    config = replace(config, optimizer=replace(config.optimizer, matrices=matrices))
    train_step, devices, state, _ = step_of(config, 8)
    shape = batch_shape(config.batch, devices)
    rows = {name: array.reshape(shape) for name, array in random_rows(config, 0).items()}
    batch = jax.device_put(rows, batch_sharding(devices))
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    compiled = train_step.lower(state, batch).compile()
    for _ in range(2):
        state, _ = compiled(state, batch)
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == places

"""Tokens a second of the training step on random tokens, as one JSON line: the source of the quoted speeds.

python -m bench.throughput --config=configs/plain.py --model.depth=20 --rows=16 --micro_batches=4

Parameters are freshly initialized, and nothing is read or saved.
"""

import json
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from hosts.machines import peak_flops
from hosts.runtime import run_command
from model.gpt import flops_per_token, parameter_counts
from options.command_line import parse
from options.schema import Config, Positive
from options.validation import require_steps, validate
from system.errors import UserError
from training.build import Build, build, program_bytes
from training.step import Batch

WARMUP_STEPS = 3


@dataclass(frozen=True)
class Sizes:
    """Sizes that replace the config's."""

    rows: Positive[int] | None = None
    """Rows of a micro-batch on one device."""
    micro_batches: Positive[int] | None = None
    """Micro-batches of a step."""


def sized(config: Config, sizes: Sizes, devices: int) -> Config:
    """Return the config with the sizes of the command line. Raise UserError as for a config."""
    batch = config.batch
    if sizes.rows or sizes.micro_batches:
        rows = sizes.rows or batch.rows_per_device
        if rows == "auto":
            raise UserError(f"--micro_batches={sizes.micro_batches} needs --rows: together they make the step's size")
        # If tensor does not divide the devices, the mesh is refused.
        unit = rows * max(devices // config.mesh.tensor, 1) * batch.sequence_length
        micro_batches = sizes.micro_batches or max(batch.tokens_per_step // unit, 1)
        batch = replace(batch, rows_per_device=rows, tokens_per_step=unit * micro_batches)
    config = replace(config, batch=batch)
    validate(config)
    return config


@dataclass(frozen=True)
class Arguments(Sizes):
    """Sizes, and how to measure."""

    timed_steps: Positive[int] = 9
    """Timed calls, after 3 to warm up. The median is reported."""


def random_batch(built: Build) -> Batch:
    """Return a step's batch of random tokens, on the devices; with `data.mask_documents`, a document a row."""
    generator = np.random.default_rng(built.config.seed)
    draw = lambda leaf: generator.integers(0, built.config.model.vocab_size, leaf.shape, np.int32)
    fill = {"inputs": draw, "targets": draw, "weights": lambda leaf: np.ones(leaf.shape, np.float32)}
    fill["segment_ids"] = lambda leaf: np.ones(leaf.shape, np.int32)
    batch = {name: fill[name](leaf) for name, leaf in built.abstract_batch().items()}
    return jax.device_put(batch, built.batch_sharding)


def peak_memory_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the peak bytes on the first device, as it reports them or else by the program's own analysis."""
    measured = jax.local_devices()[0].memory_stats() or {}
    return measured.get("peak_bytes_in_use") or program_bytes(compiled)


def measure(config: Config, arguments: Arguments) -> dict[str, Any]:
    """Compile the training step and time it. The cache of compiled programs is not used, unless
    JAX_COMPILATION_CACHE_DIR names one. The first step's seconds include tracing and compiling it."""
    built = build(config)
    mesh, device = built.mesh, built.mesh.devices.flat[0]
    state, batch = built.create_state(), random_batch(built)
    start = time.perf_counter()
    compiled = built.train_step.lower(state, batch).compile()
    compile_seconds = time.perf_counter() - start
    seconds, metrics = [], {}
    for _ in range(WARMUP_STEPS + arguments.timed_steps):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, batch))
        seconds.append(time.perf_counter() - start)
    step_seconds = statistics.median(seconds[WARMUP_STEPS:])
    tokens_per_second = config.batch.tokens_per_step / step_seconds
    flops, peak = flops_per_token(config.model, config.batch.sequence_length), peak_flops(device.device_kind)
    return {
        "config": config.name,
        "device": device.device_kind,
        "devices": mesh.size,
        "jax": jax.__version__,
        "dtype": built.dtype.name,
        "depth": config.model.depth,
        "width": config.model.width,
        "rows": built.batch_shape[1] // (mesh.size // mesh.shape["tensor"]),
        "micro_batches": built.batch_shape[0],
        "parameters": sum(parameter_counts(config.model).values()),
        "flops_per_token": flops,
        "compile_seconds": round(compile_seconds, 1),
        "first_step_seconds": round(compile_seconds + seconds[0], 2),
        "step_seconds": round(step_seconds, 4),
        "loss": round(float(metrics["loss"]), 4),
        "tokens_per_second": int(tokens_per_second),
        "mfu": round(tokens_per_second * flops / (peak * mesh.size), 4) if peak else None,
        "peak_gib": round(peak_memory_bytes(compiled) / 2**30, 2),
    }


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    require_steps(config)
    config = sized(config, arguments, len(jax.devices()))
    if config.batch.rows_per_device == "auto":
        raise UserError("--rows is missing: the rows of a micro-batch on one device; the config has `auto`")
    print(json.dumps(measure(config, arguments)))
    return 0


if __name__ == "__main__":
    run_command(main)

"""Tokens a second of the training step on random tokens, as one JSON line: what speed is quoted from.

python -m bench.throughput --config=configs/d12.py --depth=20 --rows=16 --micro_batches=4 --profile
"""

import json
import statistics
import time
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.sharding import NamedSharding

from bench.operations import top_operations
from configs.command_line import parse
from configs.schema import Config, UserError, validate
from model.flops import flops_per_token, parameter_counts, peak_flops
from training.mesh import batch_shape, batch_sharding, make_mesh
from training.optimizer import make_optimizer
from training.runtime import peak_memory_bytes, run_command
from training.state import compute_dtype, create_state, split_model
from training.step import Batch, make_train_step

WARMUP_STEPS = 3


@dataclass(frozen=True)
class Arguments:
    """What is measured, where it differs from the config."""

    depth: int | None = None
    """Blocks; the width becomes 64 x depth, rounded up to whole heads, as in nanochat."""
    rows: int | None = None
    """Rows of a micro-batch on one device."""
    micro_batches: int | None = None
    """Micro-batches of a step."""
    timed_steps: int = 9
    """Steps whose median is taken, after 3 that are not."""
    profile: bool = False
    """Before the line, a table of the instructions that take the most time, from steps that are not timed."""


def sized(config: Config, arguments: Arguments, devices: int) -> Config:
    """The config with the sizes of the command line. UserError as for a config."""
    sizes = (arguments.depth, arguments.rows, arguments.micro_batches, arguments.timed_steps)
    if min(n for n in sizes if n is not None) < 1:
        raise UserError("--depth, --rows, --micro_batches and --timed_steps must be at least 1")
    model, batch = config.model, config.batch
    if arguments.depth:
        heads = -(-64 * arguments.depth // model.head_dim)
        model = replace(model, depth=arguments.depth, width=heads * model.head_dim, heads=heads, kv_heads=heads)
    if arguments.rows or arguments.micro_batches:
        rows = arguments.rows or batch.rows_per_device
        unit = rows * devices * batch.sequence_length
        micro_batches = arguments.micro_batches or max(batch.tokens_per_step // unit, 1)
        batch = replace(batch, rows_per_device=rows, tokens_per_step=unit * micro_batches)
    config = replace(config, model=model, batch=batch)
    validate(config)
    return config


def random_batch(config: Config, shape: tuple[int, int, int], sharding: NamedSharding) -> Batch:
    """A step's batch of random tokens, on the devices."""
    generator = np.random.default_rng(config.seed)
    tokens = generator.integers(0, config.model.vocab_size, (2, *shape), np.int32)
    return jax.device_put({"inputs": tokens[0], "targets": tokens[1], "weights": np.ones(shape, np.float32)}, sharding)


def measure(config: Config, timed_steps: int, profile: bool = False) -> dict:
    """Compiles the step, without the cache of compiled programs, and times it."""
    mesh = make_mesh(config.mesh)
    device = mesh.devices.flat[0]
    dtype = compute_dtype(config.model, device.platform)
    shape = batch_shape(config.batch, mesh)
    optimizer, rates = make_optimizer(
        config.optimizer, split_model(config.model, dtype)[1], config.model.width, config.steps, mesh
    )
    state = create_state(config.model, optimizer, mesh, config.seed)
    batch = random_batch(config, shape, batch_sharding(mesh))
    start = time.perf_counter()
    train_step = make_train_step(config.model, dtype, mesh, optimizer, rates, config.optimizer.clip_norm)
    train_step = train_step.lower(state, batch).compile()
    compile_seconds = time.perf_counter() - start

    def run() -> None:
        nonlocal state
        state, metrics = train_step(state, batch)
        jax.block_until_ready((state, metrics))

    seconds = []
    for _ in range(WARMUP_STEPS + timed_steps):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    if profile:
        print(top_operations(train_step, run, steps=3))
    step_seconds = statistics.median(seconds[WARMUP_STEPS:])
    tokens_per_second = config.batch.tokens_per_step / step_seconds
    flops, peak = flops_per_token(config.model, config.batch.sequence_length), peak_flops(device.device_kind)
    return {
        "config": config.name,
        "device": device.device_kind,
        "devices": mesh.size,
        "jax": jax.__version__,
        "dtype": dtype.name,
        "depth": config.model.depth,
        "width": config.model.width,
        "rows": shape[1] // mesh.size,
        "micro_batches": shape[0],
        "parameters": sum(parameter_counts(config.model).values()),
        "flops_per_token": flops,
        "compile_seconds": round(compile_seconds, 1),
        "step_seconds": round(step_seconds, 4),
        "tokens_per_second": int(tokens_per_second),
        "mfu": round(tokens_per_second * flops / (peak * mesh.size), 4) if peak else None,
        "peak_gib": round(peak_memory_bytes(train_step) / 2**30, 2),
    }


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    config = sized(config, arguments, jax.device_count())
    print(json.dumps(measure(config, arguments.timed_steps, arguments.profile)))
    return 0


if __name__ == "__main__":
    run_command(main)

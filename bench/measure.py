"""The training step on random tokens, in a size of choice: what the programs of bench/ measure."""

import statistics
import time
from dataclasses import dataclass, replace

import jax
import numpy as np

from configs.schema import Config, Positive, validate
from hosts.machines import peak_flops
from model.flops import flops_per_token, parameter_counts
from tools.programs.device_memory import peak_memory_bytes
from tools.programs.operations import top_operations
from training.build import Build, build
from training.step import Batch

WARMUP_STEPS = 3


@dataclass(frozen=True)
class Sizes:
    """What is measured, where it differs from the config."""

    depth: Positive[int] | None = None
    """Blocks; the width becomes 64 x depth, rounded up to whole heads, as in nanochat."""
    rows: Positive[int] | None = None
    """Rows of a micro-batch on one device."""
    micro_batches: Positive[int] | None = None
    """Micro-batches of a step."""


def sized(config: Config, sizes: Sizes, devices: int) -> Config:
    """The config with the sizes of the command line. UserError as for a config."""
    model, batch = config.model, config.batch
    if sizes.depth:
        heads = -(-64 * sizes.depth // model.head_dim)
        model = replace(model, depth=sizes.depth, width=heads * model.head_dim, heads=heads, kv_heads=heads)
    if sizes.rows or sizes.micro_batches:
        rows = sizes.rows or batch.rows_per_device
        # Where tensor does not divide the devices, the mesh is refused.
        unit = rows * max(devices // config.mesh.tensor, 1) * batch.sequence_length
        micro_batches = sizes.micro_batches or max(batch.tokens_per_step // unit, 1)
        batch = replace(batch, rows_per_device=rows, tokens_per_step=unit * micro_batches, ramp="")
    config = replace(config, model=model, batch=batch)
    validate(config)
    return config


def random_batch(built: Build) -> Batch:
    """A step's batch of random tokens, on the devices; with `data.mask_documents`, a document a row."""
    generator = np.random.default_rng(built.config.seed)
    draw = lambda leaf: generator.integers(0, built.config.model.vocab_size, leaf.shape, np.int32)
    fill = {"inputs": draw, "targets": draw, "weights": lambda leaf: np.ones(leaf.shape, np.float32)}
    fill["segment_ids"] = lambda leaf: np.ones(leaf.shape, np.int32)
    batch = {name: fill[name](leaf) for name, leaf in built.abstract_batch().items()}
    return jax.device_put(batch, built.batch_sharding)


def measure(config: Config, timed_steps: int, profile: bool = False) -> dict:
    """Compiles the step, without the cache of compiled programs (unless JAX_COMPILATION_CACHE_DIR names one), and times
    it. The seconds of the first step are those of tracing, compiling or loading, and taking it."""
    built = build(config)
    mesh, device = built.mesh, built.mesh.devices.flat[0]
    state, batch = built.create_state(), random_batch(built)
    start = time.perf_counter()
    train_step = built.train_step.lower(state, batch).compile()
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
        "tokens_per_second": int(tokens_per_second),
        "mfu": round(tokens_per_second * flops / (peak * mesh.size), 4) if peak else None,
        "peak_gib": round(peak_memory_bytes(train_step) / 2**30, 2),
    }

"""Tokens a second of the training step on random tokens, as one JSON line: the source of the quoted speeds.

python -m bench.throughput --config=configs/plain.py --model.depth=20 --rows=16 --micro_batches=4

--program measures another program. Parameters are freshly initialized, and nothing is read or saved.
"""

import json
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from configs.command_line import parse
from configs.schema import Config, Positive, UserError
from configs.validation import require_steps, validate
from evaluation.evaluator import make_generate
from hosts.machines import peak_flops
from hosts.runtime import run_command
from model.gpt import flops_per_token, parameter_counts
from training.build import Build, build
from training.memory import program_bytes
from training.step import Batch

WARMUP_STEPS = 3
PROMPTS, SAMPLED = 16, 128  # prompts of one token that `sampling` continues together, and new tokens of each


@dataclass(frozen=True)
class Sizes:
    """Sizes that replace the config's."""

    depth: Positive[int] | None = None
    """Blocks; the width becomes 64 x depth, rounded up to whole heads, as in nanochat."""
    rows: Positive[int] | None = None
    """Rows of a micro-batch on one device."""
    micro_batches: Positive[int] | None = None
    """Micro-batches of a step."""


def sized(config: Config, sizes: Sizes, devices: int) -> Config:
    """Return the config with the sizes of the command line. Raise UserError as for a config."""
    model, batch = config.model, config.batch
    if sizes.depth:
        heads = -(-64 * sizes.depth // model.head_dim)
        model = replace(model, depth=sizes.depth, width=heads * model.head_dim, heads=heads, kv_heads=heads)
    if sizes.rows or sizes.micro_batches:
        rows = sizes.rows or batch.rows_per_device
        if rows == "auto":
            raise UserError(f"--micro_batches={sizes.micro_batches} needs --rows: together they make the step's size")
        # If tensor does not divide the devices, the mesh is refused.
        unit = rows * max(devices // config.mesh.tensor, 1) * batch.sequence_length
        micro_batches = sizes.micro_batches or max(batch.tokens_per_step // unit, 1)
        batch = replace(batch, rows_per_device=rows, tokens_per_step=unit * micro_batches)
    config = replace(config, model=model, batch=batch)
    validate(config)
    return config


@dataclass(frozen=True)
class Arguments(Sizes):
    """The program to measure, and how."""

    program: Literal["step", "measuring_step", "evaluation", "sampling"] = "step"
    """The training step; the step that measures itself; an evaluation of the step's batch; or sampling (16 prompts)."""
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


def program_of(built: Build, name: str) -> tuple[Any, tuple, int]:
    """Return a jitted function, the arrays that it is called with, and the tokens of one call."""
    state, batch = built.create_state(), random_batch(built)
    if name == "sampling":
        tokens = min(SAMPLED, built.batch_shape[2] - 1)
        prompts = np.zeros((PROMPTS, tokens + 1), np.int32)
        arrays = state.params, prompts, np.ones(PROMPTS, np.int32), np.arange(PROMPTS, dtype=np.int32)
        generate = make_generate(built.config.model, built.dtype, built.mesh)
        return jax.jit(partial(generate, prefill=1, temperature=0.8, top_k=50)), arrays, PROMPTS * tokens
    if name == "evaluation":
        return built.eval_step, (state.params, batch), built.config.batch.tokens_per_step
    step = built.train_step if name == "step" else built.measuring_step
    return step, (state, batch), built.config.batch.tokens_per_step


def peak_memory_bytes(compiled: jax.stages.Compiled) -> int:
    """Return the peak bytes on the first device, as it reports them or else by the program's own analysis."""
    measured = jax.local_devices()[0].memory_stats() or {}
    return measured.get("peak_bytes_in_use") or program_bytes(compiled)


def measure(config: Config, arguments: Arguments) -> dict[str, Any]:
    """Compile the program, without the cache of compiled programs (unless JAX_COMPILATION_CACHE_DIR names one), and
    time it. The first step's seconds include tracing, compiling or loading, and running it."""
    built = build(config)
    mesh, device = built.mesh, built.mesh.devices.flat[0]
    jitted, arrays, tokens = program_of(built, arguments.program)
    trains = arguments.program in ("step", "measuring_step")
    start = time.perf_counter()
    compiled = jitted.lower(*arrays).compile()
    compile_seconds = time.perf_counter() - start

    def run() -> None:
        nonlocal arrays
        result = jax.block_until_ready(compiled(*arrays))
        if trains:  # the state was donated
            arrays = result[0], arrays[1]

    seconds = []
    for _ in range(WARMUP_STEPS + arguments.timed_steps):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    step_seconds = statistics.median(seconds[WARMUP_STEPS:])
    tokens_per_second = tokens / step_seconds
    flops, peak = flops_per_token(config.model, config.batch.sequence_length), peak_flops(device.device_kind)
    return {
        "config": config.name,
        "program": arguments.program,
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
        "mfu": round(tokens_per_second * flops / (peak * mesh.size), 4) if peak and trains else None,
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

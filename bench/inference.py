"""Tokens a second of sampling and of evaluation, with parameters as they start: one JSON line.

python -m bench.inference --config=configs/d12.py --batch.rows_per_device=32
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bench.measure import Sizes, random_batch, sized
from configs.command_line import parse
from configs.schema import Positive, UserError
from evaluation.generation import make_generate
from hosts.runtime import run_command
from training.build import build


@dataclass(frozen=True)
class Arguments(Sizes):
    """What is measured."""

    prompts: Positive[int] = 16
    """Continued together, each from one token."""
    tokens: Positive[int] = 128
    """New tokens of each."""
    times: Positive[int] = 5
    """Calls whose median is taken, after one that is not."""


def median_seconds(call: Callable[[], Any], times: int) -> float:
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])  # the first compiles


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    built = build(sized(config, arguments, jax.device_count()))
    if arguments.tokens >= built.batch_shape[2]:
        raise UserError(f"--tokens={arguments.tokens}: a row has {built.batch_shape[2]} tokens, the prompt's included")
    params, batch = built.create_state().params, random_batch(built)
    generate = make_generate(built.config.model, built.dtype, built.mesh)
    buffer = np.zeros((arguments.prompts, arguments.tokens + 1), np.int32)
    lengths, seeds = np.ones(arguments.prompts, np.int32), np.arange(arguments.prompts, dtype=np.int32)
    sample = lambda: generate(params, buffer, lengths, seeds, prefill=1, temperature=0.8, top_k=50)
    sampling = median_seconds(sample, arguments.times)
    evaluation = median_seconds(lambda: built.eval_step(params, batch), arguments.times)
    result = {
        "config": config.name,
        "device": built.mesh.devices.flat[0].device_kind,
        "depth": built.config.model.depth,
        "prompts": arguments.prompts,
        "sampled_tokens_per_second": round(arguments.prompts * arguments.tokens / sampling),
        "evaluated_tokens_per_second": round(built.config.batch.tokens_per_step / evaluation),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_command(main)

"""CORE's items a second, ours and nanochat's, on the same weights and CPU: NANOCHAT_DIR=CHECKOUT python -m bench.core

A bundle that is made here, of the three kinds of task, with ten shots or none; nanochat's network runs as its own
scripts/base_eval.py runs it, without compilation. The two take turns; compilation of ours is told apart.
"""

if __name__ == "__main__":
    from configs.interrupt import end_at_interrupt

    end_at_interrupt()

import contextlib
import io
import json
import os
import random
import time
from dataclasses import dataclass
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from configs.schema import BatchConfig, MeshConfig, ModelConfig, Positive, UserError
from evaluation.benchmarks import Benchmarks
from evaluation.core import Task
from run.runtime import run_command, start_jax
from tests.evaluation.core_bundle import tokenizer, words
from tests.evaluation.nanochat_core import TheirTokenizer, import_nanochat, their_network
from tests.helpers import perturbed
from training.mesh import make_mesh
from training.state import split_model

FEATURES = {"value_embeddings": True, "resid_lambdas": True, "x0_lambdas": True, "smear": True, "backout": True}
LENGTH = 2048
MODEL = ModelConfig(
    **{"depth": 4, "width": 256, "heads": 2, "kv_heads": 2, "head_dim": 128, "vocab_size": 4096, "dtype": "float32"},
    **{"qk_scale": 1.2, "window_pattern": "SSSL", "short_window": LENGTH // 4, **FEATURES},
)


@dataclass(frozen=True)
class Arguments:
    """CORE's items a second, ours and nanochat's."""

    items: Positive[int] = 32
    """Of each task."""
    rounds: Positive[int] = 3
    """Times that each takes its turn."""


def make_tasks(items: int) -> list[Task]:
    """Prompts of some 90 tokens, or of some 1,000 with ten shots."""
    rng = random.Random(0)
    some = lambda least, most: " ".join(rng.choices(words(), k=rng.randint(least, most)))
    choices = lambda: {"query": some(20, 30), "choices": [some(2, 5) for _ in range(4)], "gold": rng.randrange(4)}
    schema = lambda: {"context_options": [some(8, 12), some(8, 12)], "continuation": some(8, 12), "gold": 0}
    continuation = lambda: {"context": some(15, 20), "continuation": some(1, 3)}
    kinds = {"multiple_choice": choices, "schema": schema, "language_modeling": continuation}
    return [
        Task(f"{kind}, {shots} shots", kind, shots, " ", 0.0, [make() for _ in range(max(items, shots + 2))])
        for kind, make in kinds.items()
        for shots in (0, 10)
    ]


def main() -> int:
    arguments = tyro.cli(Arguments, description=__doc__)
    if "NANOCHAT_DIR" not in os.environ:
        raise UserError("NANOCHAT_DIR must name a checkout of nanochat")
    start_jax()
    import pytest
    import torch

    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), split_model(MODEL, jnp.dtype("float32"))[1])
    params = perturbed(zeros)
    tasks, mesh = make_tasks(arguments.items), make_mesh(MeshConfig(data=1), jax.devices()[:1])
    batch = BatchConfig(sequence_length=LENGTH, tokens_per_step=4 * LENGTH, rows_per_device=4)
    dtype = jnp.dtype("float32")
    placed = jax.device_put(params)
    with pytest.MonkeyPatch.context() as patch:
        gpt, core_eval = import_nanochat(patch)
        with contextlib.redirect_stdout(io.StringIO()):
            network = their_network(gpt, MODEL, params, LENGTH)
        results, totals = {}, {"ours": [], "nanochat's": []}
        for task in tasks:
            run = Benchmarks([task], tokenizer(), MODEL, batch, dtype, mesh)
            facts = {"task_type": task.kind, "num_fewshot": task.shots, "continuation_delimiter": task.delimiter}

            def ours(run: Benchmarks = run) -> float:
                start = time.perf_counter()
                run(placed)
                return time.perf_counter() - start

            def theirs(task: Task = task, facts: dict = facts) -> float:
                start = time.perf_counter()
                with torch.no_grad():
                    core_eval.evaluate_task(network, TheirTokenizer(tokenizer()), task.items, "cpu", facts)
                return time.perf_counter() - start

            first = ours()  # compiles
            pairs = [(ours(), theirs()) for _ in range(arguments.rounds)]
            results[task.label] = {
                "ours": round(len(task.items) / median(pair[0] for pair in pairs), 2),
                "nanochat's": round(len(task.items) / median(pair[1] for pair in pairs), 2),
                "ratio": round(median(pair[1] / pair[0] for pair in pairs), 2),
                "ratios": [round(pair[1] / pair[0], 2) for pair in pairs],
                "compilation_seconds": round(first - min(pair[0] for pair in pairs), 1),
            }
            for name, of in zip(totals, zip(*pairs)):
                totals[name].append(median(of))
            print(json.dumps({task.label: results[task.label]}), flush=True)
    print(json.dumps({"all": {name: round(sum(of), 1) for name, of in totals.items()}}))
    return 0


if __name__ == "__main__":
    run_command(main)

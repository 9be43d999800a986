"""CORE beside nanochat's own core_eval.py, items a second of processor time, on the same weights and machine:

NANOCHAT_DIR=... OMP_NUM_THREADS=1 taskset -c 0 python -m bench.core

On one core, since threads that wait for each other use processor time, too, and so that other work does not count.

A bundle of made-up items in the kinds, shots and lengths of the real one's tasks; a network with all of nanochat's
features, in float32 in both. Task by task they take turns; a JSON line a task has the median of the ratios of
neighbouring rounds, and the last line that of all tasks together, and how many tokens of training (a step of the same
network, here) take as long as an item. Compiling, before the first round, is counted apart.
"""

import json
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import pytest

from bench.measure import random_batch
from configs.command_line import parse_arguments
from configs.schema import BatchConfig, Config, MeshConfig, Positive, UserError
from data.tokenizer import train_tokenizer
from evaluation.benchmarks import Benchmarks
from evaluation.core import Task
from evaluation.scorer import Scorer
from hosts.runtime import run_command, start_jax
from tests.evaluation.core_bundle import CONFIG, words
from tests.evaluation.nanochat_core import TheirTokenizer, their_network
from tests.helpers import perturbed
from tests.nanochat_checkout import import_nanochat
from training.build import build
from training.mesh import make_mesh
from training.state import abstract_params, split_model, stored_as

TASKS = [  # label, kind, shots, delimiter, words of a query or context, of an answer, options
    ("hellaswag_zeroshot", "multiple_choice", 0, " ", 30, 20, 4),
    ("jeopardy", "language_modeling", 10, "\nAnswer: ", 14, 2, 1),
    ("arc_easy", "multiple_choice", 10, "\nAnswer: ", 20, 3, 4),
    ("winogrande", "schema", 0, " ", 10, 6, 2),
    ("lambada", "language_modeling", 0, " ", 70, 1, 1),
    ("boolq", "multiple_choice", 10, "\nAnswer: ", 70, 1, 2),
    ("squad", "language_modeling", 10, " ", 70, 3, 1),
    ("hellaswag", "multiple_choice", 10, " ", 30, 20, 4),
]


@dataclass(frozen=True)
class Arguments:
    """The network, and how much is measured."""

    depth: Positive[int] = 4
    """Blocks; the width is 64 x depth."""
    tasks: tuple[str, ...] = tuple(label for label, *_ in TASKS)
    """Which of them."""
    items: Positive[int] = 32
    """Of each task."""
    rounds: Positive[int] = 3
    """In which both take a turn."""
    rows_per_device: Positive[int] = 4
    """Rows of 2048 tokens that we compute together."""


def made_up(label: str, kind: str, shots: int, delimiter: str, query: int, answer: int, options: int, n: int) -> Task:
    """A task of `n` items whose lengths vary by a third to both sides."""
    rng = random.Random(label)
    some = lambda count: " ".join(rng.choices(words(), k=max(1, round(count * rng.uniform(2 / 3, 4 / 3)))))

    def item() -> dict:
        if kind == "multiple_choice":
            return {"query": some(query), "choices": [some(answer) for _ in range(options)], "gold": 0}
        if kind == "schema":
            return {"context_options": [some(query) for _ in range(options)], "continuation": some(answer), "gold": 0}
        return {"context": some(query), "continuation": some(answer)}

    return Task(label, kind, shots, delimiter, 0.0, [item() for _ in range(n)])


def processor_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    if "NANOCHAT_DIR" not in os.environ:
        raise UserError("set NANOCHAT_DIR to a checkout of nanochat")
    start_jax()
    width = 64 * arguments.depth
    sizes = {"depth": arguments.depth, "width": width, "heads": width // 64, "kv_heads": width // 64, "head_dim": 64}
    config = replace(CONFIG, **sizes, vocab_size=8192, short_window=512)
    tokenizer = train_tokenizer([" ".join(words())], 1024)  # which a few words do not fill
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    shapes = split_model(config, jnp.dtype("float32"))[1]
    params = perturbed(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes))
    placed = stored_as(params, abstract_params(config, mesh))
    batch = BatchConfig(2048, 2048 * arguments.rows_per_device, arguments.rows_per_device)
    with pytest.MonkeyPatch.context() as patch:
        gpt, core_eval = import_nanochat(patch, "gpt", "core_eval")
        network = their_network(gpt, config, params, 2048)
        of_rounds = [[0.0, 0.0] for _ in range(arguments.rounds)]
        for facts in (facts for facts in TASKS if facts[0] in arguments.tasks):
            task = made_up(*facts, arguments.items)
            ours = Benchmarks([task], tokenizer, Scorer(config, batch, jnp.dtype("float32"), mesh))
            meta = {"task_type": task.kind, "num_fewshot": task.shots, "continuation_delimiter": task.delimiter}
            theirs = lambda task=task, meta=meta: core_eval.evaluate_task(
                network, TheirTokenizer(tokenizer), task.items, "cpu", meta
            )
            first = processor_seconds(lambda ours=ours: ours(placed))
            theirs()
            times = []
            for total in of_rounds:
                times.append((processor_seconds(lambda ours=ours: ours(placed)), processor_seconds(theirs)))
                total[0], total[1] = total[0] + times[-1][0], total[1] + times[-1][1]
            own, other = (statistics.median(column) for column in zip(*times))
            print(
                json.dumps(
                    {
                        "task": task.label,
                        "ours_items_per_second": round(arguments.items / own, 2),
                        "nanochat_items_per_second": round(arguments.items / other, 2),
                        "times_as_many": round(statistics.median(b / a for a, b in times), 2),
                        "compile_seconds": round(first - own, 1),
                    }
                ),
                flush=True,
            )
    ratios = [other / own for own, other in of_rounds]
    items_per_second = statistics.median(len(arguments.tasks) * arguments.items / own for own, _ in of_rounds)
    built = build(Config(name="core", model=config, batch=batch))
    state, rows = built.create_state(), random_batch(built)
    step = built.train_step.lower(state, rows).compile()

    def train() -> None:
        nonlocal state
        state, metrics = step(state, rows)
        jax.block_until_ready((state, metrics))

    train()
    tokens_per_second = batch.tokens_per_step / statistics.median(processor_seconds(train) for _ in of_rounds)
    whole = {
        "all_tasks_times_as_many": round(statistics.median(ratios), 2),
        "in_rounds": [round(ratio, 2) for ratio in ratios],
        "an_item_in_training_tokens": round(tokens_per_second / items_per_second),
    }
    print(json.dumps(whole))
    return 0


if __name__ == "__main__":
    run_command(main)

"""Compute nanochat's results on the tests' bundle. As a program, write them, item by item, to nanochat_core.json.

NANOCHAT_DIR=... python -m tests.evaluation.nanochat_core
"""

import json
import random
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax
import numpy as np

from configs.schema import ModelConfig
from data.tokenizer import TextTokenizer
from evaluation.core import Task
from interchange.transformers import turned
from tests.nanochat_checkout import import_nanochat, their_name
from training.optimizer import path_name

RESULTS = Path(__file__).with_name("nanochat_core.json")


def their_network(gpt, config: ModelConfig, params: dict, row: int):
    """Return nanochat's network with our parameters, for rows of `row` tokens."""
    import torch

    sizes = {"n_layer": config.depth, "n_head": config.heads, "n_kv_head": config.kv_heads, "n_embd": config.width}
    sizes |= {"vocab_size": config.vocab_size, "sequence_len": row, "window_pattern": config.window_pattern}
    network = gpt.GPT(gpt.GPTConfig(**sizes))
    network.init_weights()
    theirs = dict(network.named_parameters())
    with torch.no_grad():
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            name = path_name(path)
            theirs[their_name(name)].copy_(torch.tensor(np.array(turned(name, leaf))))
    return network


class TheirTokenizer:
    """Our tokenizer with the interface of nanochat's."""

    def __init__(self, tokenizer: TextTokenizer):
        self.tokenizer = tokenizer

    def get_bos_token_id(self) -> int:
        return self.tokenizer.bos

    def __call__(self, prompts: list[str], prepend: int) -> list[list[int]]:
        return [[prepend, *ids] for ids in self.tokenizer.encode(prompts)]


def their_items(
    core_eval, network, tokenizer: TextTokenizer, bundle: Path, task: Task, items: int | None, longest: int | None
) -> list[dict]:
    """Return for each item whether it is right, each row's scored tokens, and their mean loss (None: no token).

    `longest` is the most tokens that the network says it reads; None means no limit, as in nanochat. The items are read
    and shuffled as in scripts/base_eval.py.
    """
    network.max_seq_len = longest
    path = next((bundle / "eval_data").rglob(f"{task.label}.jsonl"))
    data = [json.loads(line) for line in path.read_text().splitlines()]
    random.Random(1337).shuffle(data)
    data = data[:items]
    facts = {"task_type": task.kind, "num_fewshot": task.shots, "continuation_delimiter": task.delimiter}
    seen = {}

    def watched(name: str):
        """Return the function, wrapped to keep its newest result."""
        function = getattr(core_eval, name)

        def call(*arguments):
            seen["losses" if name == "forward_model" else "spans"] = result = function(*arguments)
            return result

        return call

    names = ("batch_sequences_mc", "batch_sequences_schema", "batch_sequences_lm", "forward_model")
    results = []
    with mock.patch.multiple(core_eval, **{name: watched(name) for name in names}):
        for index in range(len(data)):
            right = core_eval.evaluate_example(index, network, TheirTokenizer(tokenizer), data, "cpu", facts)
            rows, starts, ends = seen["spans"]
            cuts = [max(0, len(row) - (longest or len(row))) for row in rows]
            spans = [[start - cut, end - cut] for start, end, cut in zip(starts, ends, cuts)]
            means = [seen["losses"][0][i, start - 1 : end - 1].mean().item() for i, (start, end) in enumerate(spans)]
            losses = [None if np.isnan(mean) else round(mean, 6) for mean in means]
            results.append({"correct": bool(right), "spans": spans, "losses": losses})
    return results


if __name__ == "__main__":
    import pytest

    from evaluation.core import read_bundle
    from tests.evaluation import core_bundle

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        gpt, core_eval = import_nanochat(patch, "gpt", "core_eval")
        network = their_network(gpt, core_bundle.CONFIG, core_bundle.params(), core_bundle.LONGEST)
        bundle = core_bundle.make_bundle(Path(folder))
        items_of = lambda *of: their_items(core_eval, network, core_bundle.tokenizer(), bundle, *of)
        tasks = read_bundle(folder, None)
        every = {task.label: items_of(task, None, None) for task in tasks}
        every |= {
            f"{task.label}, cut": items_of(task, None, core_bundle.LONGEST)
            for task in tasks
            if task.label.endswith("at_the_limit")
        }
    lines = [f"{json.dumps(label)}: [\n" + ",\n".join(map(json.dumps, items)) + "\n]" for label, items in every.items()]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    right = {label: f"{sum(item['correct'] for item in items)} of {len(items)}" for label, items in every.items()}
    print(right, file=sys.stderr)

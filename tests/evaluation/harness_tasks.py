"""Write lm-evaluation-harness tasks of each kind, with a few local items."""

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import yaml

from tests.evaluation.core_bundle import short_words, words

CHOSEN = {"kind": "multiple_choice", "metrics": ["acc", "acc_norm"]}


def make_tasks(folder: Path) -> Path:
    """Write the tasks: several choices after shots, two contexts with one continuation, a continuation, complete texts
    shorter and longer than a row of 128 tokens, and a text to generate."""
    rng = random.Random(0)
    some = lambda least, most: " ".join(rng.choices(words(), k=rng.randint(least, most)))
    again = lambda: " ".join([some(2, 9), *[rng.choice(short_words())] * 2])
    choices = [
        {"query": some(3, 20), "options": [some(1, 3) for _ in range(4)], "gold": rng.randrange(4)} for _ in range(10)
    ]
    choices[0]["options"][1:3] = [choices[0]["options"][1]] * 2
    choices[1]["query"] = some(150, 150)  # longer than the row
    texts = [{"text": some(count, count)} for count in (1, 40, 120)]
    pairs = [{"a": some(2, 6), "b": some(2, 6), "end": some(1, 4), "gold": "ab"[i % 2]} for i in range(6)]
    endings, beginnings = ([{"text": again()} for _ in range(count)] for count in (6, 5))
    writing = {"generation_kwargs": {"until": ["\n\n", words()[3]], "max_gen_toks": 12, "do_sample": False}}
    write = partial(write_task, folder)
    write("tiny_choices", choices, "{{query}}", "gold", **CHOSEN, doc_to_choice="options", num_fewshot=2)
    write("tiny_schema", pairs, "{{['a', 'b'].index(gold)}}", "{{end}}", **CHOSEN, doc_to_choice="{{[a, b]}}")
    write("tiny_endings", endings, "{{text}} ", "{{text.split()[-1]}}", "loglikelihood", ["acc"])
    write("tiny_text", texts, "", "{{text}}", "loglikelihood_rolling")
    write("tiny_writing", beginnings, "{{text}}", "{{text}}", "generate_until", ["exact_match"], **writing)
    return folder


def write_task(
    folder: Path, name: str, items: list, text: str, target: str, kind: str, metrics: Sequence[str] = (), **more
):
    """Write a task of these items. Its metrics are means; without any, it has bits per byte."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    means = [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics]
    task = {"task": name, "dataset_path": "json", "test_split": "test", "output_type": kind, **more}
    task |= {"dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")}}}
    task |= {"doc_to_text": text, "doc_to_target": target, "metric_list": means or [{"metric": "bits_per_byte"}]}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))

"""Write lm-evaluation-harness tasks of each kind, with a few local items."""

import json
import random
from pathlib import Path

import yaml

from tests.evaluation.core_bundle import short_words, words

MEAN = {"aggregation": "mean", "higher_is_better": True}


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
    kinds = {
        "tiny_choices": (choices, "multiple_choice", "{{query}}", "gold", {"doc_to_choice": "options"}),
        "tiny_schema": (
            pairs,
            "multiple_choice",
            "{{['a', 'b'].index(gold)}}",
            "{{end}}",
            {"doc_to_choice": "{{[a, b]}}"},
        ),
        "tiny_endings": (
            [{"text": again()} for _ in range(6)],
            "loglikelihood",
            "{{text}} ",
            "{{text.split()[-1]}}",
            {},
        ),
        "tiny_text": (texts, "loglikelihood_rolling", "", "{{text}}", {}),
        "tiny_writing": ([{"text": again()} for _ in range(5)], "generate_until", "{{text}}", "{{text}}", {}),
    }
    metrics = {
        "multiple_choice": ["acc", "acc_norm"],
        "loglikelihood": ["acc"],
        "loglikelihood_rolling": [],
        "generate_until": ["exact_match"],
    }
    for name, (items, kind, text, target, more) in kinds.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        task = {"task": name, "dataset_path": "json", "test_split": "test", "output_type": kind}
        task["dataset_kwargs"] = {"data_files": {"test": str(folder / f"{name}.jsonl")}}
        task |= {"doc_to_text": text, "doc_to_target": target, **more}
        task["metric_list"] = [{"metric": metric, **MEAN} for metric in metrics[kind]] or [{"metric": "bits_per_byte"}]
        if name == "tiny_choices":
            task["num_fewshot"] = 2
        if kind == "generate_until":
            task["generation_kwargs"] = {"until": ["\n\n", words()[3]], "max_gen_toks": 12, "do_sample": False}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder

"""CORE (DCLM, arXiv:2406.11794) as nanochat computes it: a bundle's tasks, their prompts, and what answers are worth.

A bundle is a folder: core.yaml names the tasks, eval_meta_data.csv what guessing would reach in each, eval_data/ holds
their items, a JSON object a line. Three kinds of task, after a few solved items (shots) as examples:

    multiple_choice     one query, several choices: the likeliest choice a token is the answer
    schema              several contexts, one continuation: the context after which it is likeliest is the answer
    language_modeling   one context: right where the likeliest tokens, one after the other, are the continuation

Nothing here touches a device; evaluation/scorer.py computes the losses.
"""

import csv
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from jaxtyping import Bool, Float, Int

from configs.schema import UserError
from data.tokenizer import TextTokenizer

KINDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}
"""Each kind of task, and the fields of its items."""
BASELINE = "Random baseline"  # the metadata's column: the percentage that guessing reaches
TIES = {"float32": 1e-4, "bfloat16": 0.05}
"""Nats, by compute type: a margin below it may be rounding, and fall out the other way on another mesh."""
READS = 10
"""Rows of training that a prompt may be long: as many as nanochat's network has rotary angles for."""
COUNTS = {"ties": "tie", "cut": "cut", "unscored": "unscored"}
"""What is counted of a task's items, and the field of their lines."""


class Task(NamedTuple):
    """A task of a bundle, with its items in the order that nanochat shuffles them to."""

    label: str
    kind: str
    shots: int
    delimiter: str
    """Between a query and its answer."""
    baseline: float
    """Accuracy of a guess."""
    items: list[dict[str, Any]]


class Question(NamedTuple):
    """An item as tokens, a row for each of its options (one for language modelling)."""

    index: int
    """Of the item in its task."""
    rows: list[Int[np.ndarray, "_"]]
    spans: list[tuple[int, int]]
    """First token of each row that is scored, and the one after the last."""
    cut: int
    """Tokens that the longest row lost at its front."""


def read_bundle(folder: str, items: int | None) -> list[Task]:
    """The tasks of a bundle, each with all of its items or the first `items` of the shuffled ones, from which its shots
    are drawn, too. UserError, naming the file, for whatever is missing or cannot be meant."""
    root = Path(folder)
    try:
        entries = yaml.safe_load(_text(root / "core.yaml"))["icl_tasks"]
        with (root / "eval_meta_data.csv").open(encoding="utf-8") as file:
            percent = {row["Eval Task"]: float(row[BASELINE]) for row in csv.DictReader(file)}
    except OSError as error:
        raise UserError(
            f"bundle {folder}: {error.filename} cannot be read ({error.strerror}); a bundle, as DCLM's and "
            "nanochat's, is a folder with core.yaml, eval_meta_data.csv and eval_data/"
        ) from error
    except (ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"bundle {folder}: core.yaml or eval_meta_data.csv is damaged: {error!r}") from error
    tasks = []
    for entry in entries:
        try:
            label, kind = entry["label"], entry["icl_task_type"]
            shots, path = int(entry["num_fewshot"][0]), root / "eval_data" / entry["dataset_uri"]
            task = Task(label, kind, shots, entry.get("continuation_delimiter", " "), 0.01 * percent[label], [])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{root}: a task is described in part only ({error!r} is missing): {entry}") from error
        if kind not in KINDS:
            raise UserError(f"{root}: {label} is of kind {kind}; known: {', '.join(KINDS)}")
        tasks.append(task._replace(items=_read_items(task, path, items)))
    labels = [task.label for task in tasks]
    if not labels or len(set(labels)) < len(labels):
        raise UserError(f"{root / 'core.yaml'} names no task, or one twice: {labels}")
    return tasks


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _read_items(task: Task, path: Path, most: int | None) -> list[dict[str, Any]]:
    try:
        lines = [line for line in _text(path).split("\n") if line.strip()]
    except OSError as error:
        raise UserError(f"{task.label}: {path} cannot be read ({error.strerror}); the bundle is not whole") from error
    items = []
    for number, line in enumerate(lines, 1):
        try:
            item = json.loads(line)
            _ = [item[field] for field in KINDS[task.kind]]
            if task.kind != "language_modeling" and not 0 <= item["gold"] < len(options(task, item)):
                raise ValueError(f"gold={item['gold']} is none of its options")
            items.append(item)
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path}, item {number}: not one of a {task.kind} task ({error!r})") from error
    random.Random(1337).shuffle(items)
    items = items[:most]
    least = max(2, task.shots + 1)  # of one item there is no standard error
    if len(items) < least:
        of = f" ({most} are taken)" if most else ""
        why = f"shows {task.shots} others before each item" if task.shots else "has a standard error"
        raise UserError(f"{task.label} {why}, so it needs {least} items at least; {path} has {len(items)}{of}")
    return items


def options(task: Task, item: dict[str, Any]) -> list[Any]:
    """What a multiple choice or schema item chooses from."""
    return item["choices" if task.kind == "multiple_choice" else "context_options"]


def prompts(task: Task, index: int) -> list[str]:
    """The texts of an item after its shots: one for each option; for language modelling one without and one with the
    continuation."""
    # Drawn from the places of all items but this one.
    places = random.Random(1234 + index).sample(range(len(task.items) - 1), task.shots)
    shots = [task.items[place + (place >= index)] for place in places]
    item, between = task.items[index], task.delimiter
    if task.kind == "multiple_choice":
        ask = lambda item, choice: f"{item['query']}{between}{choice}"
    elif task.kind == "schema":
        ask = lambda item, context: f"{context}{between}{item['continuation']}"
    else:
        ask = lambda item, continuation: f"{str(item['context']).strip()}{between}{continuation}"
    answer = lambda item: (
        item["continuation"] if task.kind == "language_modeling" else options(task, item)[item["gold"]]
    )
    before = "".join(ask(shot, answer(shot)) + "\n\n" for shot in shots)
    if task.kind == "language_modeling":
        # Without the blank at its end, which belongs to the first token of the continuation.
        return [(before + ask(item, "")).strip(), before + ask(item, item["continuation"])]
    return [before + ask(item, option) for option in options(task, item)]


def encode(task: Task, indices: Sequence[int], tokenizer: TextTokenizer, longest: int) -> list[Question]:
    """These items as tokens. Rows of more than `longest` tokens lose the first ones, the BOS among them.

    A row of which that leaves nothing before its answer has an empty span: its first token cannot be predicted.
    """
    texts = [prompts(task, index) for index in indices]
    ids = iter(tokenizer.encode([text for of_item in texts for text in of_item]))
    questions = []
    for index, of_item in zip(indices, texts):
        rows = [np.array([tokenizer.bos, *next(ids)], np.int32) for _ in of_item]
        alike = common_prefix(rows)
        if task.kind == "multiple_choice":
            starts = [alike] * len(rows)
        elif task.kind == "schema":
            suffix = common_prefix([row[::-1] for row in rows])
            starts = [len(row) - suffix for row in rows]
        else:  # where the last tokens without it are others than with it, the span starts with the first that differs
            rows, starts = rows[1:], [alike]
        cuts = [max(0, len(row) - longest) for row in rows]
        ends = [len(row) - cut for row, cut in zip(rows, cuts)]
        spans = [(start - cut, end) if cut < start else (end, end) for start, cut, end in zip(starts, cuts, ends)]
        questions.append(Question(index, [row[cut:] for row, cut in zip(rows, cuts)], spans, max(cuts)))
    return questions


def common_prefix(rows: Sequence[Int[np.ndarray, "_"]]) -> int:
    """How many first tokens all rows share."""
    shortest = min(map(len, rows))
    differ = np.any([row[:shortest] != rows[0][:shortest] for row in rows], axis=0)
    return int(np.argmax(differ)) if differ.any() else shortest


def judge(
    task: Task,
    question: Question,
    loss_sums: Float[np.ndarray, "options"],
    likeliest: Bool[np.ndarray, "options"],
    margins: Float[np.ndarray, "options"],
    tie: float,
) -> dict[str, Any]:
    """An item's line of the log, from `evaluation.scorer`'s figures of each of its rows.

    `margin` is what decided, in nats: by how much the second best option's mean loss lies above the best one's; or, of
    the continuation's tokens, the least by which one lies above the likeliest other (below 0: wrong).
    """
    lengths = [end - start for start, end in question.spans]
    losses = [float(loss) / length if length else math.nan for loss, length in zip(loss_sums, lengths)]
    if task.kind == "language_modeling":
        margin = float(margins[0]) if lengths[0] else math.nan
        found = {"correct": bool(likeliest[0]) and lengths[0] > 0}
    else:
        # The first of the lowest, as Python's min finds it: an option without a mean only where it is the first one.
        choice = min(range(len(losses)), key=losses.__getitem__)
        best = sorted(loss for loss in losses if not math.isnan(loss))[:2]
        margin = best[1] - best[0] if len(best) == 2 else math.nan
        gold = task.items[question.index]["gold"]
        found = {"correct": choice == gold, "choice": choice, "gold": gold}
    known = lambda number: None if math.isnan(number) else number  # JSON has no nan
    return {
        **{"task": task.label, "item": question.index, **found, "losses": [known(loss) for loss in losses]},
        **{"margin": known(margin), "tie": abs(margin) < tie, "cut": question.cut, "unscored": lengths.count(0)},
    }


def figures(tasks: Sequence[Task], lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """CORE and each task's accuracy, with their standard errors over items, from the lines of all items.

    Centred, guessing is 0 and all right is 1; CORE is the mean of the tasks' centred accuracies.
    """
    results = {}
    for task in tasks:
        own = [line for line in lines if line["task"] == task.label]
        count, accuracy = len(own), sum(line["correct"] for line in own) / len(own)
        error = math.sqrt(accuracy * (1 - accuracy) / (count - 1))
        scale = 1 - task.baseline
        results[task.label] = {
            **{"accuracy": accuracy, "stderr": error, "baseline": task.baseline, "items": count},
            **{"centered": (accuracy - task.baseline) / scale, "centered_stderr": error / scale},
            **{name: sum(line[field] > 0 for line in own) for name, field in COUNTS.items()},
        }
    of_tasks = lambda name: [result[name] for result in results.values()]
    return {
        "core": sum(of_tasks("centered")) / len(results),
        "core_stderr": math.hypot(*of_tasks("centered_stderr")) / len(results),
        "tasks": results,
    }

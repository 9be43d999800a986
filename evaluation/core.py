"""CORE (DCLM, arXiv:2406.11794) as nanochat computes it: a bundle's tasks, their prompts, and the scores of answers.

A bundle is a folder: core.yaml names the tasks, eval_meta_data.csv has each task's accuracy of guessing, eval_data/ has
their items, one JSON object per line. There are three kinds of task, after a few solved items (shots) as examples:

    multiple_choice     one query, several choices: the likeliest choice a token is the answer
    schema              several contexts, one continuation: the context after which it is likeliest is the answer
    language_modeling   one context: right where the likeliest tokens, one after the other, are the continuation

evaluation/scorer.py computes the losses.
"""

import csv
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from data.tokenizer import TextTokenizer
from evaluation.scorer import Question, Scorer, Scores, common_prefix
from evaluation.statistics import mean_interval, share_interval
from system.errors import UserError

TIES = {"float32": 1e-4, "bfloat16": 0.05}
"""Nats, by compute type. A smaller margin may be rounding, and another mesh may decide otherwise."""
READS = 10
"""The longest prompt, in training rows: nanochat's network has rotary angles for this many."""
COUNTS = {"ties": "tie", "cut": "cut", "unscored": "unscored"}
"""The counts over a task's items, and the field of their lines."""
KINDS = ("multiple_choice", "schema", "language_modeling")


class Task(NamedTuple):
    """A task of a bundle, with its items in the order that nanochat shuffles them to."""

    label: str
    kind: str
    shots: int
    delimiter: str
    """Text between a query and its answer."""
    baseline: float
    """Accuracy of a guess."""
    items: list[dict[str, Any]]


def read_bundle(folder: str, items: int | None) -> list[Task]:
    """Return the tasks of a bundle, each with all of its items or the first `items` of the shuffled ones; its shots are
    drawn from these, too. Raise UserError, naming the file, for anything missing or invalid."""
    root = Path(folder)
    try:
        entries = yaml.safe_load((root / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        with (root / "eval_meta_data.csv").open(encoding="utf-8") as file:
            percent = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(file)}
        tasks = {entry["label"]: _read_task(root, entry, percent, items) for entry in entries}
    except OSError as error:
        raise UserError(
            f"bundle {folder}: {error.filename} cannot be read ({error.strerror}); a bundle, as DCLM's and "
            "nanochat's, is a folder with core.yaml, eval_meta_data.csv and eval_data/"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"bundle {folder}: core.yaml or eval_meta_data.csv is damaged: {error!r}") from error
    if len(tasks) < max(1, len(entries)):
        raise UserError(f"{root / 'core.yaml'} names no task, or one twice: {[entry['label'] for entry in entries]}")
    return list(tasks.values())


def _read_task(root: Path, entry: dict[str, Any], percent: dict[str, float], most: int | None) -> Task:
    label, kind, shots = entry["label"], entry["icl_task_type"], int(entry["num_fewshot"][0])
    path, delimiter = root / "eval_data" / entry["dataset_uri"], entry.get("continuation_delimiter", " ")
    if kind not in KINDS:
        raise UserError(f"{root}: {label} is of kind {kind}; known: {', '.join(KINDS)}")
    task = Task(label, kind, shots, delimiter, 0.01 * percent[label], [])
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        try:
            if line.strip():
                item = json.loads(line)
                texts, right = options(task, item)
                if not 0 <= right < len(texts):
                    raise ValueError(f"gold={right} is not one of its options")
                task.items.append(item)
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path}, item {number}: not one of a {kind} task ({error!r})") from error
    random.Random(1337).shuffle(task.items)
    items = task.items[:most]
    if len(items) <= shots:
        of = f" ({most} are taken)" if most else ""
        why = f" shows {shots} others before each item, so it" if shots else ""
        raise UserError(f"{label}{why} needs {shots + 1} item(s) at least; {path} has {len(items)}{of}")
    return task._replace(items=items)


def options(task: Task, item: dict[str, Any]) -> tuple[list[str], int]:
    """Return the texts of an item's options, and the index of the right one. Language modelling has two: without and
    with the continuation."""
    if task.kind == "multiple_choice":
        return [f"{item['query']}{task.delimiter}{choice}" for choice in item["choices"]], item["gold"]
    if task.kind == "schema":
        return [f"{context}{task.delimiter}{item['continuation']}" for context in item["context_options"]], item["gold"]
    context = f"{str(item['context']).strip()}{task.delimiter}"
    return [context, f"{context}{item['continuation']}"], 1


def prompts(task: Task, index: int) -> list[str]:
    """Return the texts of an item's options after its shots."""
    # Drawn from the indices of all items except this one.
    places = random.Random(1234 + index).sample(range(len(task.items) - 1), task.shots)
    before = ""
    for place in places:
        texts, right = options(task, task.items[place + (place >= index)])
        before += texts[right] + "\n\n"
    first, *others = [before + text for text in options(task, task.items[index])[0]]
    # Without the blank at its end, which belongs to the first token of the continuation.
    return [first.strip() if task.kind == "language_modeling" else first, *others]


def encode(task: Task, indices: Sequence[int], tokenizer: TextTokenizer, longest: int) -> list[Question]:
    """Return these items as tokens. Rows of more than `longest` tokens lose the first ones, the BOS among them.

    A row with nothing left before its answer has an empty span: its first token cannot be predicted.
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
        else:  # if the last tokens without it differ from those with it, the span starts with the first that differs
            rows, starts = rows[1:], [alike]
        cuts = [max(0, len(row) - longest) for row in rows]
        ends = [len(row) - cut for row, cut in zip(rows, cuts)]
        spans = [(start - cut, end) if cut < start else (end, end) for start, cut, end in zip(starts, cuts, ends)]
        questions.append(Question(index, [row[cut:] for row, cut in zip(rows, cuts)], spans, max(cuts)))
    return questions


def judge(task: Task, question: Question, scores: Scores, tie: float) -> dict[str, Any]:
    """Return an item's line of the log, from the scores of its rows.

    `margin`, in nats, is the distance to another decision: the second best option's mean loss less the best one's. For
    a continuation it is the smallest lead of a token over the likeliest other one (below 0: wrong).
    """
    lengths = [end - start for start, end in question.spans]
    means = [float(np.sum(nats)) / length if length else math.nan for nats, length in zip(scores.losses, lengths)]
    if task.kind == "language_modeling":
        margin = float(scores.margins[0]) if lengths[0] else math.nan
        answer = {"correct": bool(scores.likeliest[0]) and lengths[0] > 0}
    else:
        # The first of the lowest, as Python's min finds it. An option without a mean wins only as the first one.
        choice = min(range(len(means)), key=means.__getitem__)
        best = sorted(loss for loss in means if not math.isnan(loss))[:2]
        margin = best[1] - best[0] if len(best) == 2 else math.nan
        gold = task.items[question.index]["gold"]
        answer = {"correct": choice == gold, "choice": choice, "gold": gold}

    def known(number: float) -> float | None:
        return None if math.isnan(number) else number  # JSON has no nan

    return {
        **{"task": task.label, "item": question.index, **answer, "losses": [known(loss) for loss in means]},
        **{"margin": known(margin), "tie": abs(margin) < tie, "cut": question.cut, "unscored": lengths.count(0)},
    }


class Core:
    """Tasks and their scorer on a mesh. Called with parameters, it returns `figures`."""

    def __init__(self, name: str, tasks: Sequence[Task], tokenizer: TextTokenizer, scorer: Scorer):
        self.name, self.tasks, self.tokenizer, self.scorer = name, tasks, tokenizer, scorer
        bundle = hashlib.sha256(json.dumps([tuple(task) for task in tasks]).encode()).hexdigest()
        self.facts = {"bundle": bundle, "tokenizer": tokenizer.sha256, **scorer.facts}
        """The facts, other than the parameters, that the figures depend on."""

    def __call__(
        self, params: dict, log: list[dict] | None = None, say: Callable[[str], Any] = lambda text: None
    ) -> dict[str, Any]:
        """Return the figures. `params`: float32, as after a step. Items in `log` are not scored again; it gets the
        others. Every process must call it."""
        log = [] if log is None else log
        finished = {(line["task"], line["item"]) for line in log}
        for task in self.tasks:
            left = [index for index in range(len(task.items)) if (task.label, index) not in finished]
            if left:
                log.extend(self.answered(params, task, left))
            result = figures([task], log)["tasks"][task.label]
            low, high = result["interval"]
            say(f"{task.label}: {result['accuracy']:.4f} ({low:.4f} to {high:.4f}) of {result['items']} items")
        return figures(self.tasks, log, self.name)

    def answered(self, params: dict, task: Task, indices: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield the lines of these items."""
        tie = TIES[self.facts["dtype"]]
        for question, scores in self.scorer(params, self.questions(task, indices)):
            yield judge(task, question, scores, tie)

    def questions(self, task: Task, indices: Sequence[int]) -> list[Question]:
        return encode(task, indices, self.tokenizer, self.scorer.longest)


def figures(tasks: Sequence[Task], lines: Sequence[dict[str, Any]], name: str = "core") -> dict[str, Any]:
    """Return `name` and each task's accuracy, each with its interval of 95% over items, from all items' lines.

    A centred accuracy is 0 for guessing and 1 if all are right. `name` is the mean of the tasks' centred accuracies.
    """
    results = {}
    for task in tasks:
        own = [line for line in lines if line["task"] == task.label]
        right = sum(line["correct"] for line in own)
        accuracy = right / len(own)
        interval = share_interval(accuracy, len(own))
        centered, *centered_interval = (
            (share - task.baseline) / (1 - task.baseline) for share in (accuracy, *interval)
        )
        results[task.label] = {
            **{"accuracy": accuracy, "interval": interval, "baseline": task.baseline, "items": len(own)},
            **{"centered": centered, "centered_interval": centered_interval},
            **{name: sum(line[field] > 0 for line in own) for name, field in COUNTS.items()},
        }

    values = [result["centered"] for result in results.values()]
    interval = mean_interval(values, [result["centered_interval"] for result in results.values()])
    return {name: sum(values) / len(values), f"{name}_interval": interval, "tasks": results}

"""Benchmarks of a network: from a bundle's tasks and parameters to figures, a log of every item, and a picture."""

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.files import write_whole
from data.tokenizer import TextTokenizer
from evaluation.core import TIES, Task, encode, figures, judge
from evaluation.item_log import recorded
from evaluation.scorer import Scorer


class Benchmarks:
    """Tasks, and what scores them on a mesh. Called with parameters, it gives `evaluation.core.figures`."""

    def __init__(self, tasks: Sequence[Task], tokenizer: TextTokenizer, scorer: Scorer):
        self.tasks, self.tokenizer, self.scorer = tasks, tokenizer, scorer
        of_text = hashlib.sha256(json.dumps([tuple(task) for task in tasks]).encode()).hexdigest()
        self.facts = {"bundle": of_text, "tokenizer": tokenizer.sha256, **scorer.facts}
        """What the figures depend on besides the parameters."""

    def __call__(
        self,
        params: dict,
        done: Sequence[dict] = (),
        record: Callable[[list[dict]], Any] = lambda lines: None,
        say: Callable[[str], Any] = lambda text: None,
    ) -> dict[str, Any]:
        """Of float32 parameters as they lie. `done`: lines of items that an earlier start has scored; `record` takes
        those of the others, as they are scored. Every process must call it."""
        lines = list(done)
        finished = {(line["task"], line["item"]) for line in done}
        tie = TIES[self.facts["dtype"]]
        for task in self.tasks:
            left = [index for index in range(len(task.items)) if (task.label, index) not in finished]
            if left:
                scored = self.scorer(params, encode(task, left, self.tokenizer, self.scorer.longest))
                judged = (judge(task, question, *map(np.asarray, scores), tie=tie) for question, scores in scored)
                lines += recorded(judged, record)
            say(in_words(task.label, figures([task], lines)["tasks"][task.label]))
        return figures(self.tasks, lines)


def in_words(label: str, result: dict[str, Any]) -> str:
    """A task's result in a line."""
    notable = {"ties": "too close to call", "cut": "cut to fit", "unscored": "with an answer that was cut away"}
    notes = [f"{result[name]} {words}" for name, words in notable.items() if result[name]]
    return (
        f"{label}: {result['accuracy']:.4f} +- {result['stderr']:.4f}, guessing {result['baseline']:.4f}, centred "
        f"{result['centered']:.4f}; {result['items']} items" + "".join(f", {note}" for note in notes)
    )


def plot(points: Mapping[str, tuple[float, float | None, float]], title: str, path: Path) -> None:
    """Draws each task's accuracy with two standard errors to both sides, against what guessing reaches."""
    from matplotlib.figure import Figure  # a second to import

    labels = list(points)[::-1]
    accuracy, errors, guessing = zip(*(points[label] for label in labels))
    figure = Figure(figsize=(7, 1.2 + 0.28 * len(labels)), layout="constrained")
    axes = figure.add_subplot()
    both = [2 * (error or 0) for error in errors]
    axes.errorbar(accuracy, labels, xerr=both, fmt="o", capsize=3, label="accuracy, 2 standard errors")
    axes.plot(guessing, labels, "|", color="black", markersize=14, label="guessing")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.7, len(labels) - 0.3), xlabel="accuracy", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150)
    write_whole(path, picture.getbuffer())


def plot_core(results: dict[str, Any], title: str, path: Path) -> None:
    """Draws the tasks of CORE."""
    tasks = results["tasks"].items()
    points = {label: (task["accuracy"], task["stderr"], task["baseline"]) for label, task in tasks}
    plot(points, f"{title}: CORE {results['core']:.4f} +- {results['core_stderr']:.4f}", path)

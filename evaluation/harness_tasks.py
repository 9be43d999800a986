# pyright: reportMissingImports=false
"""Tasks of EleutherAI's lm-evaluation-harness: its prompts and metrics; what they give, and what is drawn of it."""

import difflib
import math
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import LM

from configs.schema import UserError
from evaluation.harness import digest

BOOTSTRAP = 1000  # draws for the standard error of a metric that is no mean; the harness' 100,000 take minutes a task


def load_tasks(names: Sequence[str], folder: str | None) -> Mapping[str, Any]:
    """The harness' tasks of these names, of its own or of the task files in `folder`. UserError for an unknown name,
    and for a task whose data cannot be had."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folder or None, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folder or None)  # to read its 14,000 files takes some 15 s
    for name in names:
        if name not in manager.all_tasks:
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks, n=5, cutoff=0.5))
            raise UserError(
                f"--tasks={name}: no task of lm-evaluation-harness has that name; near it: {near or 'none'}. "
                "--task_files=DIR names a folder of more, and core is a benchmark of its own"
            )
    try:
        return manager.load(list(names))
    except Exception as error:  # of whatever the task's own code and the source of its data raise
        raise UserError(f"--tasks={','.join(names)} cannot be loaded: {type(error).__name__}: {error}") from error


def others_network(folder: str) -> LM:
    """A network of any architecture that transformers loads, as the harness itself runs it, in float32."""
    try:
        import torch
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError(f"{folder} is of another architecture: make setup EXTRA=harness,interop ({error})") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return HFLM(pretrained=folder, device=device, dtype="float32", batch_size=8)  # pyright: ignore[reportCallIssue]


def measure(
    network: LM, loaded: Mapping[str, Any], items: int | None, tie: float, cache: str | None = None
) -> tuple[dict[str, dict], dict[str, list[dict]]]:
    """Each task's figures and standard errors, as the harness computes them, and a line for each of its items.

    `items`: take at most so many of each task, always the same. `tie`: nats, below which an item's two best options are
    too close to call. `cache`: a file of answers, for a network that keeps none."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    os.environ["DISABLE_MULTIPROC"] = "1"  # else the harness forks to bootstrap, which JAX's threads do not survive
    os.environ.pop("LOCAL_RANK", None)  # with which, as torchrun sets it, all processes but the first get no figures
    tasks, members = loaded["tasks"], {name for group in loaded["groups"].values() for name in group.child_names}
    top = [*loaded["groups"].values(), *tasks.values()]
    chosen = {}
    for name, task in tasks.items() if items else ():
        count = len(task.eval_docs)
        chosen[name] = sorted(random.Random(1337).sample(range(count), min(items or count, count)))
    found: Any = simple_evaluate(
        network,
        tasks=[one for one in top if getattr(one, "name", getattr(one, "task_name", None)) not in members],
        samples=chosen or None,
        bootstrap_iters=BOOTSTRAP,
        use_cache=cache,
        task_manager=TaskManager(include_defaults=False),  # else it reads its 14,000 files, which it needs for nothing
    )
    answers = getattr(network, "answers", {})
    lines = {name: [line_of(sample, tie, answers) for sample in found["samples"][name]] for name in tasks}
    results = {name: result_of(found["results"][name], lines.get(name)) for name in found["results"]}
    return results, lines


def line_of(sample: dict[str, Any], tie: float, known: Mapping[str, dict]) -> dict[str, Any]:
    """An item's line: its metrics, what the network answered, and of our own, whose lines are `known`, what was cut."""
    answers = [answer[0] if len(answer) == 1 else answer for answer in sample["resps"]]
    own = [known.get(key, known.get(f"{key}-0", {})) for key in map(digest, sample["arguments"])]
    likelihoods = sorted((a[0] for a in answers if isinstance(a, tuple)), reverse=True)
    if len(likelihoods) == 1:  # of which counts whether its tokens are the likeliest
        margin = abs(own[0].get("margin", math.inf))
    else:
        margin = likelihoods[0] - likelihoods[1] if likelihoods else math.inf
    return {
        "item": sample["doc_id"],
        "filter": sample["filter"],
        **{metric: number(sample[metric]) for metric in sample["metrics"]},
        "target": sample["target"],
        "answers": answers,
        "tie": margin < tie,
        **({"cut": max(line.get("cut", 0) for line in own)} if known else {}),
    }


def result_of(result: dict[str, Any], lines: list[dict] | None) -> dict[str, Any]:
    """`acc,none` is `acc`; with a filter, `exact_match,strict-match` stays. Of a task (not of a group) also `items`,
    how many of them are `ties` or were `cut`, and, where an item chooses from several options, what guessing would
    reach: `baseline`."""
    short = lambda key: key.removesuffix(",none")
    figures = {short(key): number(value) for key, value in result.items() if "," in key}
    if lines is None:
        return figures
    first = [line for line in lines if line["filter"] == lines[0]["filter"]]
    options = [len(line["answers"]) for line in first]
    if all(count > 1 for count in options):
        figures["baseline"] = sum(1 / count for count in options) / len(options)
    cut = {"cut": sum(line["cut"] > 0 for line in first)} if "cut" in first[0] else {}
    return figures | {"items": len(first), "ties": sum(line["tie"] for line in first), **cut}


def number(value: Any) -> Any:
    """JSON's: the harness writes N/A where there is no standard error."""
    if isinstance(value, str):
        return None if value == "N/A" else value
    return value.item() if isinstance(value, np.generic) else value


def points(results: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, float | None, float]]:
    """What `evaluation.benchmarks.plot` draws: of each task its accuracy, its error, and what guessing gives."""
    found = {}
    for name, result in results.items():
        metric = next((key for key in result if key.startswith(("acc", "exact_match")) and "_stderr" not in key), None)
        if metric and "items" in result:
            base, _, kind = metric.partition(",")
            error = result.get(f"{base}_stderr{',' * bool(kind)}{kind}")
            found[name] = (result[metric], error, result.get("baseline", 0.0))
    return found

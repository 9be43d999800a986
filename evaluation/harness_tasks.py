# pyright: reportMissingImports=false
"""Tasks of EleutherAI's lm-evaluation-harness: its prompts and metrics, and the files of results."""

import difflib
import importlib
import math
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.files import write_whole
from configs.schema import UserError
from evaluation.core import TIES
from evaluation.harness import LM, HarnessNetwork, digest
from evaluation.network import Network
from evaluation.results import ItemLog, plot_accuracies, to_lines, write_json

BOOTSTRAP = 1000  # resamples for a standard error that has no formula; the harness' 100,000 take minutes a task


def load_tasks(names: Sequence[str], folder: str | None, unsafe_code: bool = False) -> Mapping[str, Any]:
    """Return the harness' tasks of these names, of its own or of the task files in `folder`. Raise UserError for an
    unknown name, for a task whose data cannot be loaded, and, without `unsafe_code`, for a task that runs code from the
    network."""
    from lm_eval.tasks import TaskManager

    _import_metrics()
    if unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # the metric refuses otherwise
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
        loaded = manager.load(list(names))
    except Exception as error:  # anything that the task's own code and the source of its data raise
        raise UserError(f"--tasks={','.join(names)} cannot be loaded: {type(error).__name__}: {error}") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False) and not unsafe_code:
            raise UserError(f"{name} runs code that the network writes; --unsafe_code allows it, on this machine")
    return loaded


def _import_metrics() -> None:
    """Import the package `evaluate`, which tasks use to load metrics, before our command of the same name is found."""
    if "evaluate" not in sys.modules:
        root, path = Path(__file__).resolve().parents[1], sys.path
        sys.path = [entry for entry in path if Path(entry).resolve() != root]
        try:
            importlib.import_module("evaluate")
        finally:
            sys.path = path


def evaluate_tasks(
    network: Network | Path,
    loaded: Mapping[str, Any],
    items: int | None,
    prompt_tokens: int | None,
    out: Path,
    asking: Mapping[str, Any],
) -> dict[str, dict]:
    """Return the figures of loaded tasks, for one of our networks or a folder of another architecture. Write one line
    per request, one per item, the figures and a picture of them to `out`. Every process must call it. `asking`: options
    of `simple_evaluate` for the form of the items."""
    chat = asking["apply_chat_template"]
    name = "+".join(sorted(loaded["tasks"]))[:100] + (f"_items_{items}" if items else "") + "_chat" * chat
    if isinstance(network, Path):
        folder, facts, title = out / "network" / name, {}, f"{network.resolve().name}, network"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror}); give --out=FOLDER") from error
        about = [(str(path), path.stat()) for path in sorted(network.resolve().iterdir()) if path.is_file()]
        files = digest([(name, of.st_size, of.st_mtime_ns) for name, of in about])
        cache = str(out / f"answers_{files[:8]}")  # the harness finds an answer by its request alone
        results, lines = measure(_others_network(network), loaded, items, TIES["float32"], cache, asking)
    else:
        folder, title = out / network.label / name, f"{network.config.name}, {network.title}"
        scorer = network.scorer(prompt_tokens)
        facts = {"tokenizer": network.tokenizer.sha256} | scorer.facts | network.facts
        log = ItemLog(folder.parent / "requests.jsonl", facts)
        model = HarnessNetwork(network, scorer, log, chat)
        results, lines = measure(model, loaded, items, TIES[network.dtype.name], asking=asking)
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for task, of_task in lines.items():
            write_whole(folder / f"{task}.jsonl", to_lines(of_task))
        write_json(folder / "tasks.json", facts | {"tasks": results})
        if drawn := points(results):
            plot_accuracies(drawn, title, folder / "tasks.png")
    return results


def _others_network(folder: Path) -> LM:
    """Return a network of any architecture that transformers loads, as the harness itself runs it, in float32."""
    try:
        import torch
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError(f"{folder} is of another architecture: make setup EXTRA=harness,interop ({error})") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return HFLM(pretrained=str(folder), device=device, dtype="float32", batch_size=8)  # pyright: ignore[reportCallIssue]


def measure(
    network: LM,
    loaded: Mapping[str, Any],
    items: int | None,
    tie: float,
    cache: str | None = None,
    asking: Mapping[str, Any] = {},
) -> tuple[dict[str, dict], dict[str, list[dict]]]:
    """Return each task's figures and standard errors, as the harness computes them, and a line for each of its items.

    `items`: the most items of each task, always the same. `tie`: a distance in nats; an item whose two best options are
    closer is too close to call. `cache`: a file of answers, for a network that keeps none."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    os.environ["DISABLE_MULTIPROC"] = "1"  # it would fork to bootstrap, which JAX's threads do not survive
    os.environ.pop("LOCAL_RANK", None)  # torchrun sets it; all processes but the first would get no figures
    tasks, members = loaded["tasks"], {name for group in loaded["groups"].values() for name in group.child_names}
    top = [*loaded["groups"].values(), *tasks.values()]
    chosen = {}
    for name, task in tasks.items() if items else ():
        count = len(task.eval_docs)
        chosen[name] = sorted(random.Random(1337).sample(range(count), min(items or count, count)))
    evaluated: Any = simple_evaluate(
        network,
        tasks=[one for one in top if getattr(one, "name", getattr(one, "task_name", None)) not in members],
        samples=chosen or None,
        bootstrap_iters=BOOTSTRAP,
        use_cache=cache,
        task_manager=TaskManager(include_defaults=False),  # otherwise it reads its 14,000 files without need
        **asking,
    )
    answers = getattr(network, "answers", {})
    lines = {name: [line_of(sample, tie, answers) for sample in evaluated["samples"][name]] for name in tasks}
    results = {name: result_of(result, lines.get(name)) for name, result in evaluated["results"].items()}
    return results, lines


def line_of(sample: dict[str, Any], tie: float, known: Mapping[str, dict]) -> dict[str, Any]:
    """Return an item's line: its metrics and the network's answers. For our networks, whose lines are `known`, add what
    was cut."""
    answers = [answer[0] if len(answer) == 1 else answer for answer in sample["resps"]]
    own = [known.get(key, known.get(f"{key}-0", {})) for key in map(digest, sample["arguments"])]
    likelihoods = sorted((a[0] for a in answers if isinstance(a, tuple)), reverse=True)
    if len(likelihoods) == 1:  # which counts if its tokens are the likeliest
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
    """Return figures by shorter names: `acc,none` is `acc`; with a filter, `exact_match,strict-match` stays. A task
    (not a group) also has the numbers of `items`, `ties` and `cut` items. If items have several options, `baseline` is
    the accuracy of guessing."""
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
    """Return a value for JSON: None for the harness' N/A of a missing standard error."""
    if isinstance(value, str):
        return None if value == "N/A" else value
    return value.item() if isinstance(value, np.generic) else value


def points(results: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[float, float | None, float]]:
    """Return the input of `plot_accuracies`: each task's accuracy, its error, and the accuracy of guessing."""
    drawn = {}
    for name, result in results.items():
        metric = next((key for key in result if key.startswith(("acc", "exact_match")) and "_stderr" not in key), None)
        if metric and "items" in result:
            base, _, kind = metric.partition(",")
            error = result.get(f"{base}_stderr{',' * bool(kind)}{kind}")
            drawn[name] = (result[metric], error, result.get("baseline", 0.0))
    return drawn

# pyright: reportMissingImports=false
"""Tasks of EleutherAI's lm-evaluation-harness, with our network on the mesh as the model that it calls.

The harness asks three things of a model: the log-likelihood of a continuation after a context, the log-likelihood of a
complete text, and a continuation of a context. `make setup EXTRA=harness` installs it.
"""

import difflib
import hashlib
import importlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.files import write_whole
from configs.schema import UserError
from data.conversation import messages_of, render
from evaluation.chat_core import require_chat_tokens
from evaluation.engine import Engine
from evaluation.network import Network
from evaluation.results import to_lines, write_json
from evaluation.scorer import Question, Scorer
from hosts.distributed import check_hosts_agree
from model.sampling import Sampling

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise UserError(f"these tasks need lm-evaluation-harness: make setup EXTRA=harness ({error})") from error

BOOTSTRAP = 1000  # resamples for a standard error that has no formula; the harness' 100,000 take minutes a task


class HarnessNetwork(LM):
    """Our network, as the harness calls it. It reads every text after a BOS, as in training. With `chat`, texts contain
    conversations, and an answer ends at <|assistant_end|>."""

    def __init__(self, network: Network, scorer: Scorer, chat: bool = False):
        """Raise UserError if, with `chat`, the tokenizer cannot encode conversations."""
        super().__init__()
        self.network, self.scorer, self.chat = network, scorer, chat
        self.cut = 0
        """Requests whose context lost tokens: it was longer than the row."""
        self.tokenizer = replace(network.tokenizer)
        self.tokenizer.library.encode_special_tokens = not chat  # True: they stay text
        if chat:
            require_chat_tokens(self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """Name the tokenizer for the harness' cache of requests."""
        return self.tokenizer.sha256

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation's text, up to the answer, or without `add_generation_prompt` in its last message."""
        try:
            tokens = render(self.tokenizer, messages_of(chat_history), ask=add_generation_prompt)
        except ValueError as error:
            raise UserError(f"--chat: an item of the tasks is no conversation: {error}") from error
        # Without the BOS, which every text gets, and without the end of a message that continues.
        tokens = tokens[1:] if add_generation_prompt else tokens[1:-1]
        return self.tokenizer.library.decode(tokens, skip_special_tokens=False)

    def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each (context, continuation), and whether greedy decoding gives the
        continuation. An item's requests are one question, since its continuations share their beginning."""
        check_hosts_agree("their requests", digest([request.args for request in requests]))
        pairs = [pair_of(*request.args) for request in requests]
        wholes = iter(self.tokenizer.encode([context + continuation for context, continuation in pairs]))
        contexts = iter(self.tokenizer.encode([context for context, _ in pairs]))
        questions: list[Question] = []
        start = 0
        for _, group in groupby(requests, lambda request: (request.task_name, request.doc_id)):
            rows, spans = [], []
            for _ in group:
                row = np.array([self.tokenizer.bos, *next(wholes)], np.int32)
                # As in the harness: as many tokens as the complete text has beyond the context.
                scored = max(len(row) - 1 - len(next(contexts)), 1)
                kept = row[-(self.scorer.longest + 1) :]  # the last token is not read
                self.cut += len(kept) < len(row)
                rows.append(kept)
                spans.append((max(len(kept) - scored, 1), len(kept)))
            questions.append(Question(start, rows, spans, 0))
            start += len(rows)
        answers: dict[int, tuple[float, bool]] = {}
        for question, scores in self.scorer(self.network.params, questions):
            for i, greedy in zip(range(len(question.rows)), scores.likeliest):
                answers[question.index + i] = (-float(np.sum(scores.losses[i])), bool(greedy))
        return [answers[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        """Return the log-likelihood of each (text,). A text longer than the row is cut into rows, each with the token
        before it."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        texts = [request.args[0] for request in requests]
        check_hosts_agree("their requests", digest(texts))
        questions = []
        for text, ids in enumerate(self.tokenizer.encode(texts)):
            windows = get_rolling_token_windows(ids, self.tokenizer.bos, self.scorer.longest, 1)
            for before, scored in map(make_disjoint_window, windows):
                row = np.array([*before, *scored], np.int32)
                questions.append(Question(text, [row], [(len(before), len(row))], 0))
        totals = [0.0] * len(texts)
        for question, scores in self.scorer(self.network.params, questions):
            totals[question.index] -= float(np.sum(scores.losses[0]))
        return totals

    def generate_until(self, requests: list) -> list[str]:
        """Return the continuation of each (context, options), up to a stop sequence or the document's end. A context
        loses its first tokens if the new ones need the room. A sample depends on its request, not on the others; a
        repeated request draws several times."""
        keys, draws = [digest(request.args) for request in requests], defaultdict(count)
        check_hosts_agree("their requests", digest(keys))
        asked, stops = [], []
        encoded = self.tokenizer.encode([request.args[0] for request in requests])
        for key, request, ids in zip(keys, requests, encoded):
            until, sampling, tokens = self._generation(request)
            prompt = [self.tokenizer.bos, *ids][-(self.scorer.longest - tokens) :]
            self.cut += len(prompt) <= len(ids)
            seed = int(digest([key, next(draws[key])])[:7], 16)
            asked.append((prompt, sampling._replace(seed=seed), tokens))
            stops.append([stop for stop in until if stop])
        capacity = max((len(prompt) + tokens for prompt, _, tokens in asked), default=0)
        slots = min(len(asked), max(1, self.scorer.tokens_per_device // max(capacity, 1)) * self.scorer.replicas)
        text = lambda answer: self.tokenizer.decode(answer.tokens)
        stopped = lambda place, answer: bool(stops[place]) and any(map(text(answer).__contains__, stops[place]))
        answers: dict[int, str] = {}
        for place, answer in Engine(self.network, slots, capacity, self.chat).answers(asked, stopped) if asked else ():
            answers[place] = min((text(answer).split(stop)[0] for stop in stops[place]), key=len, default=text(answer))
        return [answers[place] for place in range(len(requests))]

    def _generation(self, request: Any) -> tuple[list[str], Sampling, int]:
        """Return a task's stop sequences, how its text is drawn, and its most tokens. Raise UserError for an
        unsupported option."""
        from lm_eval.models.utils import normalize_gen_kwargs

        asked: dict[str, Any] = dict(normalize_gen_kwargs(request.args[1]))
        until, sampled, tokens = asked.pop("until"), asked.pop("do_sample"), asked.pop("max_gen_toks")
        sampling = Sampling(asked.pop("temperature", 0.0), asked.pop("top_k", 50)) if sampled else Sampling(0.0)
        if asked and sampled:
            raise UserError(f"{request.task_name} draws its text with {asked}; known: temperature, top_k")
        if tokens >= self.scorer.longest:
            raise UserError(
                f"{request.task_name} asks for {tokens} new tokens, and a row of the network has "
                f"{self.scorer.longest}: leave that task out"
            )
        return until, sampling, tokens


def pair_of(context: str, continuation: str) -> tuple[str, str]:
    """Move blanks at the end of a context to the continuation, whose first token has them, as the harness does."""
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def digest(arguments: Any) -> str:
    """Name a request."""
    return hashlib.sha256(json.dumps(arguments).encode()).hexdigest()[:32]


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
    model: HarnessNetwork, loaded: Mapping[str, Any], items: int | None, out: Path, asking: Mapping[str, Any]
) -> dict[str, Any]:
    """Return each task's figures and standard errors, as the harness computes them, and the number of `cut` requests.
    Write them, and a line for each item, to a folder in `out`. Every process must call it. `items`: the first items of
    each task; None: all. `asking`: options of `simple_evaluate` for the form of the items."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    os.environ["DISABLE_MULTIPROC"] = "1"  # it would fork to bootstrap, which JAX's threads do not survive
    os.environ.pop("LOCAL_RANK", None)  # torchrun sets it; all processes but the first would get no figures
    tasks, members = loaded["tasks"], {name for group in loaded["groups"].values() for name in group.child_names}
    top = [*loaded["groups"].values(), *tasks.values()]
    evaluated: Any = simple_evaluate(
        model,
        tasks=[one for one in top if getattr(one, "name", getattr(one, "task_name", None)) not in members],
        limit=items,
        bootstrap_iters=BOOTSTRAP,
        task_manager=TaskManager(include_defaults=False),  # otherwise it reads its 14,000 files without need
        **asking,
    )
    figures = {name: figures_of(result) for name, result in evaluated["results"].items()}
    results = {"cut": model.cut, "tasks": figures}
    facts = model.scorer.facts | model.network.facts  # gathers the parameters from all processes
    if jax.process_index() == 0:
        name = "+".join(sorted(tasks))[:100] + (f"_items_{items}" if items else "") + "_chat" * model.chat
        folder = out / model.network.label / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror}); give --out=FOLDER") from error
        for task in tasks:
            write_whole(folder / f"{task}.jsonl", to_lines(list(lines_of(evaluated["samples"][task]))))
        write_json(folder / "tasks.json", facts | results)
    return results


def figures_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures by shorter names: `acc,none` is `acc`; with a filter, `exact_match,strict-match` stays."""
    return {key.removesuffix(",none"): number(value) for key, value in result.items() if "," in key}


def lines_of(samples: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each item's line: its metrics and the network's answers."""
    for sample in samples:
        metrics = {metric: number(sample[metric]) for metric in sample["metrics"]}
        answers = [answer[0] if len(answer) == 1 else answer for answer in sample["resps"]]
        kept = {"item": sample["doc_id"], "filter": sample["filter"], "target": sample["target"], "answers": answers}
        yield kept | metrics


def number(value: Any) -> Any:
    """Return a value for JSON: None for the harness' N/A of a missing standard error."""
    if isinstance(value, str):
        return None if value == "N/A" else value
    return value.item() if isinstance(value, np.generic) else value

# pyright: reportMissingImports=false
"""Our network on the mesh as a model of EleutherAI's lm-evaluation-harness; evaluation/harness_tasks.py runs its tasks.

The harness asks three things of a model: the log-likelihood of a continuation after a context, the log-likelihood of a
complete text, and a continuation of a context. `make setup EXTRA=harness` installs it.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, groupby
from typing import Any

import numpy as np

from configs.schema import UserError
from data.conversation import messages_of, render
from evaluation.chat_core import require_chat_tokens
from evaluation.engine import Engine
from evaluation.network import Network
from evaluation.results import ItemLog
from evaluation.scorer import Question, Scorer
from hosts.runtime import check_hosts_agree
from model.sampling import Sampling

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise UserError(f"these tasks need lm-evaluation-harness: make setup EXTRA=harness ({error})") from error


class HarnessNetwork(LM):
    """Our network, as the harness calls it. It reads every text after a BOS, as in training. Requests in `log` are not
    answered again. With `chat`, texts contain conversations, and an answer ends at <|assistant_end|>."""

    def __init__(self, network: Network, scorer: Scorer, log: ItemLog, chat: bool = False):
        """Raise UserError if, with `chat`, the tokenizer cannot encode conversations."""
        super().__init__()
        self.network, self.scorer, self.log, self.chat = network, scorer, log, chat
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

    @property
    def answers(self) -> dict[str, dict]:
        """Return the line of each request that is answered."""
        return {line["request"]: line for line in self.log}

    def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each (context, continuation), and whether greedy decoding gives the
        continuation."""
        lines = self._answered("loglikelihood", requests, self._loglikelihoods)
        return [(line["loglikelihood"], line["greedy"]) for line in lines]

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        """Return the log-likelihood of each (text,). A text longer than the row is cut into rows, each with the token
        before it."""
        return [line["loglikelihood"] for line in self._answered("rolling", requests, self._rolling)]

    def generate_until(self, requests: list) -> list[str]:
        """Return the continuation of each (context, options), up to a stop sequence or the document's end."""
        return [line["text"] for line in self._answered("generate", requests, self._generated)]

    def _answered(self, kind: str, requests: list, answer: Callable[[dict], Iterator[tuple[int, dict]]]) -> list[dict]:
        """Return each request's line. `answer` takes the new requests by key, and yields their places and lines."""
        keys = [digest(request.args) for request in requests]
        if kind == "generate":  # a repeated request is drawn several times
            draws = defaultdict(count)
            keys = [f"{key}-{next(draws[key])}" for key in keys]
        check_hosts_agree(f"their {kind} requests", digest(keys))
        known = self.answers
        new = {key: request for key, request in zip(keys, requests) if key not in known}
        left = list(new)
        answered = answer(new) if new else ()
        self.log.extend({"request": left[place], **line} for place, line in answered)
        known = self.answers
        return [known[key] for key in keys]

    def _loglikelihoods(self, new: dict) -> Iterator[tuple[int, dict]]:
        """Yield the place and the line of each request. An item's requests are one question, since its continuations
        share their beginning."""
        requests = list(new.values())
        pairs = [pair_of(*request.args) for request in requests]
        encode = lambda texts: iter(self.tokenizer.encode(texts))
        wholes = encode([context + continuation for context, continuation in pairs])
        contexts = encode([context for context, _ in pairs])
        questions: list[Question] = []
        start = 0
        for _, group in groupby(requests, lambda request: (request.task_name, request.doc_id)):
            rows, spans, cut = [], [], 0
            for _ in group:
                row = np.array([self.tokenizer.bos, *next(wholes)], np.int32)
                # As in the harness: as many tokens as the complete text has beyond the context.
                scored = max(len(row) - 1 - len(next(contexts)), 1)
                kept = row[-(self.scorer.longest + 1) :]  # the last token is not read
                rows, cut = [*rows, kept], max(cut, len(row) - len(kept))
                spans.append((max(len(kept) - scored, 1), len(kept)))
            questions.append(Question(start, rows, spans, cut))
            start += len(rows)
        return ((first + i, line) for first, i, line in self._scored(questions))

    def _scored(self, questions: Sequence[Question]) -> Iterator[tuple[int, int, dict]]:
        """Yield each question's `index`, each of its rows' numbers, and the line of that row."""
        for question, scores in self.scorer(self.network.params, questions):
            for i, (start, end) in enumerate(question.spans):
                line = {
                    "loglikelihood": -float(np.sum(scores.losses[i])),
                    "greedy": bool(scores.likeliest[i]),
                    "margin": float(scores.margins[i]) if start < end else 0.0,
                    "tokens": end - start,
                    "cut": question.cut,
                }
                yield question.index, i, line

    def _rolling(self, new: dict) -> Iterator[tuple[int, dict]]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        questions, lines, parts = [], [], []
        for text, ids in enumerate(self.tokenizer.encode([request.args[0] for request in new.values()])):
            windows = list(get_rolling_token_windows(ids, self.tokenizer.bos, self.scorer.longest, 1))
            for before, scored in map(make_disjoint_window, windows):
                row = np.array([*before, *scored], np.int32)
                questions.append(Question(text, [row], [(len(before), len(row))], 0))
            parts.append(len(windows))
            lines.append({"loglikelihood": 0.0, "tokens": 0})
        yield from ((text, line) for text, line in enumerate(lines) if parts[text] == 0)
        for text, _, row in self._scored(questions):
            lines[text] = {name: lines[text][name] + row[name] for name in lines[text]}
            parts[text] -= 1
            if parts[text] == 0:
                yield text, lines[text]

    def _generated(self, new: dict) -> Iterator[tuple[int, dict]]:
        """Yield the place and the line of each request when its text is complete. A context loses its first tokens if
        the new ones need the room. A sample depends on its request, not on the others."""
        asked, stops, cuts = [], [], []
        for (key, request), ids in zip(new.items(), self.tokenizer.encode([r.args[0] for r in new.values()])):
            until, sampling, tokens = self._generation(request)
            prompt = [self.tokenizer.bos, *ids][-(self.scorer.longest - tokens) :]
            asked.append((prompt, sampling._replace(seed=int(digest(key)[:7], 16)), tokens))
            stops.append([stop for stop in until if stop])
            cuts.append(1 + len(ids) - len(prompt))
        capacity = max(len(prompt) + tokens for prompt, _, tokens in asked)
        slots = min(len(asked), max(1, self.scorer.tokens_per_device // capacity) * self.scorer.replicas)
        text = lambda answer: self.tokenizer.decode(answer.tokens)
        stopped = lambda place, answer: bool(stops[place]) and any(map(text(answer).__contains__, stops[place]))
        for place, answer in Engine(self.network, slots, capacity, self.chat).answers(asked, stopped):
            first = min((text(answer).split(stop)[0] for stop in stops[place]), key=len, default=text(answer))
            yield place, {"text": first, "cut": cuts[place]}

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

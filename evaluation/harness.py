# pyright: reportMissingImports=false
"""Our network on the mesh as a model of EleutherAI's lm-evaluation-harness; evaluation/harness_tasks.py runs its tasks.

The harness asks three things of a model: the log-likelihood of a continuation after a context, that of a whole text,
and what it would write after a context. Nothing else of it is used; it comes with `make setup EXTRA=harness`.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count, groupby
from typing import Any

import numpy as np

from configs.schema import UserError
from data.tokenizer import TextTokenizer
from evaluation.core import Question
from evaluation.generation import Generate
from evaluation.item_log import recorded
from evaluation.scorer import Scorer, coarse_size, size_down

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise UserError(f"these tasks need lm-evaluation-harness: make setup EXTRA=harness ({error})") from error


class HarnessNetwork(LM):
    """Our network, as the harness calls it. Every text is read after a BOS, as in training.

    `done`: lines of requests that an earlier start has answered; `record` takes those of the others, as they are
    answered; `agree` is given a name and a text that must be the same in all processes.
    """

    def __init__(
        self,
        params: dict,
        tokenizer: TextTokenizer,
        scorer: Scorer,
        generate: Generate,
        done: Sequence[dict] = (),
        record: Callable[[list[dict]], Any] = lambda lines: None,
        agree: Callable[[str, str], Any] = lambda name, text: None,
    ):
        super().__init__()
        self.params, self.tokenizer, self.longest = params, tokenizer, scorer.longest
        self.scorer, self.generate = scorer, generate
        self.answers = {line["request"]: line for line in done}
        self.record, self.agree = record, agree

    def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
        """Of each (context, continuation); and whether the continuation is what the likeliest tokens spell."""
        lines = self._answered("loglikelihood", requests, self._loglikelihoods)
        return [(line["loglikelihood"], line["greedy"]) for line in lines]

    def loglikelihood_rolling(self, requests: list) -> list[float]:
        """Of each (text,): a longer one than the row is cut into rows, each with the token before it."""
        return [line["loglikelihood"] for line in self._answered("rolling", requests, self._rolling)]

    def generate_until(self, requests: list) -> list[str]:
        """After each (context, options), up to a stop sequence or the document's end."""
        return [line["text"] for line in self._answered("generate", requests, self._generated)]

    def _answered(self, kind: str, requests: list, answer: Callable[[dict], Iterator[tuple[int, dict]]]) -> list[dict]:
        """Each request's line: of those that were answered before, and of the others, by their keys, as `answer` gives
        them: with their places, in any order."""
        keys = [digest(request.args) for request in requests]
        if kind == "generate":  # a text that is asked for several times is drawn several times
            draws = defaultdict(count)
            keys = [f"{key}-{next(draws[key])}" for key in keys]
        self.agree(f"their {kind} requests", digest(keys))
        new = {key: request for key, request in zip(keys, requests) if key not in self.answers}
        left = list(new)
        answered = answer(new) if new else ()
        found = ({"request": left[place], **line} for place, line in answered)
        self.answers |= {line["request"]: line for line in recorded(found, self.record)}
        return [self.answers[key] for key in keys]

    def _loglikelihoods(self, new: dict) -> Iterator[tuple[int, dict]]:
        """The continuations of one item share what they begin with alike, so an item's requests are one question."""
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
                # As the harness has it: as many tokens as the whole has more than the context.
                scored = max(len(row) - 1 - len(next(contexts)), 1)
                kept = row[-(self.longest + 1) :]  # nothing is read of the last one
                rows, cut = [*rows, kept], max(cut, len(row) - len(kept))
                spans.append((max(len(kept) - scored, 1), len(kept)))
            questions.append(Question(start, rows, spans, cut))
            start += len(rows)
        return ((first + i, line) for first, i, line in self._scored(questions))

    def _scored(self, questions: Sequence[Question]) -> Iterator[tuple[int, int, dict]]:
        """Each question's `index`, each of its rows' numbers, and the line of that row."""
        for question, scores in self.scorer(self.params, questions):
            for i, (start, end) in enumerate(question.spans):
                nothing = start >= end
                line = {
                    "loglikelihood": 0.0 if nothing else -float(scores.loss_sums[i]),
                    "greedy": nothing or bool(scores.likeliest[i]),
                    "margin": 0.0 if nothing else float(scores.margins[i]),
                    "tokens": end - start,
                    "cut": question.cut,
                }
                yield question.index, i, line

    def _rolling(self, new: dict) -> Iterator[tuple[int, dict]]:
        questions, parts, found = [], [], []
        for text, ids in enumerate(self.tokenizer.encode([request.args[0] for request in new.values()])):
            tokens = np.array([self.tokenizer.bos, *ids], np.int32)
            ends = [*range(1 + self.longest, len(tokens), self.longest), len(tokens)] if ids else []
            for before, end in zip([1, *ends], ends):
                # The last row is full, too: what stands before it is read again, and not scored again.
                row = tokens[max(end - self.longest - 1, 0) : end]
                questions.append(Question(text, [row], [(len(row) - (end - before), len(row))], 0))
            parts.append(len(ends))
            found.append({"loglikelihood": 0.0, "tokens": 0})
        yield from ((text, line) for text, line in enumerate(found) if parts[text] == 0)
        for text, _, row in self._scored(questions):
            found[text] = {name: found[text][name] + row[name] for name in found[text]}
            parts[text] -= 1
            if parts[text] == 0:
                yield text, found[text]

    def _generated(self, asked: dict) -> Iterator[tuple[int, dict]]:
        """Prompts of like length and equal options together. A context loses its first tokens where the new ones
        would find no room. What is drawn follows from the request, whatever stands beside it."""
        groups, seeds = {}, [int(digest(key)[:7], 16) for key in asked]
        encoded = self.tokenizer.encode([request.args[0] for request in asked.values()])
        for i, (request, ids) in enumerate(zip(asked.values(), encoded)):
            options = self._generation(request)
            room = self.longest - options["tokens"]
            whole = [self.tokenizer.bos, *ids]
            prompt = whole[-room:]
            alike = (options["tokens"], options["temperature"], options["top_k"])
            groups.setdefault(alike, []).append((i, prompt, options["until"], len(whole) - len(prompt)))
        for (tokens, temperature, top_k), prompts in sorted(groups.items()):
            prompts.sort(key=lambda prompt: len(prompt[1]))
            longest = coarse_size(len(prompts[-1][1])) + tokens
            fit = max(1, self.scorer.tokens_per_device // longest)  # every device holds all of them
            width = 1 << min(fit.bit_length() - 1, (len(prompts) - 1).bit_length())
            for first in range(0, len(prompts), width):
                some = prompts[first : first + width]
                size = coarse_size(len(some[-1][1]))
                buffer, lengths = np.zeros((width, size + tokens), np.int32), np.ones(width, np.int32)
                for row, (_, prompt, _, _) in enumerate(some):
                    buffer[row, : len(prompt)], lengths[row] = prompt, len(prompt)
                # Beyond it a prompt is read token by token; rounded down, so that there are few programs.
                prefill = max(1, size_down(len(some[0][1])) // 64 * 64)
                lengths[len(some) :] = prefill
                of_rows = np.resize(np.array([seeds[i] for i, *_ in some], np.int32), width)
                options = {"prefill": prefill, "temperature": temperature, "top_k": top_k}
                filled = np.asarray(self.generate(self.params, buffer, lengths, of_rows, **options))
                for row, (i, prompt, until, cut) in zip(filled, some):
                    new = row[len(prompt) : len(prompt) + tokens].tolist()
                    new = new[: new.index(self.tokenizer.bos)] if self.tokenizer.bos in new else new
                    text = self.tokenizer.decode(new)
                    for end in until:
                        text = text.split(end)[0] if end else text
                    yield i, {"text": text, "cut": cut}

    def _generation(self, request: Any) -> dict[str, Any]:
        """What a task asks of the text. UserError for what there is not."""
        from lm_eval.models.utils import normalize_gen_kwargs

        asked: dict[str, Any] = dict(normalize_gen_kwargs(request.args[1]))
        sampled = asked.pop("do_sample")
        options = {
            "until": asked.pop("until"),
            "tokens": asked.pop("max_gen_toks"),
            "temperature": asked.pop("temperature", 0.0) if sampled else 0.0,
            "top_k": asked.pop("top_k", 50) if sampled else 0,
        }
        if asked and sampled:
            raise UserError(f"{request.task_name} draws its text with {asked}; there is temperature and top_k alone")
        if options["tokens"] >= self.longest:
            raise UserError(
                f"{request.task_name} asks for {options['tokens']} new tokens, and a row of the network has "
                f"{self.longest}: leave that task out"
            )
        return options


def pair_of(context: str, continuation: str) -> tuple[str, str]:
    """Blanks at the end of a context belong to the first token of the continuation, as the harness has it."""
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def digest(arguments: Any) -> str:
    """Names a request."""
    return hashlib.sha256(json.dumps(arguments).encode()).hexdigest()[:32]

# pyright: reportMissingImports=false
"""Our network on the mesh as a model of EleutherAI's lm-evaluation-harness; evaluation/harness_tasks.py runs its tasks.

The harness asks three things of a model: the log-likelihood of a continuation after a context, that of a whole text,
and what it would write after a context. Nothing else of it is used; it comes with `make setup EXTRA=harness`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from configs.schema import BatchConfig, ModelConfig, UserError
from data.tokenizer import TextTokenizer
from evaluation.core import Question
from evaluation.generation import make_generate
from evaluation.log import recorded
from evaluation.scorer import coarse_size, make_score, score_questions

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
        config: ModelConfig,
        batch: BatchConfig,
        dtype: jnp.dtype,
        mesh: Mesh,
        longest: int | None = None,
        done: Sequence[dict] = (),
        record: Callable[[list[dict]], Any] = lambda lines: None,
        agree: Callable[[str, str], Any] = lambda name, text: None,
    ):
        """`longest`: most tokens that the network reads, as many as a row of `batch` has unless it is given."""
        super().__init__()
        self.params, self.tokenizer, self.mesh = params, tokenizer, mesh
        self.longest = longest or batch.sequence_length
        self.tokens_per_device = batch.rows_per_device * batch.sequence_length
        self.score, self.generate = make_score(config, dtype, mesh), make_generate(config, dtype, mesh)
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

    def _answered(self, kind: str, requests: list, answer: Callable[[list], Iterator[tuple[int, dict]]]) -> list[dict]:
        """Each request's line: of those that were answered before, and of the others, as `answer` gives them: with
        their places, in any order."""
        keys = [digest(request.args) for request in requests]
        self.agree(f"their {kind} requests", digest(keys))
        new = {key: request for key, request in zip(keys, requests) if key not in self.answers}
        left = list(new)
        answered = answer(list(new.values())) if new else ()
        found = ({"request": left[place], **line} for place, line in answered)
        self.answers |= {line["request"]: line for line in recorded(found, self.record)}
        return [self.answers[key] for key in keys]

    def _loglikelihoods(self, requests: list) -> Iterator[tuple[int, dict]]:
        """The continuations of one item share what they begin with alike, so an item's requests are one question."""
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
                new = max(len(row) - 1 - len(next(contexts)), 1)
                kept = row[-(self.longest + 1) :]  # nothing is read of the last one
                rows, cut = [*rows, kept], max(cut, len(row) - len(kept))
                spans.append((max(len(kept) - new, 1), len(kept)))
            questions.append(Question(start, rows, spans, cut))
            start += len(rows)
        return ((first + i, line) for first, i, line in self._scored(questions))

    def _scored(self, questions: Sequence[Question]) -> Iterator[tuple[int, int, dict]]:
        """Each question's `index`, each of its rows' numbers, and the line of that row."""
        for question, scores in score_questions(self.score, self.params, questions, self.mesh, self.tokens_per_device):
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

    def _rolling(self, requests: list) -> Iterator[tuple[int, dict]]:
        questions, parts, found = [], [], []
        for text, ids in enumerate(self.tokenizer.encode([request.args[0] for request in requests])):
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

    def _generated(self, requests: list) -> Iterator[tuple[int, dict]]:
        """Prompts of like length and the same options together. A context loses its first tokens where the new ones
        would find no room."""
        groups = {}
        for i, (request, ids) in enumerate(zip(requests, self.tokenizer.encode([r.args[0] for r in requests]))):
            options = self._generation(request)
            room = self.longest - options["tokens"]
            whole = [self.tokenizer.bos, *ids]
            prompt = whole[-room:]
            shape = (coarse_size(len(prompt)), options["tokens"], options["temperature"], options["top_k"])
            groups.setdefault(shape, []).append((i, prompt, options["until"], len(whole) - len(prompt)))
        for (size, tokens, temperature, top_k), prompts in sorted(groups.items(), key=lambda group: group[0]):
            fit = max(1, self.tokens_per_device // (size + tokens))  # every device holds all of them
            width = 1 << min(fit.bit_length() - 1, (len(prompts) - 1).bit_length())
            for first in range(0, len(prompts), width):
                some = prompts[first : first + width]
                buffer, lengths = np.zeros((width, size + tokens), np.int32), np.ones(width, np.int32)
                for row, (_, prompt, _, _) in enumerate(some):
                    buffer[row, : len(prompt)], lengths[row] = prompt, len(prompt)
                prefill = below(size)  # one for all of a size: one program
                lengths[len(some) :] = prefill
                options = {"prefill": prefill, "temperature": temperature, "top_k": top_k}
                filled = np.asarray(self.generate(self.params, buffer, lengths, np.int32(0), **options))
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
        if sampled and (request.repeats or 1) > 1:  # which would all be answered by the first
            raise UserError(
                f"{request.task_name} draws {request.repeats} texts of each item, and here one alone can be drawn"
            )
        if options["tokens"] >= self.longest:
            raise UserError(
                f"{request.task_name} asks for {options['tokens']} new tokens, and a row of the network has "
                f"{self.longest}: leave that task out"
            )
        return options


def below(size: int) -> int:
    """One more than the next smaller of `coarse_size`'s sizes: no prompt of this size is shorter."""
    return next((shorter for shorter in range(size - 1, 0, -1) if coarse_size(shorter) < size), 0) + 1


def pair_of(context: str, continuation: str) -> tuple[str, str]:
    """Blanks at the end of a context belong to the first token of the continuation, as the harness has it."""
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def digest(arguments: Any) -> str:
    """Names a request."""
    return hashlib.sha256(json.dumps(arguments).encode()).hexdigest()[:32]

"""Serve an engine that writes what a test says."""

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from types import SimpleNamespace

import openai

from data.prepare.selection import train_tokenizer
from generation.engine import Engine
from model.sampling import Sampling
from serving.batcher import Batcher
from serving.model import Model
from serving.server import Access, Service, listener, make_server, run_server

TOKENIZER = train_tokenizer(["some words, and others"], 272)
MODEL = Model("tiny", "0.1 M parameters, trained on words", ("first?", "second?", "third?"))
NOBODY_ELSE = Access()
HELLO = [{"role": "user", "content": "hello"}]


class FakeEngine:
    """A generation.engine.Engine that answers a prompt with the tokens of `script(prompt)`."""

    def __init__(self, script: Callable[[list[int]], Iterable[int]], slots: int = 1):
        self.script, self.slots, self.capacity = script, slots, 200
        self.active: list[SimpleNamespace] = []
        self.begun: list[tuple[list[int], Sampling]] = []
        self.together = 0
        """The most answers that one step has lengthened."""
        self.gate = threading.Event()
        """Steps wait for it."""
        self.gate.set()

    @property
    def free(self) -> int:
        return self.slots - len(self.active)

    def begin(self, tokens: list[int], sampling: Sampling, most: int | None = None) -> SimpleNamespace:
        assert self.free and len(tokens) < self.capacity
        self.begun.append((tokens, sampling))
        answer = {"script": iter(self.script(tokens)), "most": most, "read": len(tokens) - 1}
        self.active.append(SimpleNamespace(**answer, tokens=[], finished=""))
        return self.active[-1]

    def step(self) -> None:
        assert self.gate.wait(60)
        time.sleep(0.001)  # or endless answers outrun their readers
        self.together = max(self.together, len(self.active))
        for answer in self.active:
            if len(answer.tokens) == answer.most:
                answer.finished = "length"
            elif (token := next(answer.script, None)) is None:
                answer.finished = "stop"
            else:
                answer.tokens.append(token)
        self.active = [answer for answer in self.active if not answer.finished]

    def drop(self, answer: SimpleNamespace) -> None:
        self.active.remove(answer)


def spell(*pieces: str) -> list[int]:
    """Return tokens, of special tokens and of texts."""
    special = TOKENIZER.special_tokens
    return [i for piece in pieces for i in ([special[piece]] if piece in special else TOKENIZER.encode([piece])[0])]


def endless(prompt: list[int]) -> Iterator[int]:
    """Answer without an end."""
    return cycle(spell("word "))


@contextmanager
def served(
    engine: FakeEngine | Engine, queue: int = 8, access: Access = NOBODY_ELSE, model: Model = MODEL
) -> Iterator[openai.OpenAI]:
    """Serve `engine`. Yield a client that never retries. Raise what stops the server."""
    batcher = Batcher(engine, queue)
    server = make_server(Service(batcher, TOKENIZER, model, Sampling(top_k=40)), access)
    bound = listener("127.0.0.1", 0)
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(lambda: asyncio.run(run_server(server, batcher, bound)))
        wait_until(lambda: server.started)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        try:
            with openai.OpenAI(base_url=url, api_key=access.key or "none", max_retries=0, timeout=60) as client:
                yield client
        finally:
            server.should_exit = True
            serving.result(60)


def wait_until(reached: Callable[[], bool]) -> None:
    """Wait, for a minute at most."""
    until = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.01)


def echo(prompt: list[int]) -> list[int]:
    """Answer with the prompt's text, in capitals."""
    return spell(TOKENIZER.decode(prompt).upper())


def ask(client: openai.OpenAI, text: str = "hello", **options):
    return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}], **options)


def fetch(client: openai.OpenAI, path: str, body: bytes | None = None) -> tuple[int, dict]:
    """Return the status and the answer to a GET, or to a POST of `body`, without OpenAI's client."""
    request = urllib.request.Request(str(client.base_url.join(path)), body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

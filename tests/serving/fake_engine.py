"""The interface of evaluation.engine.Engine, with answers that a test scripts and steps that it lets through."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from evaluation.engine import Sampling


@dataclass(eq=False)
class FakeAnswer:
    script: Iterator[int]
    most: int | None
    read: int
    tokens: list[int] = field(default_factory=list)
    finished: str = ""


class FakeEngine:
    """Answers a prompt with the tokens that `script(prompt)` gives, and ends with "stop", or after `most` of them."""

    def __init__(self, script: Callable[[list[int]], Iterable[int]], slots: int = 1, capacity: int = 200):
        self.script, self.slots, self.capacity = script, slots, capacity
        self.active: list[FakeAnswer] = []
        self.begun: list[tuple[list[int], Sampling]] = []
        self.together = 0
        """The most answers that one step has lengthened."""
        self.gate = threading.Event()
        """Steps wait for it."""
        self.gate.set()
        self.fails = False

    @property
    def free(self) -> int:
        return self.slots - len(self.active)

    def begin(self, tokens: list[int], sampling: Sampling, most: int | None = None) -> FakeAnswer:
        assert self.free and len(tokens) < self.capacity
        self.begun.append((tokens, sampling))
        self.active.append(FakeAnswer(iter(self.script(tokens)), most, read=len(tokens) - 1))
        return self.active[-1]

    def step(self) -> None:
        assert self.gate.wait(60)
        time.sleep(0.001)  # or endless answers are faster than those who read them
        if self.fails:
            raise MemoryError("no room for a step")
        self.together = max(self.together, len(self.active))
        for answer in self.active:
            if len(answer.tokens) == answer.most:
                answer.finished = "length"
            elif (token := next(answer.script, None)) is None:
                answer.finished = "stop"
            else:
                answer.tokens.append(token)
        self.active = [answer for answer in self.active if not answer.finished]

    def drop(self, answer: FakeAnswer) -> None:
        self.active.remove(answer)

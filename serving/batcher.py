"""Requests wait here for a slot of the engine, and then for their answers' tokens."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from generation.engine import Answer, Engine
from model.sampling import Sampling


@dataclass(eq=False)
class Job:
    """An admitted request. It waits for its prompt, then for a slot, then for its answer's tokens."""

    sampling: Sampling
    most: int | None
    prompt: list[int] | None = None
    """None while the request's text becomes tokens."""
    answer: Answer | None = None
    dropped: bool = False
    """True once nobody waits for the answer."""
    sent: int = 0
    events: asyncio.Queue[int | str] = field(default_factory=asyncio.Queue)
    """The answer's tokens, then why it ended: "stop" or "length"."""


class Batcher:
    """Answers as many jobs at once as the engine has slots, first come, first served; `queue` more may wait."""

    def __init__(self, engine: Engine, queue: int):
        self.engine, self.slots, self.queue = engine, engine.free, queue
        self.jobs: list[Job] = []
        self.started = asyncio.Event()
        self.thread = ThreadPoolExecutor(1)  # long texts that become tokens may take all threads of asyncio

    @property
    def outstanding(self) -> int:
        """Return the number of jobs that are being answered or wait."""
        return sum(not job.dropped for job in self.jobs)

    def admit(self, job: Job) -> bool:
        """Give the job a place. Return False if too many wait already."""
        accepted = self.outstanding < self.slots + self.queue
        if accepted:
            self.jobs.append(job)
        return accepted

    def start(self, job: Job, prompt: list[int]) -> None:
        """Let an admitted job wait for a slot."""
        job.prompt = prompt
        self.started.set()

    async def run(self) -> None:
        """Answer jobs until it is cancelled."""
        while True:
            for job in [job for job in self.jobs if job.dropped]:
                self.jobs.remove(job)
                if job.answer:
                    self.engine.drop(job.answer)
            if not any(job.prompt for job in self.jobs):
                self.started.clear()
                await self.started.wait()
            # One prompt is read between two steps: many new ones do not interrupt the other answers for long.
            waiting = [job for job in self.jobs if job.prompt and not job.answer and not job.dropped]
            if self.engine.free and waiting:
                job = waiting[0]
                assert job.prompt
                job.answer = self.engine.begin(job.prompt, job.sampling, job.most)
            await asyncio.get_running_loop().run_in_executor(self.thread, self.engine.step)
            for job, answer in [(job, job.answer) for job in self.jobs if job.answer]:
                for token in answer.tokens[job.sent :]:
                    job.events.put_nowait(token)
                job.sent = len(answer.tokens)
                if answer.finished:
                    self.jobs.remove(job)
                    job.events.put_nowait(answer.finished)

"""Several answers at once: one thread takes the engine's steps, and each request waits for its own tokens."""

import asyncio
import threading

from evaluation.engine import Answer, Engine
from model.sampling import Sampling


class Job:
    """A request, which waits for a slot and then for its answer's tokens. It is made in the event loop's thread."""

    def __init__(self, prompt: list[int], sampling: Sampling, most: int | None):
        self.prompt, self.sampling, self.most = prompt, sampling, most
        self.answer: Answer | None = None
        self.dropped = False
        """True once nobody waits for the answer."""
        self.sent = 0
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[int | str] = asyncio.Queue()
        """The answer's tokens, then why it ended: "stop" or "length"."""

    def send(self, event: int | str) -> None:
        """Put an event, from any thread."""
        self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class Batcher:
    """Answers as many jobs at once as the engine has slots, first come, first served; `queue` more may wait."""

    def __init__(self, engine: Engine, queue: int):
        self.engine, self.slots, self.queue = engine, engine.free, queue
        self.jobs: list[Job] = []
        self.stopped = False
        self.changed = threading.Condition()

    @property
    def outstanding(self) -> int:
        """Return the number of jobs that are being answered or wait."""
        with self.changed:
            return sum(not job.dropped for job in self.jobs)

    def submit(self, job: Job) -> bool:
        """Queue the job. Return False if too many wait already."""
        with self.changed:
            if accepted := self.outstanding < self.slots + self.queue:
                self.jobs.append(job)
                self.changed.notify()
            return accepted

    def run(self) -> None:
        """Answer jobs until `stop`."""
        while not self.stopped:
            with self.changed:
                self.changed.wait_for(lambda: self.jobs or self.stopped)
            self._step()

    def stop(self) -> None:
        """End `run` after its present step."""
        with self.changed:
            self.stopped = True
            self.changed.notify()

    def _step(self) -> None:
        for job in [job for job in self.jobs if job.dropped]:
            self._remove(job)
            if job.answer is not None:
                self.engine.drop(job.answer)
        # One prompt is read between two steps: many new ones do not interrupt the other answers for long.
        if self.engine.free and (job := next((job for job in self.jobs if job.answer is None), None)):
            job.answer = self.engine.begin(job.prompt, job.sampling, job.most)
        self.engine.step()
        for job, answer in [(job, job.answer) for job in self.jobs if job.answer is not None]:
            for token in answer.tokens[job.sent :]:
                job.send(token)
            job.sent = len(answer.tokens)
            if answer.finished:
                self._remove(job)
                job.send(answer.finished)

    def _remove(self, job: Job) -> None:
        with self.changed:  # another thread counts jobs
            self.jobs.remove(job)

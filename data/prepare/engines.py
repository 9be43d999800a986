"""Engines for the jobs of a preparation: processes of this machine (here), or jobs of SLURM (slurm_engine.py).

Each engine takes jobs and returns them, in any order, as they end. A worker's death affects no other job: its job is
tried again, alone, and named when it kills a worker three times on one document.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from configs.schema import UserError

DEATHS = 3  # deaths of workers on one document, after which it is not tried again


@runtime_checkable
class Job(Protocol):
    """A job that knows its progress."""

    @property
    def out(self) -> Path:
        """Return the job's output, written atomically."""
        ...

    def run(self) -> None: ...

    def at(self) -> bytes | None:
        """Return the job's position; None before its begin and after its end."""
        ...

    def place(self) -> str:
        """Return the position as text for a person."""
        ...


@dataclass
class Ended:
    """A job that ended."""

    job: Job
    error: Exception | None = None


class Engine:
    """The interface of engines: they take jobs and return them. Subclasses run them, in `wait` and `close`."""

    def __init__(self):
        self.waiting: deque[Job] = deque()
        self.suspects: deque[Job] = deque()  # a worker died with each: to be run alone
        self.running: dict[Any, Any] = {}
        self.deaths: Counter = Counter()

    def submit(self, *jobs: Job) -> None:
        self.waiting.extend(jobs)

    def drop(self, unwanted: Callable[[Job], bool]) -> None:
        """Forget jobs that have not begun."""
        self.waiting = deque(job for job in self.waiting if not unwanted(job))
        self.suspects = deque(job for job in self.suspects if not unwanted(job))

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.suspects or self.running)

    def wait(self) -> list[Ended]:
        """Wait until a job has ended, and return those that have."""
        raise NotImplementedError

    def close(self) -> None:
        """End what runs."""
        raise NotImplementedError

    def retry_or_fail(self, job: Job, others: bool = False) -> list[Ended]:
        """Handle a job whose worker died. `others` may have killed it."""
        if (at := job.at()) is None:
            self.waiting.appendleft(job)
            return []
        self.deaths[id(job), at] += not others
        if self.deaths[id(job), at] < DEATHS:
            self.suspects.append(job)
            return []
        message = f"{job.place()}: a worker died on it {DEATHS} times (killed, as for want of memory, or crashed)"
        return [Ended(job, UserError(message))]


class LocalEngine(Engine):
    """An engine of processes on this machine; with one worker, this process."""

    def __init__(self, workers: int):
        super().__init__()
        self.workers = workers
        self.processes: dict[Connection, Any] = {}
        self.alone = False

    def wait(self) -> list[Ended]:
        if self.workers == 1:
            return [_ended(self.waiting.popleft())] if self.waiting else []
        while self.waiting or self.suspects:
            if len(self.running) == self.workers or (self.running and (self.suspects or self.alone)):
                break
            self.alone = bool(self.suspects)
            self._start((self.suspects or self.waiting).popleft())
        ended = []
        for worker in wait_for(list(self.running)):
            assert isinstance(worker, Connection)
            job = self.running.pop(worker)
            try:
                ended.append(Ended(job, worker.recv()))
            except (EOFError, OSError):
                del self.processes[worker]
                ended += self.retry_or_fail(job)
        return ended

    def _start(self, job: Job) -> None:
        """Give a job to an idle worker."""
        worker = next(iter(self.processes.keys() - self.running.keys()), None)
        if not worker:
            worker, theirs = multiprocessing.Pipe()
            context = multiprocessing.get_context("spawn")  # JAX and its threads may be in this process
            self.processes[worker] = context.Process(target=_worker, args=(theirs,), daemon=True)
            self.processes[worker].start()
            theirs.close()
        with suppress(OSError):  # it died; `wait` notices
            worker.send(job)
        self.running[worker] = job

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        self.processes.clear()


def _ended(job: Job) -> Ended:
    try:
        job.run()
        return Ended(job)
    except (UserError, OSError) as error:
        return Ended(job, error)


def _worker(jobs: Connection) -> None:
    """Run jobs one by one, in a worker. Ignore Ctrl-C, and end with the command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent

    def follow() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    while True:
        jobs.send(_ended(jobs.recv()).error)

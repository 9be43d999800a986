"""Where the tasks of a preparation run: in processes of this machine (here), or in jobs of SLURM (data/slurm.py).

Each engine takes tasks and gives them back, in any order, as they end. A worker that dies takes no other task with it:
what it was at is tried again, alone, and named when that kills a worker three times on one document.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from typing import Any, Protocol, runtime_checkable

from configs.schema import UserError

DEATHS = 3  # of workers, on one document, after which it is not tried again


@runtime_checkable
class Job(Protocol):
    """Something to do, that knows how far it has come."""

    def run(self) -> Any: ...

    def at(self) -> bytes | None:
        """Where it is; None where it has not begun or has ended."""
        ...

    def place(self) -> str:
        """The same, for a person."""
        ...


@dataclass
class Ended:
    """A job that was run."""

    job: Job
    result: Any = None
    error: Exception | None = None


class Engine:
    """What takes jobs and gives them back. One that runs them says where, in `wait` and `close`."""

    def __init__(self):
        self.waiting: deque[Job] = deque()
        self.suspects: deque[Job] = deque()  # a worker died with each: to be run with no other beside it
        self.running: dict[Any, Any] = {}
        self.deaths: Counter = Counter()

    def submit(self, *jobs: Job, first: bool = False) -> None:
        (self.waiting.extendleft if first else self.waiting.extend)(jobs)

    def drop(self, unwanted: Callable[[Job], bool]) -> None:
        """Forgets jobs that have not begun."""
        self.waiting = deque(job for job in self.waiting if not unwanted(job))
        self.suspects = deque(job for job in self.suspects if not unwanted(job))

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.suspects or self.running)

    def wait(self) -> list[Ended]:
        """What has ended since; waits until something has."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what runs."""
        raise NotImplementedError

    def _bury(self, lost: list[Job]) -> list[Ended]:
        """Sorts what was lost with workers that died together."""
        ended = []
        for job in lost:
            if (at := job.at()) is None:
                self.waiting.appendleft(job)
                continue
            self.deaths[id(job), at] += len(lost) == 1  # else it may have been another's
            if self.deaths[id(job), at] == DEATHS:
                message = (
                    f"{job.place()}: a worker died on it {DEATHS} times (killed, as for want of memory, or crashed)"
                )
                ended.append(Ended(job, error=UserError(message)))
            else:
                self.suspects.append(job)
        return ended


class Local(Engine):
    """Processes of this machine; with one worker, this process."""

    def __init__(self, workers: int):
        super().__init__()
        self.workers = workers
        self.pool: ProcessPoolExecutor | None = None

    def wait(self) -> list[Ended]:
        if self.workers == 1:
            return [_ended(job, job.run) for job in [self.waiting.popleft()]] if self.waiting else []
        if not self.pool:
            context = multiprocessing.get_context("spawn")  # JAX and its threads may be in this process
            self.pool = ProcessPoolExecutor(self.workers, context, initializer=_worker)
        try:
            while (self.suspects and not self.running) or (
                not self.suspects and self.waiting and len(self.running) <= self.workers
            ):
                job = (self.suspects or self.waiting).popleft()
                self.running[self.pool.submit(job.run)] = job
        except BrokenProcessPool:  # an idle worker died
            self.waiting.appendleft(job)
            if not self.running:
                self.close()
        done = wait(self.running, return_when=FIRST_COMPLETED).done
        if any(isinstance(future.exception(), BrokenProcessPool) for future in done):
            done = wait(self.running).done  # it ends all others as well
        ended, lost = [], []
        for future in done:
            job = self.running.pop(future)
            if isinstance(future.exception(), BrokenProcessPool):
                lost.append(job)
            else:
                ended.append(_ended(job, future.result))
        if lost:
            self.close()
        return ended + self._bury(lost)

    def close(self) -> None:
        if self.pool:
            for process in list((self.pool._processes or {}).values()):  # no public name before Python 3.14
                process.kill()
            self.pool.shutdown(cancel_futures=True)
            self.pool = None


def _ended(job: Job, result: Callable[[], Any]) -> Ended:
    try:
        return Ended(job, result())
    except (UserError, OSError) as error:
        return Ended(job, error=error)


def _worker() -> None:
    """What a worker does first: it leaves Ctrl-C to the command, and ends when that does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent

    def follow() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()

"""Engines for the jobs of a preparation: processes of this machine, or jobs of SLURM.

An engine takes jobs from a queue in order, and yields them as they end. A worker's death affects no other job: its job
is tried again, alone, and named when it kills a worker three times on one document.
"""

import hashlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Generator
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from configs.retry import StorageLost
from configs.schema import UserError

DEATHS = 3  # deaths of workers on one document, after which it is not tried again
PROCESSES = 8  # processes of a job of SLURM, if `workers` is 0
TASKS = 4  # tasks for each of these: a minute or two of encoding, which keeps the jobs few
SECONDS = 2  # seconds between looks at SLURM's queue


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


Ended = Generator[tuple[Job, Exception | None], None, None]
"""Jobs that ended, each with its failure."""


class Engine:
    """The interface of engines."""

    def __init__(self):
        self.suspects: deque[Job] = deque()  # a worker died with each: to be run alone
        self.deaths: Counter = Counter()

    def run(self, waiting: deque[Job]) -> Ended:
        """Run the waiting jobs. The caller may clear the queue: then only jobs that were taken, and their
        retries, end."""
        raise NotImplementedError

    def retry_or_fail(self, job: Job, waiting: deque[Job], others: bool = False) -> Ended:
        """Handle a job whose worker died. `others` may have killed it."""
        if (at := job.at()) is None:
            waiting.appendleft(job)
            return
        self.deaths[id(job), at] += not others
        if self.deaths[id(job), at] < DEATHS:
            self.suspects.append(job)
            return
        message = f"{job.place()}: a worker died on it {DEATHS} times (killed, as for want of memory, or crashed)"
        yield job, UserError(message)


class LocalEngine(Engine):
    """An engine of up to `workers` processes on this machine; with one, this process."""

    def __init__(self, workers: int):
        super().__init__()
        self.workers = workers

    def run(self, waiting: deque[Job]) -> Ended:
        count, alone = min(self.workers, len(waiting)), False
        while count == 1 and waiting:
            job = waiting.popleft()
            yield job, _failure_of(job)
        processes: dict[Connection, BaseProcess] = {}
        running: dict[Connection, Job] = {}
        try:
            while waiting or self.suspects or running:
                while (waiting or self.suspects) and len(running) < count:
                    if running and (self.suspects or alone):
                        break
                    alone = bool(self.suspects)
                    worker = next(iter(processes.keys() - running.keys()), None) or _start_worker(processes)
                    running[worker] = (self.suspects or waiting).popleft()
                    with suppress(OSError):  # it died, which `recv` notices
                        worker.send(running[worker])
                for worker in cast(list[Connection], wait_for(list(running))):
                    job = running.pop(worker)
                    try:
                        yield job, worker.recv()
                    except (EOFError, OSError):
                        del processes[worker]
                        yield from self.retry_or_fail(job, waiting)
        finally:
            for process in processes.values():
                process.kill()
                process.join()


def _start_worker(processes: dict[Connection, BaseProcess]) -> Connection:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")  # JAX and its threads may be in this process
    processes[ours] = context.Process(target=_work, args=(theirs,), daemon=True)
    processes[ours].start()
    theirs.close()
    return ours


def _work(jobs: Connection) -> None:
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
        jobs.send(_failure_of(jobs.recv()))


def _failure_of(job: Job) -> Exception | None:
    try:
        job.run()
    except (UserError, OSError, StorageLost) as error:
        return error


class SlurmEngine(Engine):
    """An engine with up to `jobs` jobs in SLURM's queue, of `workers` processes each, through submitit, which pickles
    tasks and results.

    A job runs a group of tasks. The results' files and squeue show which jobs have ended. squeue also works on clusters
    without accounting (submitit's own watcher needs sacct)."""

    def __init__(self, folder: Path, workers: int, jobs: int, options: str):
        """Take `folder`: the dataset's, on a disk that all nodes share, and sbatch's `options`. Raise UserError for
        options in another form, and without SLURM."""
        super().__init__()
        for command in ("sbatch", "srun", "squeue", "scancel"):
            if not shutil.which(command):
                raise UserError(f"--engine=slurm: there is no `{command}` here; prepare on a machine that has SLURM's")
        if not find_spec("submitit"):
            raise UserError('--engine=slurm needs submitit: pip install -e ".[slurm]"')
        import submitit

        given: dict[str, Any] = {}
        for word in options.split():
            if not word.startswith("--"):
                raise UserError(f"--sbatch={options} cannot work: each option is written --NAME=VALUE, not {word!r}")
            name, equals, value = word[2:].partition("=")
            given[name] = value if equals else True
        self.workers, self.jobs, self.fruitless = workers or PROCESSES, jobs, 0
        self.name = "data-" + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
        self.executor = submitit.SlurmExecutor(folder.resolve() / "parts" / "slurm", max_num_timeout=0)
        self.executor.update_parameters(
            job_name=self.name, cpus_per_task=self.workers, time=120, additional_parameters=given
        )

    def run(self, waiting: deque[Job]) -> Ended:
        self._cancel()  # what a killed command left behind
        running: dict[Any, list[Job]] = {}
        try:
            while waiting or self.suspects or running:
                running |= self._start(waiting, self.jobs - len(running))
                queued = self._queued()  # checked before the results: a job that left the queue has written its own
                gone = {job.job_id for job in running}.difference(queued) if queued else set()
                over = [job for job in running if job.paths.result_pickle.exists() or job.job_id in gone]
                for job in over:
                    yield from self._end(job, running.pop(job), waiting)
                if not over:
                    time.sleep(SECONDS)
        finally:
            self._cancel()

    def _cancel(self) -> None:
        subprocess.run(["scancel", "--me", f"--name={self.name}"], capture_output=True, check=False)

    def _start(self, waiting: deque[Job], free: int) -> dict[Any, list[Job]]:
        """Return up to `free` new jobs of SLURM with their groups. Raise UserError if sbatch refuses."""
        groups = []
        while (self.suspects or waiting) and len(groups) < free:
            size = 1 if self.suspects else min(TASKS * self.workers, -(-len(waiting) // self.jobs))
            groups.append([(self.suspects or waiting).popleft() for _ in range(size)])
        if not groups:
            return {}
        try:
            return dict(zip(self.executor.map_array(_run_group, groups, [self.workers] * len(groups)), groups))
        except Exception as error:  # submitit's own, with sbatch's message
            raise UserError(f"--engine=slurm: sbatch failed: {error}") from error

    def _queued(self) -> list[str]:
        """Return the jobs that SLURM has not ended, after a line of names; nothing while SLURM does not answer."""
        command = ["squeue", "--me", "--array", f"--name={self.name}", "--format=%i"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()

    def _end(self, job: Any, group: list[Job], waiting: deque[Job]) -> Ended:
        """Yield the results of a job of SLURM, complete or not."""
        if job.paths.result_pickle.exists() and job.exception() is None:
            self.fruitless = 0
            yield from ((group[i], failure) for i, failure in job.result())
            return
        begun = any(one.at() is not None or one.out.exists() for one in group)
        self.fruitless = 0 if begun else self.fruitless + 1
        if self.fruitless == DEATHS:
            output = "".join(path.read_text()[-1500:] for path in (job.paths.stderr, job.paths.stdout) if path.exists())
            raise UserError(
                f"--engine=slurm: {DEATHS} jobs in a row ended before they began a task; the last, {job.job_id}, was "
                f"cancelled, or wrote (in {self.executor.folder}): {output.strip() or 'nothing'}"
            )
        lost = [one for one in group if not one.out.exists()]  # first: the caller moves the outputs that it gets
        yield from ((one, None) for one in group if one.out.exists())
        for one in lost:
            yield from self.retry_or_fail(one, waiting, others=len(lost) > 1)


def _run_group(group: list[Job], workers: int) -> list[tuple[int, Exception | None]]:
    """Run the tasks of a job of SLURM. Return how each ended, by its place in the group."""
    numbers = {id(job): i for i, job in enumerate(group)}
    return [(numbers[id(job)], failure) for job, failure in LocalEngine(workers).run(deque(group))]

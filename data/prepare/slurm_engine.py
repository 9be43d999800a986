"""A preparation's tasks in jobs of SLURM, through submitit, which pickles them there and their results back.

A job of SLURM runs a group of tasks on its processes. Who has ended is told by the results' files and by squeue, which
answers on clusters without accounting, too (submitit's own watcher needs sacct).
"""

import hashlib
import shutil
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from configs.schema import UserError
from data.prepare.engines import DEATHS, Ended, Engine, Job, LocalEngine

PROCESSES = 8  # of a job, where `workers` is 0
TASKS = 4  # for each process of a job: a minute or two of encoding, so that SLURM has few jobs to start
SECONDS = 2  # between two looks at the queue


def read_options(text: str) -> dict[str, Any]:
    """Options of sbatch by name. UserError if they are not written as such, or there is no SLURM here."""
    for command in ("sbatch", "srun", "squeue", "scancel"):
        if not shutil.which(command):
            raise UserError(f"--engine=slurm: there is no `{command}` here; prepare on a machine that has SLURM's")
    if not find_spec("submitit"):
        raise UserError('--engine=slurm needs submitit: pip install -e ".[slurm]"')
    given: dict[str, Any] = {}
    for word in text.split():
        if not word.startswith("--"):
            raise UserError(f"--sbatch={text} cannot work: each option is written --NAME=VALUE, not {word!r}")
        name, equals, value = word[2:].partition("=")
        given[name] = value if equals else True
    return given


class SlurmEngine(Engine):
    """Up to `jobs` jobs in SLURM's queue, of `workers` processes each. `folder` is the dataset's, on a disk that all
    nodes share; `options` are more of sbatch's: `--partition=cpu --account=mine`."""

    def __init__(self, folder: Path, workers: int, jobs: int, options: str):
        """End jobs that a killed command for this folder left behind. UserError as `read_options`."""
        super().__init__()
        self.workers, self.jobs, self.fruitless = workers or PROCESSES, jobs, 0
        self.name = "data-" + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
        self.logs = folder.resolve() / "parts" / "slurm"
        given = read_options(options)
        import submitit

        self.executor = submitit.SlurmExecutor(self.logs, max_num_timeout=0)
        self.executor.update_parameters(
            job_name=self.name, cpus_per_task=self.workers, time=120, additional_parameters=given
        )
        self.close()

    def wait(self) -> list[Ended]:
        while True:
            self._start()
            queued = self._queued()  # asked before results are looked for: who has left the queue has written its own
            over = [job for job in self.running if job.paths.result_pickle.exists() or job.job_id not in queued]
            if over:
                return [ended for job in over for ended in self._end(job, self.running.pop(job))]
            time.sleep(SECONDS)

    def close(self) -> None:
        subprocess.run(["scancel", "--me", f"--name={self.name}"], capture_output=True, check=False)

    def _start(self) -> None:
        """Fill the queue. UserError if sbatch refuses."""
        groups = []
        while (self.suspects or self.waiting) and len(self.running) + len(groups) < self.jobs:
            if self.suspects:
                groups.append([self.suspects.popleft()])
            else:
                size = min(TASKS * self.workers, -(-len(self.waiting) // self.jobs))
                groups.append([self.waiting.popleft() for _ in range(size)])
        if groups:
            try:
                started = self.executor.map_array(_run, groups, [self.workers] * len(groups))
            except Exception as error:  # submitit's own, with what sbatch said
                raise UserError(f"--engine=slurm: sbatch failed: {error}") from error
            self.running |= zip(started, groups)

    def _queued(self) -> set[str]:
        """Jobs that SLURM has not ended. While it does not answer, all are taken to run."""
        command = ["squeue", "--me", "--array", "--noheader", f"--name={self.name}", "--format=%i"]
        queue = subprocess.run(command, capture_output=True, text=True, check=False)
        return set(queue.stdout.split()) if queue.returncode == 0 else {job.job_id for job in self.running}

    def _end(self, job: Any, group: list[Job]) -> list[Ended]:
        """Return what a job of SLURM has done, whether it came to its end or not."""
        if job.paths.result_pickle.exists() and job.exception() is None:
            self.fruitless = 0
            return [Ended(group[i], error) for i, error in job.result()]
        begun = any(one.at() is not None or one.out.exists() for one in group)
        self.fruitless = 0 if begun else self.fruitless + 1
        if self.fruitless == DEATHS:
            said = "".join(path.read_text()[-1500:] for path in (job.paths.stderr, job.paths.stdout) if path.exists())
            raise UserError(
                f"--engine=slurm: {DEATHS} jobs in a row ended before they began a task; the last, {job.job_id}, was "
                f"cancelled, or said (in {self.logs}): {said.strip() or 'nothing'}"
            )
        lost = [one for one in group if not one.out.exists()]
        whole = [Ended(one) for one in group if one.out.exists()]
        return whole + [ended for one in lost for ended in self.retry_or_fail(one, others=len(lost) > 1)]


def _run(group: list[Job], workers: int) -> list[tuple[int, Exception | None]]:
    """In a job of SLURM: runs its tasks, and says how each, by its place in the group, has ended."""
    engine, numbers, ended = LocalEngine(min(workers, len(group))), {id(job): i for i, job in enumerate(group)}, []
    engine.submit(*group)
    try:
        while not engine.is_idle:
            ended += [(numbers[id(one.job)], one.error) for one in engine.wait()]
    finally:
        engine.close()
    return ended

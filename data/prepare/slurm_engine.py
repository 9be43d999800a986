"""An engine that runs a preparation's tasks in jobs of SLURM, through submitit, which pickles tasks and results.

A job of SLURM runs a group of tasks on its processes. The results' files and squeue show which jobs have ended. squeue
also works on clusters without accounting (submitit's own watcher needs sacct).
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

PROCESSES = 8  # processes of a job, if `workers` is 0
TASKS = 4  # tasks for each process of a job: a minute or two of encoding, which keeps the jobs few
SECONDS = 2  # seconds between looks at the queue


def read_options(text: str) -> dict[str, Any]:
    """Return options of sbatch by name. Raise UserError if they are not written as options, or there is no SLURM
    here."""
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
    """An engine with up to `jobs` jobs in SLURM's queue, of `workers` processes each. `folder` is the dataset's, on a
    disk that all nodes share. `options` are sbatch's: `--partition=cpu --account=mine`."""

    def __init__(self, folder: Path, workers: int, jobs: int, options: str):
        """End jobs that a killed command for this folder left behind. Raise UserError as `read_options`."""
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
            queued = self._queued()  # checked before the results: a job that left the queue has written its own
            over = [job for job in self.running if job.paths.result_pickle.exists() or job.job_id not in queued]
            if over:
                return [ended for job in over for ended in self._end(job, self.running.pop(job))]
            time.sleep(SECONDS)

    def close(self) -> None:
        subprocess.run(["scancel", "--me", f"--name={self.name}"], capture_output=True, check=False)

    def _start(self) -> None:
        """Fill the queue. Raise UserError if sbatch refuses."""
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
            except Exception as error:  # submitit's own, with sbatch's message
                raise UserError(f"--engine=slurm: sbatch failed: {error}") from error
            self.running |= zip(started, groups)

    def _queued(self) -> set[str]:
        """Return the jobs that SLURM has not ended. While it does not answer, all count as running."""
        command = ["squeue", "--me", "--array", "--noheader", f"--name={self.name}", "--format=%i"]
        queue = subprocess.run(command, capture_output=True, text=True, check=False)
        return set(queue.stdout.split()) if queue.returncode == 0 else {job.job_id for job in self.running}

    def _end(self, job: Any, group: list[Job]) -> list[Ended]:
        """Return the results of a job of SLURM, complete or not."""
        if job.paths.result_pickle.exists() and job.exception() is None:
            self.fruitless = 0
            return [Ended(group[i], error) for i, error in job.result()]
        begun = any(one.at() is not None or one.out.exists() for one in group)
        self.fruitless = 0 if begun else self.fruitless + 1
        if self.fruitless == DEATHS:
            output = "".join(path.read_text()[-1500:] for path in (job.paths.stderr, job.paths.stdout) if path.exists())
            raise UserError(
                f"--engine=slurm: {DEATHS} jobs in a row ended before they began a task; the last, {job.job_id}, was "
                f"cancelled, or wrote (in {self.logs}): {output.strip() or 'nothing'}"
            )
        lost = [one for one in group if not one.out.exists()]
        whole = [Ended(one) for one in group if one.out.exists()]
        return whole + [ended for one in lost for ended in self.retry_or_fail(one, others=len(lost) > 1)]


def _run(group: list[Job], workers: int) -> list[tuple[int, Exception | None]]:
    """Run the tasks of a job of SLURM. Return how each ended, by its place in the group."""
    engine, numbers, ended = LocalEngine(min(workers, len(group))), {id(job): i for i, job in enumerate(group)}, []
    engine.submit(*group)
    try:
        while not engine.is_idle:
            ended += [(numbers[id(one.job)], one.error) for one in engine.wait()]
    finally:
        engine.close()
    return ended

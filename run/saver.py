"""Saving the state with Orbax, asynchronously and sharded.

Orbax's CheckpointManager has barriers inside a save: after a write that failed on one process, no later save completes
(bench/LOG.md). So this module uses Orbax's handlers, which have none. The processes agree through JAX's service.

This module deletes old checkpoints itself. Orbax would delete in place: a kill would leave a part of a checkpoint under
a checkpoint's name. A failed deletion (a bucket may forbid it) would fail the save before it.
"""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import jax
from etils import epath
from tenacity import Retrying, retry_if_result, wait_random_exponential

from hosts.distributed import max_over_processes, on_first_process
from hosts.runtime import versions
from options.schema import CheckpointConfig
from run.checkpoint import Checkpoints, all_finite, arrays_of, checksums, digest, items_of
from run.checkpoint_files import Saving, delete, mark_unfinished, unfinished
from run.folder import FACTS, RunFolder
from run.recovery import clear
from system import files
from system.errors import StorageLost, TrainingAborted
from system.files import described, first_line, in_bucket, is_there, with_retries
from system.messages import LOGGER
from training.state import TrainState

MOST_FAILED = 10  # consecutive failed saves that end the run


class Failure(NamedTuple):
    """A failed save."""

    message: str
    may_pass: bool
    """True if the reason may pass by itself."""
    time: float


class Saver(Checkpoints):
    """The checkpoints of a run that continues: it saves them, and deletes old ones."""

    def __init__(self, run: RunFolder, config: CheckpointConfig, scores: Mapping[int, float] = MappingProxyType({})):
        """Open a run's checkpoints, which `run.recovery.clear` has cleared. `scores`: the score of each evaluated step,
        now and later, on the first process; the checkpoint with the lowest is kept."""
        super().__init__(run)
        self.config, self.scores = config, scores
        self.pending: Saving | None = None
        """The save in progress."""
        self.failures: list[Failure] = []
        """Consecutive failed saves; the same on every process."""
        self.overdue = False
        """True if the last save failed; the same on every process."""

    def save(self, step: int, state: TrainState, facts: dict) -> None:
        """Copy the state off the devices, and write it while training continues. `step` is `int(state.step)`; `facts`
        holds the parameters' `shapes` without padding (`model.gpt.parameter_shapes`).

        A save that fails, at once or in the background, is counted (`poll`). Older checkpoints are deleted once a newer
        one is complete. Raise TrainingAborted if the run's folder was deleted, if a parameter is not finite, or after
        ten failures in a row.
        """
        if not all_finite(state.params):
            raise TrainingAborted("the parameters are not finite, so they are not saved; try a lower learning rate")
        facts = {"step": step, **facts, "time": time.time(), "versions": versions()}
        facts["checksums"] = checksums(arrays_of(state), facts["shapes"])
        facts["sha256"] = digest(facts)
        self.wait()
        self.overdue = False
        if step in self.steps:
            return
        target = self.folder / str(step)

        def begin() -> tuple[str, str, list[int]]:
            return *self._make_empty(unfinished(target), facts), self._old([*self.steps, step])

        lost, failure, old = on_first_process(begin)
        if lost:
            raise TrainingAborted(lost)
        if failure:
            self._failed(failure)
        else:
            self.pending = Saving(self.run, target, items_of(state), facts, old)
        self._give_up_after(MOST_FAILED)

    def _make_empty(self, partial: epath.Path, facts: dict) -> tuple[str, str]:
        """Make the folder that a checkpoint is written to. Return how the run lost its folder, and how this save
        failed (`system.files.described`): empty texts if all is well. On the first process."""
        try:
            if lost := self._how_lost(facts):
                return lost, ""
            if is_there(partial):
                partial.rmtree()
            (partial / FACTS).parent.mkdir(parents=True)
            if in_bucket(partial):
                mark_unfinished(partial)
        except Exception as error:
            return "", described(error)
        return "", ""

    def _how_lost(self, facts: dict) -> str:
        """Return why the run's folder is not this process's any more; empty if it is. Raise OSError if the disk does
        not answer."""
        # Only a run in progress has its config in the facts.
        if "config" in facts and not is_there(self.run.config_json):
            return f"{self.run}/config.json was deleted while the run wrote to its folder"
        if holder := self.run.other_writer():
            return f"{self.run} is being written to by another process, too ({holder})"
        return ""

    def poll(self) -> None:
        """Count the save in progress, if it ended, and note whether it must be repeated (`overdue`). Raise
        TrainingAborted after ten failures in a row."""
        if self.pending and not max_over_processes(self.pending.is_alive()):
            self.wait()
        self.overdue = bool(self.failures and not self.pending)
        self._give_up_after(MOST_FAILED)

    def wait(self) -> None:
        """Wait for the end of the save in progress, and count it if it failed."""
        if not self.pending:
            return
        saved, self.pending = self.pending, None
        saved.join()
        if saved.failure:
            self._failed(saved.failure)
            return
        if self.failures:
            on_first_process(self._try_to_clear)
        self.failures.clear()
        step = saved.facts["step"]
        self.steps = [*(other for other in self.steps if other not in saved.old), step]
        if jax.process_index() == 0:
            with suppress(OSError):  # the run's own disk is full; the checkpoint is complete all the same
                self.run.events.add("saved", step)

    def save_last(self, step: int, state: TrainState, facts: dict) -> None:
        """Save the state, unless it is saved, and wait for the end. After a failure, try again after a pause. Raise
        TrainingAborted after ten, if the reason does not pass by itself, else StorageLost after RETRY_SECONDS. Raise
        TrainingAborted, too, if the run has lost its folder."""
        if lost := on_first_process(partial(with_retries, str(self.folder), partial(self._how_lost, facts))):
            raise TrainingAborted(lost)

        def attempt() -> list[Failure]:
            self.wait()
            if step not in self.steps:
                self.save(step, state, facts)
                self.wait()
            return self.failures

        def again(failures: list[Failure]) -> bool:
            return bool(failures) and (len(failures) < MOST_FAILED or failures[-1].may_pass)

        pause = wait_random_exponential(multiplier=0.5, max=files.LONGEST_PAUSE)
        Retrying(retry=retry_if_result(again), wait=pause)(attempt)
        self._give_up_after(1)

    def _give_up_after(self, most: int) -> None:
        if len(self.failures) >= most and not self.failures[-1].may_pass:
            raise TrainingAborted(f"{len(self.failures)} save(s) in a row failed: {self.failures[-1].message}")

    def _failed(self, failure: str) -> None:
        """Count a failed save, `failure` by `system.files.described`, and remove what it left, to free the disk:
        training continues. Raise StorageLost if the disk or the store has not answered for RETRY_SECONDS, nor to
        FEWEST_ATTEMPTS."""
        failed = Failure(failure[2:], failure[0] == "1", time.monotonic())
        self.failures.append(failed)
        LOGGER.warning(f"{len(self.failures)} save(s) in a row failed: {failed.message}; trying again")
        on_first_process(self._try_to_clear)
        if not failed.may_pass or len(self.failures) < files.FEWEST_ATTEMPTS:
            return
        if max_over_processes(time.monotonic() - self.failures[0].time > files.RETRY_SECONDS):
            raise StorageLost(f"saving in {self.folder}: {failed.message}")

    def _try_to_clear(self) -> None:
        with suppress(Exception):  # the disk does not answer; the next successful save repeats this
            if not self.run.other_writer():  # whose save may be under way
                clear(self.run)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the last save is written, except after an error that other processes may not have. An error of
        this wait does not replace the one before it."""
        if kind is None:
            self._finish()
        elif kind is TrainingAborted or jax.process_count() == 1:
            try:
                self._finish()
            except Exception as error:
                LOGGER.warning(f"the last save was not finished: {first_line(error)}")
        if kind is TrainingAborted:
            LOGGER.error(f"the newest checkpoint is of step {self.newest}" if self.steps else "no checkpoint was saved")

    def _finish(self) -> None:
        """Wait until the last save is written. Complete the deletions of an earlier start that was killed."""
        self.wait()
        old = on_first_process(lambda: self._old(self.steps))
        self.steps = [step for step in self.steps if step not in old]
        if jax.process_index() == 0:
            with suppress(Exception):  # the disk does not answer; the next start repeats this
                if not self.run.other_writer():  # who may keep others
                    delete(self.folder, old)

    def _old(self, steps: list[int]) -> list[int]:
        """Return those of `steps` to delete: all but the newest, every n-th, and the best by score."""
        every = self.config.keep_every
        keep = {*steps[-self.config.keep :], *(step for step in steps if every and step % every == 0)}
        # NaN is not a score: it would be the best.
        scored = [step for step in steps if math.isfinite(self.scores.get(step, math.nan))]
        if scored:
            keep.add(min(reversed(scored), key=self.scores.__getitem__))
        return [step for step in steps if step not in keep]

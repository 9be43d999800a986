"""Saving the state with Orbax, asynchronously and sharded.

Orbax's CheckpointManager has barriers inside a save: after a write that failed on one process, no later save completes
(bench/LOG.md). So this module uses Orbax's handlers, which have none. The processes agree through JAX's service.

This module deletes old checkpoints itself. Orbax would delete in place: a kill would leave a part of a checkpoint under
a checkpoint's name. A failed deletion (a bucket may forbid it) would fail the save before it.
"""

import asyncio
import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath
from tenacity import Retrying, retry_if_result, wait_random_exponential

from configs import retry
from configs.files import in_bucket
from configs.messages import LOGGER
from configs.retry import StorageLost, described, first_line, permission_hint, with_retries
from configs.schema import CheckpointConfig, UserError
from hosts.distributed import Damaged, NoCheckpoint, exchange, max_over_processes, on_first_process
from hosts.runtime import TrainingAborted, versions
from run.checkpoint import (
    COMMITTED,
    FACTS,
    UNFINISHED,
    Checkpoints,
    all_finite,
    arrays_of,
    checkpoint_folder,
    checksums,
    digest,
    is_there,
    items_of,
    outside_event_loop,
)
from run.record import Events, local_path, other_writer, upload
from training.state import TrainState

HALF_DONE = ".orbax-checkpoint-tmp"  # suffix of a folder that is being written
DELETED = ".deleted"  # suffix of a folder that is being deleted
MOST_FAILED = 10  # consecutive failed saves that end the run


class Failure(NamedTuple):
    """A failed save."""

    message: str
    may_pass: bool
    """True if the reason may pass by itself."""
    time: float


class Saver(Checkpoints):
    """The checkpoints of a run that continues: it saves them, and deletes old ones."""

    def __init__(self, run_dir: str | Path, config: CheckpointConfig):
        """Open the run's folder of checkpoints, and clear it of what a kill left."""
        self.config, self.run_dir = config, run_dir
        self.folder = checkpoint_folder(run_dir)
        try:
            on_first_process(lambda: with_retries(str(self.folder), self._clear))
        except (UserError, StorageLost):
            raise
        except Exception as error:  # from the disk or the store
            raise UserError(
                f"checkpoints cannot be kept in {run_dir}: {first_line(error)}{permission_hint(error)}"
            ) from error
        super().__init__(run_dir)
        self.pending: Saving | None = None
        """The save in progress."""
        self.failures: list[Failure] = []
        """Consecutive failed saves; the same on every process."""
        self.overdue = False
        """True if the last save failed; the same on every process."""
        self.scores: Mapping[int, float] = {}
        """Bits per byte of each evaluated step, on the first process: the best checkpoint is kept."""

    def save(self, step: int, state: TrainState, facts: dict) -> None:
        """Copy the state off the devices, and write it while training continues. `step` is `int(state.step)`; `facts`
        holds the parameters' `shapes` without padding (`model.gpt.parameter_shapes`).

        A save that fails, at once or in the background, is counted (`poll`). Older checkpoints are deleted once a newer
        one is complete. Raise TrainingAborted if the run's folder was deleted, if a parameter is not finite, or after
        ten failures in a row.
        """
        if facts.get("run_id") and not on_first_process((local_path(self.run_dir) / "config.json").exists):
            raise TrainingAborted(f"{self.run_dir}/config.json was deleted while the run wrote to its folder")
        if holder := on_first_process(lambda: other_writer(self.run_dir)):
            raise TrainingAborted(f"{self.run_dir} is being written to by another process, too ({holder})")
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

        def begin() -> None:
            partial = unfinished(target)
            if partial.exists():
                partial.rmtree()
            (partial / FACTS).parent.mkdir(parents=True)
            if self._in_bucket:
                (partial / UNFINISHED).write_text("")

        if failure := on_first_process(lambda: _failure(begin)):
            self._failed(failure)
        else:
            old = on_first_process(lambda: self._old([*self.steps, step]))
            self.pending = Saving(self.run_dir, target, items_of(state), facts, old)
        self._give_up_after(MOST_FAILED)

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
                Events(self.run_dir).add("saved", step)

    def save_last(self, step: int, state: TrainState, facts: dict) -> None:
        """Save the state, unless it is saved, and wait for the end. After a failure, try again after a pause: raise
        TrainingAborted after ten."""

        def attempt() -> list[Failure]:
            self.wait()
            if step not in self.steps:
                self.save(step, state, facts)
                self.wait()
            return self.failures

        def again(failures: list[Failure]) -> bool:
            return bool(failures) and (len(failures) < MOST_FAILED or failures[-1].may_pass)

        pause = wait_random_exponential(multiplier=0.5, max=retry.LONGEST)
        Retrying(retry=retry_if_result(again), wait=pause)(attempt)
        self._give_up_after(1)

    def _give_up_after(self, most: int) -> None:
        if len(self.failures) >= most and not self.failures[-1].may_pass:
            raise TrainingAborted(f"{len(self.failures)} save(s) in a row failed: {self.failures[-1].message}")

    def _failed(self, failure: str) -> None:
        """Count a failed save, and remove what it left, to free the disk: training continues. Raise StorageLost if the
        disk or the store has not answered for `configs.retry.SECONDS`."""
        failed = Failure(failure[2:], failure[0] == "1", time.monotonic())
        self.failures.append(failed)
        LOGGER.warning(f"{len(self.failures)} save(s) in a row failed: {failed.message}; trying again")
        on_first_process(self._try_to_clear)
        if failed.may_pass and max_over_processes(time.monotonic() - self.failures[0].time > retry.SECONDS):
            raise StorageLost(f"saving in {self.folder}: {failed.message}")

    def _try_to_clear(self) -> None:
        with suppress(Exception):  # the disk does not answer; the next successful save repeats this
            self._clear()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until the last save is written, except after an error that other processes may not have. Complete the
        deletions of an earlier start that was killed."""
        if kind in (None, TrainingAborted) or jax.process_count() == 1:
            self.wait()
            old = on_first_process(lambda: self._old(self.steps))
            self.steps = [step for step in self.steps if step not in old]
            if jax.process_index() == 0:
                delete(self.folder, old)
        if kind is TrainingAborted:
            LOGGER.error(f"the newest checkpoint is of step {self.newest}" if self.steps else "no checkpoint was saved")

    def _clear(self) -> None:
        """Delete what a kill or a failure left half written or half deleted. Move aside an incomplete folder with a
        checkpoint's name. Raise UserError for a checkpoint that others copied into a bucket. On the first process."""
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
        for path in self.folder.iterdir() if self.folder.exists() else ():  # a bucket has no empty folders
            is_unfinished = self._in_bucket and path.name.isdigit() and not (path / COMMITTED).exists()
            if is_unfinished and not (path / UNFINISHED).exists() and is_there(path / FACTS):
                raise UserError(
                    f"{path} has no {COMMITTED}, so it was not saved there. If it was copied from a disk completely, "
                    f"make it valid by `echo | gcloud storage cp - {path}/{COMMITTED}`; otherwise delete it"
                )
            if is_unfinished or path.name.endswith((HALF_DONE, DELETED)):
                path.rmtree()
            elif path.name.isdigit() and not self._in_bucket and not is_there(path / FACTS):
                self._move_aside(path)
                LOGGER.warning(f"checkpoint {path.name} cannot be read (it is incomplete); it is in bad-checkpoints")

    def restore_newest(self, abstract: TrainState, run_id: str = "") -> tuple[TrainState, dict] | None:
        """Return the newest state that can be read, or None without any checkpoint. Report damaged ones, and move them
        to bad-checkpoints/. Raise NoCheckpoint if all are damaged, StorageLost if a disk or store does not answer,
        which does not mean damage, and UserError if it is of another run than `run_id`."""
        bad = []
        for step in reversed(self.steps):
            try:
                restored = self.restore(step, abstract, run_id)
            except Damaged as error:
                bad.append(step)
                LOGGER.warning(f"checkpoint {step} cannot be read ({first_line(error)}); trying the one before it")
                continue
            if bad:
                self.steps = [step for step in self.steps if step not in bad]
                on_first_process(lambda: [self._move_aside(self.folder / str(step)) for step in bad])
            return restored
        if bad:
            raise NoCheckpoint(f"none of the checkpoints in {self.folder} can be read; nothing was changed")
        return None

    def set_aside_after(self, step: int) -> None:
        """Move the checkpoints newer than `step`'s to newer-checkpoints/."""
        newer = [other for other in self.steps if other > step]
        self.steps = [other for other in self.steps if other <= step]

        def move() -> None:
            for other in newer:
                self._move_aside(self.folder / str(other), "newer-checkpoints")

        on_first_process(lambda: with_retries(str(self.folder), move))
        if newer:
            LOGGER.info(f"checkpoints {', '.join(map(str, newer))} are in {self.folder.parent / 'newer-checkpoints'}")

    def _old(self, steps: list[int]) -> list[int]:
        """Return those of `steps` to delete: all but the newest, every n-th, and the best by bits per byte."""
        every = self.config.keep_every
        kept = {*steps[-self.config.keep :], *(step for step in steps if every and step % every == 0)}
        # NaN is not a score: it would be the best.
        scored = [step for step in steps if math.isfinite(self.scores.get(step, math.nan))]
        if scored:
            kept.add(min(reversed(scored), key=self.scores.__getitem__))
        return [step for step in steps if step not in kept]

    def _move_aside(self, path: epath.Path, name: str = "bad-checkpoints") -> None:
        """Move a checkpoint to the folder `name` of the run, on the first process. By default it is unreadable. The
        folder is next to `checkpoints` itself, not next to a link to it: a rename does not cross disks."""
        own = self.folder if self._in_bucket else epath.Path(Path(self.folder).resolve())
        target = own.parent / name
        target.mkdir(exist_ok=True)
        if self._in_bucket:
            (path / COMMITTED).unlink(missing_ok=True)
            (target / "README").write_text("Checkpoints that are not used.")  # a bucket has no empty folders
        path.rename(target / f"{path.name}-{int(time.time())}")

    @property
    def _in_bucket(self) -> bool:
        return in_bucket(self.folder)


def delete(folder: epath.Path, steps: Sequence[int]) -> None:
    """Delete the checkpoints of these steps. They are renamed before they are deleted, so no partial checkpoint has a
    checkpoint's name. One that cannot be deleted stays, and does not block the next ones."""
    for path in [folder / str(step) for step in steps]:
        try:
            if in_bucket(folder):
                (path / UNFINISHED).write_text("")
                (path / COMMITTED).unlink(missing_ok=True)
                path.rmtree()
            else:
                path.rename(folder / f"{path.name}{DELETED}").rmtree()
        except Exception as error:
            LOGGER.warning(f"checkpoint {path.name} could not be deleted: {first_line(error)}")


def unfinished(folder: epath.Path) -> epath.Path:
    """Return the folder that a checkpoint is written to: in a bucket, which cannot rename, its final one."""
    return folder if in_bucket(folder) else folder.with_name(folder.name + HALF_DONE)


def sync(folder: Path) -> None:
    """Write all files below a folder, and their names, to the disk: a rename alone would outlive a power cut without
    them."""
    for parent, _, files in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in files):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class Saving(threading.Thread):
    """Writes a checkpoint in the background: each process its parts, then the first process completes it, and deletes
    old ones: a slow store delays no step."""

    def __init__(self, run_dir: str | Path, folder: epath.Path, items: dict[str, Any], facts: dict, old: Sequence[int]):
        """Copy the arrays off the devices. The folder `unfinished` must be empty. `old`: the steps to delete."""
        super().__init__(name=f"saving {folder.name}")
        self.run_dir, self.folder, self.facts, self.old = run_dir, folder, facts, old
        # Without metadata of arrays: the other processes would wait until the first has made their folder.
        arrays = (jax.Array, ocp.type_handlers.ArrayHandler(array_metadata_store=None))
        registry = ocp.type_handlers.create_type_handler_registry(arrays)
        self.handlers = {name: ocp.PyTreeCheckpointHandler(type_handler_registry=registry) for name in items}
        self.parts: list[Any] = []
        self.failure = "0 it was not finished"
        """Why it failed (`configs.retry.described`), the same on every process; empty once the checkpoint is
        complete."""

        async def begin() -> None:
            for name, handler in self.handlers.items():
                save = ocp.args.PyTreeSave(items[name])  # pyright: ignore[reportCallIssue]
                self.parts += await handler.async_save(unfinished(folder) / name, args=save) or []

        def run() -> None:
            # Not asyncio.run, which counts the tasks of all threads while Orbax's add theirs.
            with closing(asyncio.new_event_loop()) as loop:
                loop.run_until_complete(begin())

        self.failed = _failure(lambda: outside_event_loop(run))
        self.start()

    def run(self) -> None:
        for part in self.parts:  # all of them, so that nothing is written after a failure
            self.failed = _failure(part.result) or self.failed
        self.parts.clear()  # they keep the arrays' copies
        failures = exchange("parts of a checkpoint", self.failed, channel="saving")
        failed = next((f"{failure} (process {i})" for i, failure in enumerate(failures) if failure), "")
        if not failed and jax.process_index() == 0:
            failed = _failure(lambda: upload(self.run_dir)) or _failure(self._complete)
        self.failure = exchange("the end of a checkpoint", failed, channel="saving")[0]
        if not self.failure and jax.process_index() == 0:
            delete(self.folder.parent, self.old)

    def _complete(self) -> None:
        target = unfinished(self.folder)
        for name, handler in self.handlers.items():
            handler.finalize(target / name)
        (target / FACTS).write_text(json.dumps(self.facts))
        if target == self.folder:
            (target / COMMITTED).write_text("")
            (target / UNFINISHED).unlink(missing_ok=True)
        else:
            sync(Path(target))
            target.rename(self.folder)
            sync_folder(Path(target.parent))


def _failure(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return described(error)
    return ""

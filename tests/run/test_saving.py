"""Test when a run saves, what follows a save that fails, and what is on the disk after a crash."""

import asyncio
import os
import time
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

from options.schema import CheckpointConfig
from run import saver
from run.checkpoint import Checkpoints
from run.checkpoint_files import explaining
from run.folder import RunFolder
from run.lock import RunLock
from run.saver import Saver
from system.errors import StorageLost, TrainingAborted
from system.files import RETRY_SECONDS
from tests.run.checkpoints import FACTS, KEEP_ALL, assert_equal, names, opened, saved, state_on


class FakeSaving:
    """A save that ends at once, and fails for the steps in `failing`."""

    failing: ClassVar[set[int]] = set()
    may_pass = False

    def __init__(self, run_dir, folder, items, facts, old):
        self.facts, self.old = facts, old
        self.failure = f"{int(self.may_pass)} the disk is full" if facts["step"] in self.failing else ""

    def is_alive(self) -> bool:
        return False

    def join(self) -> None:
        pass


@pytest.fixture
def pauses(monkeypatch):
    """Let saves be fake ones. Return the pauses between attempts."""
    monkeypatch.setattr(saver, "MOST_FAILED", 3)
    monkeypatch.setattr(saver, "Saving", FakeSaving)
    monkeypatch.setattr(FakeSaving, "failing", set())
    monkeypatch.setattr(FakeSaving, "may_pass", False)
    pauses = []
    monkeypatch.setattr("tenacity.nap.time.sleep", pauses.append)
    return pauses


def train(checkpoints: Saver) -> None:
    """Save as a run of 40 steps does that logs each fifth step, and saves each tenth."""
    for step in range(1, 41):
        if step % 5 == 0:
            checkpoints.poll()
        if step % checkpoints.config.every_steps == 0 or checkpoints.overdue:
            checkpoints.save(step, state_on(1)[0], FACTS)
    checkpoints.save_last(40, state_on(1)[0], FACTS)


@pytest.mark.parametrize(
    ("failing", "steps", "failures", "aborted", "waits"),
    [
        ([], [10, 20, 30, 40], [], False, 0),
        ([10, 15], [20, 30, 40], [1, 2], False, 0),  # tried again at the next logged step
        ([40], [10, 20, 30], [1, 2, 3], True, 1),  # at once, then after a pause
        (range(41), [], [1, 2, 3], True, 0),
    ],
)
def test_a_save_that_fails_is_tried_again_and_the_third_in_a_row_ends_the_run(
    tmp_path, monkeypatch, pauses, messages, failing, steps, failures, aborted, waits
):
    monkeypatch.setattr(FakeSaving, "failing", {*failing})
    checkpoints = opened(tmp_path, CheckpointConfig(every_steps=10, keep=9))
    if aborted:
        with pytest.raises(TrainingAborted, match=r"3 save\(s\) in a row failed: the disk is full"), checkpoints:
            train(checkpoints)
        assert (messages.pop() == "the newest checkpoint is of step 30") == bool(steps)
    else:
        train(checkpoints)
    assert checkpoints.steps == steps and len(pauses) == waits and all(pauses)
    assert [int(text.split(" save(s) in a row failed: the disk is full")[0]) for text in messages] == failures


def test_a_disk_that_fails_for_a_while_does_not_end_the_run(tmp_path, monkeypatch, pauses):
    monkeypatch.setattr(FakeSaving, "failing", {*range(41)})
    monkeypatch.setattr(FakeSaving, "may_pass", True)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: FakeSaving.failing.clear())
    checkpoints = opened(tmp_path, CheckpointConfig(every_steps=10))
    train(checkpoints)
    assert checkpoints.steps == [40]


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), TrainingAborted("ten steps were skipped")])
def test_a_last_save_that_fails_does_not_replace_the_error_that_ends_the_run(tmp_path, monkeypatch, pauses, error):
    monkeypatch.setattr(FakeSaving, "failing", {40})
    monkeypatch.setattr(FakeSaving, "may_pass", True)
    monkeypatch.setattr("system.files.RETRY_SECONDS", -1)  # over at the first failure
    monkeypatch.setattr("system.files.FEWEST_ATTEMPTS", 1)
    with pytest.raises(type(error), match=str(error)), opened(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(40, state_on(1)[0], FACTS)
        raise error
    with pytest.raises(StorageLost), opened(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(40, state_on(1)[0], FACTS)


def test_a_store_that_takes_long_to_fail_gets_three_attempts(tmp_path, monkeypatch, pauses):
    """A save's own retries may take longer than a run's patience."""
    now = [0.0]
    monkeypatch.setattr("run.saver.time", Mock(wraps=time, monotonic=lambda: now[0]))
    monkeypatch.setattr(FakeSaving, "join", lambda self: now.append(now.pop() + 2 * RETRY_SECONDS))
    monkeypatch.setattr(FakeSaving, "may_pass", True)
    monkeypatch.setattr(FakeSaving, "failing", {1, 2})
    checkpoints = opened(tmp_path, KEEP_ALL)
    for step in (1, 2, 3):
        checkpoints.save(step, state_on(1)[0], FACTS)
    checkpoints.wait()
    assert checkpoints.steps == [3] and not checkpoints.failures
    FakeSaving.failing |= {4, 5, 6}
    with pytest.raises(StorageLost, match="the disk is full"):
        for step in (4, 5, 6, 7):
            checkpoints.save(step, state_on(1)[0], FACTS)
    assert len(checkpoints.failures) == 3


def test_a_run_whose_lock_another_machine_took_gives_way_before_it_saves(tmp_path, pauses):
    """Some disks let every machine have the lock."""
    with RunLock(RunFolder(tmp_path)):
        checkpoints = opened(tmp_path, CheckpointConfig())
        checkpoints.save(10, state_on(1)[0], FACTS)
        (tmp_path / "lock").write_text("process 7 on gpu-3, since then\n")
        with pytest.raises(TrainingAborted, match=r"written to by another process, too \(process 7 on gpu-3, since"):
            checkpoints.save(20, state_on(1)[0], FACTS)
    assert checkpoints.steps == [10]


@pytest.mark.parametrize("name", ["config.json", "lock", "20.orbax-checkpoint-tmp"])
def test_a_disk_that_does_not_answer_during_a_save_costs_only_that_save(tmp_path, pauses, unanswered, name):
    facts = FACTS | {"config": {}}
    with RunLock(RunFolder(tmp_path)):
        checkpoints = opened(tmp_path, KEEP_ALL)
        (tmp_path / "config.json").touch()
        checkpoints.save(10, state_on(1)[0], facts)
        unanswered.add(name)
        checkpoints.save(20, state_on(1)[0], facts)
        assert [failure.may_pass for failure in checkpoints.failures] == [True] and checkpoints.steps == [10]
        unanswered.clear()
        checkpoints.save(30, state_on(1)[0], facts)
        checkpoints.wait()
    assert checkpoints.steps == [10, 30] and not checkpoints.failures


def test_a_run_whose_folder_is_deleted_meanwhile_ends(tmp_path):
    with pytest.raises(TrainingAborted, match=r"config\.json was deleted while the run wrote to its folder"):
        opened(tmp_path, KEEP_ALL).save(10, state_on(1)[0], FACTS | {"config": {}})


def test_everything_is_on_the_disk_before_a_checkpoint_gets_its_name_and_the_old_one_goes_after(tmp_path, monkeypatch):
    calls: list[str] = []
    fsync, path_of = os.fsync, lambda number: os.readlink(f"/proc/self/fd/{number}")
    monkeypatch.setattr(os, "fsync", lambda number: (calls.append(path_of(number)), fsync(number)))
    saved(tmp_path, (1, 2), CheckpointConfig(keep=1))
    half_done, checkpoints = "2.orbax-checkpoint-tmp", f"{tmp_path}/checkpoints"
    written = {str(path).replace("/2/", f"/{half_done}/") for path in Path(checkpoints, "2").rglob("*")}
    calls.remove(f"{tmp_path}/events.jsonl")  # of the first save
    *_, before, after, event = calls
    assert written <= {*calls} and half_done in before and after == checkpoints and event == f"{tmp_path}/events.jsonl"
    assert names(tmp_path) == ["2"]


def test_a_failure_that_follows_from_a_full_disk_does_not_hide_it():
    missing, full = "0 NOT_FOUND: Error opening driver", "0 the disk is full (No space left on device)"
    assert explaining(["", missing, full, ""]) == full and explaining(["", missing]) == missing
    assert explaining(["", ""]) == explaining([]) == ""


def test_in_a_notebook_s_event_loop_a_run_saves_and_restores(tmp_path):
    async def cell():
        state = saved(tmp_path)[3]
        restored, _ = Checkpoints(RunFolder(tmp_path)).restore(3, state_on(1)[1])
        assert_equal(restored, state._replace(step=restored.step))

    asyncio.run(cell())


def test_parameters_that_are_not_finite_are_refused(tmp_path):
    checkpoints, state = opened(tmp_path, KEEP_ALL), state_on(1)[0]
    wrong = jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)
    with pytest.raises(TrainingAborted, match="not finite"):
        checkpoints.save(3, state._replace(params=wrong), FACTS)

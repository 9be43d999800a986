"""Test that a run neither loses its checkpoints nor takes another run's, whatever the machine does."""

import asyncio
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from configs.schema import CheckpointConfig
from hosts.runtime import TrainingAborted
from run.checkpoint import Checkpoints
from run.saver import Saver
from tests.run.test_checkpoint import FACTS, KEEP_ALL, assert_equal, names, saved, state_on
from tests.test_train import folder, run, untouched  # noqa: F401


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


def test_in_a_notebook_s_event_loop_a_run_saves_and_restores(tmp_path):
    async def cell():
        state = saved(tmp_path)[3]
        restored, _ = Checkpoints(tmp_path).restore(3, state_on(1)[1])
        assert_equal(restored, state._replace(step=restored.step))

    asyncio.run(cell())


def test_parameters_that_are_not_finite_are_refused(tmp_path):
    checkpoints, state = Saver(tmp_path, KEEP_ALL), state_on(1)[0]
    wrong = jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)
    with pytest.raises(TrainingAborted, match="not finite"):
        checkpoints.save(3, state._replace(params=wrong), FACTS)


def test_a_damaged_checkpoint_on_another_disk_is_set_aside_there(tmp_path):
    disk = tmp_path / "disk" / "checkpoints"
    disk.mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(disk)
    saved(tmp_path / "run", (1, 2))
    (disk / "2" / "facts" / "metadata").write_text("{}")
    _, facts = Saver(tmp_path / "run", KEEP_ALL).restore_newest(state_on(1)[1])
    assert facts["step"] == 1 and len(list((tmp_path / "disk" / "bad-checkpoints").iterdir())) == 1

"""Test the run and its checkpoints if one of several processes cannot read or write."""

import pytest

from tests.hosts.processes import finish, start

SCRIPT = """
import errno, sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
import jax, numpy as np
import orbax.checkpoint as ocp
import system.files
from options.schema import CheckpointConfig
from hosts.runtime import run_command, start_jax
from run.recovery import restore_newest
from tests.run.checkpoints import opened
from training.state import TrainState

def main():
    system.files.RETRY_SECONDS = 2
    start_jax()
    mesh = jax.make_mesh((jax.device_count(),), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))
    whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    scalar = lambda n: jax.make_array_from_callback((), whole, lambda _: np.int32(n))
    array = lambda n: jax.make_array_from_callback((8, 4), sharding, lambda at: np.full((8, 4), n, np.float32)[at])
    state = lambda n: TrainState(scalar(n), {"w": array(n)}, {"m": array(-n)}, scalar(0))
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state(0))

    def save(checkpoints, step):
        checkpoints.save(step, state(step), {"shapes": {"w": [8, 4]}})
        checkpoints.wait()
        return len(checkpoints.failures)

    errors, away = [], OSError(errno.EIO, "Input/output error")
    restore, begin = ocp.PyTreeCheckpointHandler.restore, ocp.PyTreeCheckpointHandler.async_save

    def faulty(self, *args, **kwargs):
        if errors:
            raise errors.pop()
        return restore(self, *args, **kwargs)

    async def cannot_begin(*args, **kwargs):
        raise away

    async def cannot_write(*args, **kwargs):
        return [*await begin(*args, **kwargs), SimpleNamespace(result=Mock(side_effect=away))]

    ocp.PyTreeCheckpointHandler.restore = faulty
    for act, reason, number in (
        ("sound", None, 0),
        ("once", away, 1),
        ("damage", ValueError("DATA_LOSS: Error reading"), 1),
        ("always", ValueError("UNAVAILABLE: Error reading"), 1000),
    ):
        checkpoints = opened(f"{sys.argv[1]}/{act}", CheckpointConfig(keep=9))
        assert not save(checkpoints, 1) and not save(checkpoints, 2)
        errors += [reason] * number * jax.process_index()
        try:
            restored, facts = restore_newest(checkpoints, abstract)
        except system.files.StorageLost as error:
            print(f"{act}: StorageLost: {error}", flush=True)
            errors.clear()
            continue
        assert all((shard.data == facts["step"]).all() for shard in restored.params["w"].addressable_shards)
        print(f"{act}: restored {facts['step']}", flush=True)
    checkpoints = opened(f"{sys.argv[1]}/saves", CheckpointConfig(keep=9))
    for step, process, function in ((1, 0, cannot_begin), (2, 1, cannot_write)):
        if jax.process_index() == process:
            ocp.PyTreeCheckpointHandler.async_save = function
        assert save(checkpoints, step) == 1
        print(f"not saved: {checkpoints.failures[-1].message}", flush=True)
        ocp.PyTreeCheckpointHandler.async_save = begin
        assert not save(checkpoints, step + 2)
    checkpoints.wait()
    errors.append(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    restore_newest(checkpoints, abstract)  # ends the run
    return 0

run_command(main)
"""


@pytest.mark.medium
def test_an_error_of_one_host_is_retried_and_discards_no_sound_checkpoint(tmp_path):
    """Nobody waits for a process that cannot save, although Orbax's barriers wait twenty minutes."""
    outputs = finish(start(*[["-c", SCRIPT, tmp_path]] * 2), 1)
    for text in outputs:
        for says in (
            "sound: restored 2",
            "once: restored 2",
            "damage: restored 1",
            "always: StorageLost: process 1: checkpoint 2: UNAVAILABLE: Error reading",
            "not saved: [Errno 5] Input/output error (process 0)",
            "not saved: [Errno 5] Input/output error (process 1)",
            "Out of memory",
        ):
            assert says in text, text
    names = lambda act: sorted(path.name for path in (tmp_path / act / "checkpoints").iterdir())
    assert [names(act) for act in ("sound", "once", "always", "damage")] == [["1", "2"]] * 3 + [["1"]]
    assert names("saves") == ["3", "4"] and len(list(tmp_path.glob("*/bad-checkpoints/*"))) == 1

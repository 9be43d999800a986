"""Test the run and its checkpoints if one of several processes cannot read or write."""

import pytest

from tests.hosts.processes import finish, start

SCRIPT = """
import errno, sys
from types import SimpleNamespace
from unittest.mock import Mock
import jax, numpy as np
import orbax.checkpoint as ocp
import configs.retry
from configs.schema import CheckpointConfig
from run.checkpoint import Checkpoints
from hosts.runtime import run_command, start_jax
from training.state import TrainState

def main():
    folder, act = sys.argv[1].split(" ", 1)
    configs.retry.SECONDS = 2
    start_jax()
    mesh = jax.make_mesh((jax.device_count(),), "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", None))
    whole = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    scalar = lambda n: jax.make_array_from_callback((), whole, lambda _: np.int32(n))
    array = lambda n: jax.make_array_from_callback((8, 4), sharding, lambda at: np.full((8, 4), n, np.float32)[at])
    state = lambda n: TrainState(scalar(n), {"w": array(n)}, {"m": array(-n)}, scalar(0))
    checkpoints = Checkpoints(folder, CheckpointConfig(keep=9))
    for step in (1, 2):
        checkpoints.save(step, state(step), {"shapes": {"w": [8, 4]}})
    assert checkpoints.failing() == 0, checkpoints.failure
    errors = {
        "once": [OSError(errno.EIO, "Input/output error")],
        "always": [ValueError("UNAVAILABLE: Error reading")] * 1000,
        "damage": [ValueError("DATA_LOSS: Error reading")],
        "memory": [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")],
    }.get(act, [])
    restore = ocp.PyTreeCheckpointHandler.restore
    def faulty(self, *args, **kwargs):
        if errors:
            raise errors.pop()
        return restore(self, *args, **kwargs)
    ocp.PyTreeCheckpointHandler.restore = faulty
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state(0))
    restored, facts = checkpoints.restore_newest(abstract)
    assert all((shard.data == facts["step"]).all() for shard in restored.params["w"].addressable_shards)
    print("restored", facts["step"], flush=True)
    begin, away = ocp.PyTreeCheckpointHandler.async_save, OSError(errno.EIO, "Input/output error")
    async def faulty_begin(*args, **kwargs):
        if act == "cannot begin":
            raise away
        parts = await begin(*args, **kwargs)
        return [*parts, SimpleNamespace(result=Mock(side_effect=away))] if act == "cannot write" else parts
    ocp.PyTreeCheckpointHandler.async_save = faulty_begin
    checkpoints.save(3, state(3), {"shapes": {"w": [8, 4]}})
    if checkpoints.failing():
        print("not saved:", checkpoints.failure, flush=True)
        ocp.PyTreeCheckpointHandler.async_save = begin
        checkpoints.save(4, state(4), {"shapes": {"w": [8, 4]}})
    assert checkpoints.failing() == 0, checkpoints.failure
    checkpoints.close()
    return 0

run_command(main)
"""


def checkpoints_in(folder) -> tuple[list[str], int]:
    """Return the names of complete checkpoints, and the number set aside."""
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return names, len(list(folder.glob("bad-checkpoints/*")))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("act", "code", "says", "left"),
    [
        ("once", 0, "restored 2", (["1", "2", "3"], 0)),
        ("always", 42, "process 1: checkpoint 2: UNAVAILABLE: Error reading; start all again", (["1", "2"], 0)),
        ("damage", 0, "restored 1", (["1", "3"], 1)),
        ("memory", 1, "Out of memory", (["1", "2"], 0)),
        ("cannot begin", 0, "not saved: [Errno 5] Input/output error (process 0)", (["1", "2", "4"], 0)),
        ("cannot write", 0, "not saved: [Errno 5] Input/output error (process 1)", (["1", "2", "4"], 0)),
    ],
)
def test_an_error_of_one_host_is_retried_and_discards_no_sound_checkpoint(tmp_path, act, code, says, left):
    """Nobody waits for a process that cannot save, although Orbax's barriers wait twenty minutes."""
    acts = [f"{tmp_path} sound", f"{tmp_path} {act}"]
    acts = reversed(acts) if act == "cannot begin" else acts
    outputs = finish(start(*(["-c", SCRIPT, each] for each in acts)), code)
    assert all(says in text for text in outputs), "\n---\n".join(outputs)
    assert checkpoints_in(tmp_path) == left

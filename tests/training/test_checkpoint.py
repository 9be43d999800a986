"""What is saved comes back to the bit, whole or in part, on the same mesh or another."""

import jax
import numpy as np
import pytest

from configs.schema import UserError
from tests.training.test_state import state_on
from training.checkpoint import Checkpoints


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def changed(state):
    """A state whose every leaf differs from a fresh one's."""
    return jax.tree.map(lambda leaf: leaf + 3, state)


@pytest.mark.parametrize(("saved_on", "restored_on"), [(1, 1), (8, 8), (8, 1), (1, 8)])
def test_round_trip(tmp_path, saved_on, restored_on):
    state = changed(state_on(saved_on)[0])
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state, {"seconds": 1.5, "dataset": "abc"})
    checkpoints.close()
    _, abstract, _ = state_on(restored_on)
    found, facts = Checkpoints(tmp_path).restore(3, abstract)
    assert_equal(found, state)
    assert facts == {"step": 3, "seconds": 1.5, "dataset": "abc"}
    jax.tree.map(lambda leaf, shape: np.testing.assert_equal(leaf.sharding, shape.sharding), found, abstract)
    params, step = Checkpoints(tmp_path).restore_params(abstract.params)
    assert step == 3
    assert_equal(params, state.params)


def test_what_is_saved_is_the_state_at_that_step_although_the_next_step_takes_its_memory(tmp_path):
    state = changed(state_on(8)[0])
    expected = jax.device_get(state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state, {})
    step = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf * 0, state), donate_argnums=0)
    for _ in range(3):
        state = step(state)
    checkpoints.close()
    assert_equal(Checkpoints(tmp_path).restore(3, state_on(8)[1])[0], expected)


def test_keeps_the_newest(tmp_path):
    state = state_on(1)[0]
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state, {})
    checkpoints.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
    assert Checkpoints(tmp_path).latest() == 3


def test_no_checkpoint(tmp_path):
    assert Checkpoints(tmp_path).latest() is None
    with pytest.raises(UserError, match="no checkpoint"):
        Checkpoints(tmp_path).restore_params(state_on(1)[1].params)

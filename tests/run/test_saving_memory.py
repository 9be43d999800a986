"""Test that a process may save as often as it likes: its memory does not grow."""

import gc
import os

import pytest

from options.schema import CheckpointConfig
from tests.run.checkpoints import FACTS, opened, state_on


def save(checkpoints, first: int, last: int) -> None:
    for step in range(first, last + 1):
        checkpoints.save(step, state_on(1)[0], FACTS)
        checkpoints.wait()


@pytest.mark.medium
def test_saves_leave_no_objects_behind(tmp_path):
    """TensorStore kept 48 lists of each save's metrics."""
    counts = []
    with opened(tmp_path, CheckpointConfig(keep=2)) as checkpoints:
        for first in (1, 11, 21):
            save(checkpoints, first, first + 9)
            gc.collect()
            counts.append(len(gc.get_objects()))
    assert counts[2] <= counts[1] + 9  # less than one a save


def resident_bytes() -> int:
    """Return the memory that this process has."""
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_memory_after_200_saves_is_that_after_100(tmp_path):
    with opened(tmp_path, CheckpointConfig(keep=2)) as checkpoints:
        save(checkpoints, 1, 100)
        gc.collect()
        before = resident_bytes()
        save(checkpoints, 101, 200)
    gc.collect()
    grown = resident_bytes() - before
    print(f"{grown / 100:,.0f} bytes a save")
    assert grown < 100 * 40_000  # it was 76,000 a save

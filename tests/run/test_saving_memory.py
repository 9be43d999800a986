"""Test that a process may save as often as it likes: its memory does not grow."""

import ctypes
import gc

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


class Mallinfo2(ctypes.Structure):
    """What glibc's mallinfo2 answers, in its order."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def bytes_in_use() -> int:
    """Return what malloc has given out and not got back. The memory of the process would also grow by holes between."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    heap = mallinfo2()
    return heap.uordblks + heap.hblkhd


@pytest.mark.slow
def test_saves_leave_no_memory_behind(tmp_path):
    """What is kept of each save would grow in every fifty; what is kept once, in one."""
    grown = []
    with opened(tmp_path, CheckpointConfig(keep=2)) as checkpoints:
        for first in (1, 51, 101, 151):
            gc.collect()
            before = bytes_in_use()
            save(checkpoints, first, first + 49)
            gc.collect()
            grown.append((bytes_in_use() - before) / 50)
    print(f"bytes a save: {grown}")
    assert min(grown) < 10_000  # 300 to 6,000 were seen; a copy of the state is 479,264

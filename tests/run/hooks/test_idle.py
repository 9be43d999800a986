"""Test the measured time in which devices wait for data."""

import threading
from contextlib import closing
from types import SimpleNamespace

import numpy as np

from run.goodput import Times
from run.hooks.idle import Idle


def test_data_that_arrive_while_devices_work_cost_no_time(monkeypatch):
    now, ended = [0.0], threading.Event()
    monkeypatch.setattr("run.goodput.time.monotonic", lambda: now[0])

    def batches():
        now[0] = 5.0
        yield "while they are busy"
        ended.set()
        assert idle.done.result() == 5.0
        now[0] = 9.0
        yield "they are done meanwhile"
        now[0] = 11.0
        yield "they were done before"

    times = Times()
    idle, given, waits = Idle(times), batches(), []
    run = SimpleNamespace(clock=SimpleNamespace(idle=0.0))
    idle.begin(run)  # pyright: ignore
    with closing(idle):
        idle.after_step(run, SimpleNamespace(block_until_ready=ended.wait), None)  # pyright: ignore
        for _ in range(3):
            idle.next_of(given, run)  # pyright: ignore
            waits.append(run.clock.idle)
    assert np.diff(waits, prepend=0.0).tolist() == [0.0, 4.0, 2.0]
    assert times.spent["data"] == 6.0

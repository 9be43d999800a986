"""Test the seconds of a run: of training, of waiting for data, and by activity."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from run.log import Clock
from run.record import Times, seconds_by_activity


def test_the_activities_of_a_process_sum_to_its_time_and_those_of_a_run_are_summed():
    began, times = time.monotonic(), Times()
    with times.during("compile"):
        time.sleep(0.02)
        with times.during("restore"):
            time.sleep(0.02)
    seconds = times.so_far()
    assert seconds["compile"] >= 0.02 and seconds["restore"] >= 0.02 and times.activity == "start"
    assert sum(seconds.values()) == pytest.approx(time.monotonic() - began, abs=0.01)
    killed = {"event": "start", "step": 0, "time": 1.0}
    stops = [{"event": "stop", "step": step, "seconds": {"steps": 2.0, "saves": 1.0}} for step in (5, 9)]
    assert seconds_by_activity([killed, *stops]) == dict.fromkeys(seconds, 0.0) | {"steps": 4.0, "saves": 2.0}


def test_clock_counts_training_alone_over_all_starts(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("run.log.time.perf_counter", lambda: now[0])
    clock = Clock(seconds=100.0, tokens=50)
    now[0] += 4
    assert clock.seconds == 104
    assert clock.rates(58).tokens_per_second == 8 / 4
    with clock.paused():
        now[0] += 1000
    now[0] += 1
    assert clock.seconds == 105
    assert clock.rates(60).tokens_per_second == 2 / 1
    clock.close()


def test_data_that_arrive_while_devices_work_cost_no_time(monkeypatch):
    now, ended = [0.0], threading.Event()
    monkeypatch.setattr("run.log.time.monotonic", lambda: now[0])

    def batches():
        now[0] = 5.0
        yield "while they are busy"
        ended.set()
        assert clock.devices_done and clock.devices_done.result() == 5.0
        now[0] = 9.0
        yield "they are done meanwhile"
        now[0] = 11.0
        yield "they were done before"

    clock, given, waits = Clock(0.0, 0), batches(), []
    clock.dispatched(SimpleNamespace(block_until_ready=ended.wait))
    for _ in range(3):
        clock.next_batch(given)
        waits.append(clock.stalled)
    clock.close()
    assert np.diff(waits, prepend=0.0).tolist() == [0.0, 4.0, 2.0]

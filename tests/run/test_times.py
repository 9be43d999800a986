"""Test the seconds of a run by activity."""

import time

import pytest

from run.times import Times, seconds_by_activity


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

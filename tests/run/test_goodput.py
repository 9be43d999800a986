"""Test the accounting of time: parts that sum to the wall time, and repeated steps."""

import time

import pytest

from configs.schema import UserError
from run.goodput import OF_A_PROCESS, Times, goodput, summed_up
from run.record import Events
from tools.goodput import main


def event(kind: str, step: int, began: float, **seconds: float) -> dict:
    return {"event": kind, "step": step, "began": began, "seconds": dict.fromkeys(OF_A_PROCESS, 0.0) | seconds}


def nonzero(spent: dict) -> dict:
    return {part: seconds for part, seconds in spent.items() if seconds}


def test_one_process():
    events = [event("start", 0, 1000.0, start=5, compilation=3), event("saved", 10, 1000.0, start=5, compilation=3)]
    events.append(event("stop", 20, 1000.0, start=5, compilation=3, steps=20, data=1, evaluation=2, saving=4))
    events[-1]["code"] = 0
    expected = {"start": 5, "compilation": 3, "steps": 20, "data": 1, "evaluation": 2, "saving": 4}
    assert nonzero(goodput(events)) == expected
    assert summed_up(goodput(events)).startswith("goodput: 57.1% of 35 s were steps; start 14.3%, saving 11.4%")


def test_a_kill_loses_the_steps_after_the_checkpoint_and_the_time_until_the_next_start():
    events = [
        event("start", 0, 1000.0, start=10),
        event("running", 10, 1000.0, start=10, steps=20),
        {"event": "saved", "step": 15, "time": 1033.0},  # no seconds given
        event("running", 20, 1000.0, start=10, steps=40),  # killed here, 1050
        event("start", 15, 1100.0, start=7, restore=1),
        event("stop", 30, 1100.0, start=7, restore=1, steps=30) | {"code": 0},
    ]
    spent = goodput(events)
    assert nonzero(spent) == {"start": 17, "restore": 1, "steps": 30 + 30, "lost": 10, "down": 50}
    assert sum(spent.values()) == 1138 - 1000


def test_time_after_a_complete_end_is_not_lost():
    stop = event("stop", 20, 1000.0, start=5, steps=20)
    later = [event("start", 20, 9000.0, start=5), event("stop", 40, 9000.0, start=5, steps=20) | {"code": 0}]
    assert nonzero(goodput([stop | {"code": 0}, *later])) == {"start": 10, "steps": 40}
    assert goodput([stop | {"code": 143}, *later])["down"] == 8000 - 25


def test_going_back_loses_steps_once_and_so_does_a_second_start_from_the_same_checkpoint():
    events = [
        event("start", 0, 0.0),
        event("running", 30, 0.0, steps=30),
        event("start", 20, 0.0, steps=30),  # the same process
        event("running", 25, 0.0, steps=35),
        event("start", 20, 40.0),
        event("stop", 21, 40.0, steps=1) | {"code": 0},
    ]
    assert nonzero(goodput(events)) == {"steps": 21, "lost": 15, "down": 5}


def test_the_parts_of_a_process_sum_to_the_time_since_it_began():
    times = Times()
    with times.during("compilation"):
        time.sleep(0.02)
        with times.during("data"):
            time.sleep(0.02)
    note = times.note()
    assert note["seconds"]["compilation"] >= 0.02 and note["seconds"]["data"] >= 0.02 and times.part == "start"
    assert note["began"] + sum(note["seconds"].values()) == pytest.approx(time.time(), abs=0.5)
    assert note["seconds"]["start"] > 0  # and the time before this file was imported


def test_the_command_prints_a_table_and_refuses_other_folders(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tools.goodput", str(tmp_path)])
    with pytest.raises(UserError, match="holds no run"):
        main()
    (tmp_path / "config.json").write_text("{}")
    Events(tmp_path).add("start", 0, began=0.0, seconds={"start": 3.0, "steps": 1.0})
    main()
    table = capsys.readouterr().out
    assert "start                 3.0 s    75.0%" in table and "wall time             4.0 s" in table

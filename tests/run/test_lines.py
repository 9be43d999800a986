"""Test that events.jsonl keeps what is appended, and what it says of rollbacks and saved steps."""

import pytest

from configs.ramp import Ramp
from configs.schema import UserError
from run.lines import Events, batch_of, rollbacks_to, saved_up_to, starts_in_vain


def test_events_are_read_in_order_and_a_half_line_is_cut_off(tmp_path):
    events = Events(tmp_path)
    assert events.read() == []
    events.add("start", 0)
    events.add("saved", 10)
    with events.path.open("ab") as file:
        file.write(b'{"event": "sav\xff')
    size = events.path.stat().st_size
    assert [(event["event"], event["step"]) for event in events.read()] == [("start", 0), ("saved", 10)]
    assert events.path.stat().st_size == size  # reading changes nothing, since the run may be writing that line
    events.add("stop", 12, code=130)
    assert [event["event"] for event in events.read()] == ["start", "saved", "stop"]


def test_a_damaged_line_is_refused_since_it_may_hold_the_data_s_position(tmp_path):
    events = Events(tmp_path)
    events.add("start", 0)
    with events.path.open("ab") as file:
        file.write(b"\x00\x00\n")
    events.add("saved", 10)
    with pytest.raises(UserError, match=r"events\.jsonl: line 2 is damaged"):
        events.read()


def event(name, step, **facts):
    return {"event": name, "step": step, **facts}


def test_the_newest_step_that_was_saved():
    assert saved_up_to([event("start", 0)]) == 0
    assert saved_up_to([event("start", 0), event("saved", 20), event("start", 10)]) == 20
    assert saved_up_to([event("start", 30), event("stop", 45)]) == 30  # killed before the event "saved 30"


def test_rollbacks_count_since_the_checkpoint_was_last_saved():
    first, second = event("rollback", 20, position=1), event("rollback", 20, position=2)
    assert rollbacks_to([event("saved", 20), first, second], 20) == [first, second]
    assert rollbacks_to([event("saved", 20), first, event("saved", 10), event("saved", 20), second], 20) == [second]
    assert rollbacks_to([event("saved", 20), first], 10) == []


def test_the_batch_after_a_rollback_and_after_another_size_of_a_step():
    of_100 = Ramp.read("", 100)
    assert batch_of([], 7, of_100) == batch_of([event("start", 0)], 7, of_100) == (700, 100)
    events = [
        event("start", 0, position=0, tokens_per_step=100),
        event("start", 10, position=1500, tokens_per_step=100),  # skips five batches
        event("start", 20, position=2500, tokens_per_step=200),
        event("start", 15, position=9000, tokens_per_step=200),  # back to an earlier position
    ]
    expected = {9: (900, 100), 10: (1500, 100), 14: (1900, 100), 15: (9000, 200), 20: (10_000, 200)}
    assert {step: batch_of(events, step, of_100) for step in expected} == expected


def test_the_batch_of_a_ramp_that_was_changed_and_rolled_back():
    events = [
        event("start", 0, position=0, tokens_per_step=1, ramp="0:100,300:200"),
        event("start", 5, position=1700, tokens_per_step=1, ramp="0:100,300:200"),  # skips 1000 tokens
        event("start", 6, position=1900, tokens_per_step=200),  # now a constant batch
    ]
    expected = {2: (200, 100), 3: (300, 200), 4: (500, 200), 5: (1700, 200), 6: (1900, 200), 8: (2300, 200)}
    assert {step: batch_of(events, step, Ramp.read("", 7)) for step in expected} == expected


def test_starts_in_vain_are_counted_since_a_checkpoint_a_stop_or_giving_up():
    begun, lost = event("begun", 10), event("stop", 10, code=143)
    assert starts_in_vain([], 10) == 0
    before = event("begun", 5)
    assert starts_in_vain([before, event("saved", 10), begun, event("start", 10), begun, lost, begun], 10) == 3
    # The event of a save can be lost with the machine. Each start knows the newest checkpoint.
    assert starts_in_vain([before, before, begun], 10) == 1 and starts_in_vain([before, before], 10) == 0
    for end in (130, 1, 2, 0):
        assert starts_in_vain([begun, begun, event("stop", 10, code=end), begun], 10) == 1

"""Test a run's record: events.jsonl keeps what is appended, what it says of batches and saved steps, and the copy."""

import json
from pathlib import Path

import pytest

from configs.schema import UserError
from run.notify import tell_of_failure
from run.record import (
    CONTINUES,
    Events,
    Record,
    at_hand,
    batch_of,
    copy,
    place,
    saved_up_to,
    starts_in_vain,
)
from tests.helpers import tiny_config

RUN = "gs://bucket/runs/mine"


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


def test_the_batch_after_another_size_of_a_step_and_after_going_back():
    assert batch_of([], 7, 100) == batch_of([event("start", 0)], 7, 100) == (700, 100)
    events = [
        event("start", 0, tokens=0, tokens_per_step=100),
        event("start", 10, tokens=1000, tokens_per_step=150),
        event("start", 20, tokens=2500, tokens_per_step=200),
        event("start", 15, tokens=1750, tokens_per_step=300),  # back to an earlier step
    ]
    expected = {9: (900, 100), 10: (1000, 150), 14: (1600, 150), 15: (1750, 300), 20: (3250, 300)}
    assert {step: batch_of(events, step, 1) for step in expected} == expected


def test_starts_in_vain_are_counted_since_a_checkpoint_a_stop_or_giving_up():
    begun, lost = event("begun", 10), event("stop", 10, code=143)
    assert starts_in_vain([], 10) == 0
    before = event("begun", 5)
    assert starts_in_vain([before, event("saved", 10), begun, event("start", 10), begun, lost, begun], 10) == 3
    # The event of a save can be lost with the machine. Each start knows the newest checkpoint.
    assert starts_in_vain([before, before, begun], 10) == 1 and starts_in_vain([before, before], 10) == 0
    for end in (130, 1, 2, 0):
        assert starts_in_vain([begun, begun, event("stop", 10, code=end), begun], 10) == 1


@pytest.fixture(params=[RUN, "store"])
def elsewhere(request, gcs, tmp_path) -> str:
    """Return a place for copies: in a bucket, or on another disk."""
    return request.param if request.param == RUN else str(tmp_path / request.param)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    folder = tmp_path / "run"
    for name in (*CONTINUES, "tensorboard/events.1", "tensorboard/hparams/events.2", "profile/trace"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"of {name}")
    return folder


def contents(folder: str) -> dict[str, str]:
    """Return the files below a folder, with their content."""
    inside: dict[str, str] = {}
    for path in place(folder).iterdir():
        inner = {f"{path.name}/{name}": text for name, text in contents(str(path)).items()} if path.is_dir() else {}
        inside |= inner or {path.name: path.read_text()}
    return inside


def test_the_complete_record_is_copied_and_fetched(run_dir, elsewhere, tmp_path):
    Record(run_dir, elsewhere).copy()
    board = ("tensorboard/events.1", "tensorboard/hparams/events.2")
    assert contents(elsewhere) == {name: f"of {name}" for name in (*CONTINUES, *board)}
    Record(tmp_path / "fresh", elsewhere).fetch()
    assert contents(str(tmp_path / "fresh")) == {name: f"of {name}" for name in CONTINUES}


def test_changed_files_are_copied_again_and_removed_ones_deleted(run_dir, elsewhere, gcs):
    record = Record(run_dir, elsewhere)
    record.copy()
    (run_dir / "tensorboard/events.1").rename(run_dir / "tensorboard/events.3")
    (run_dir / "summary.json").unlink()  # left by a shorter run
    (run_dir / "metrics.jsonl").write_text("more lines")
    record.copy()
    asked = len(gcs.asked)
    record.copy()  # nothing has changed
    assert len(gcs.asked) - asked <= 2
    inside = contents(elsewhere)
    assert inside["metrics.jsonl"] == "more lines"
    assert inside.keys() == {*CONTINUES, "tensorboard/events.3", "tensorboard/hparams/events.2"} - {"summary.json"}
    Record(run_dir, elsewhere).copy()  # as another process, which knows of no copy
    assert contents(elsewhere) == inside


def test_events_are_copied_last_in_both_directions(run_dir, elsewhere, tmp_path, monkeypatch):
    """Events show a start if the copy is up to date: after a kill before them, the copy is made again."""
    order = []

    def noted(source, target):
        order.append(target.name)
        copy(source, target)

    monkeypatch.setattr("run.record.copy", noted)
    for begin in (Record(run_dir, elsewhere).copy, Record(tmp_path / "fresh", elsewhere).fetch):
        begin()
        assert order[-1] == "events.jsonl" and order.count("events.jsonl") == 1
        order.clear()


@pytest.mark.parametrize("process", [0, 3])
def test_the_traceback_and_the_last_events_are_kept(run_dir, elsewhere, monkeypatch, process):
    Record(run_dir, elsewhere).copy()
    (run_dir / "events.jsonl").write_text("a line more")
    monkeypatch.setattr("jax.process_index", lambda: process)
    with pytest.raises(ZeroDivisionError), tell_of_failure(tiny_config(), Record(run_dir, elsewhere)):
        raise ZeroDivisionError("division by zero")
    inside = contents(elsewhere)
    assert inside[f"traceback-{process}.txt"].endswith("ZeroDivisionError: division by zero\n")
    assert (inside["events.jsonl"] == "a line more") == (process == 0)


def test_a_user_error_and_a_failing_store_keep_the_error(run_dir, gcs):
    with pytest.raises(UserError, match="a mistake"), tell_of_failure(tiny_config(), Record(run_dir, RUN)):
        raise UserError("a mistake")
    assert not gcs.objects
    gcs.full = True
    with pytest.raises(ZeroDivisionError), tell_of_failure(tiny_config(), Record(run_dir, RUN)):
        raise ZeroDivisionError("division by zero")


def test_a_run_in_a_bucket_is_readable_with_its_newest_lines(run_dir, gcs):
    (run_dir / "config.json").write_text(
        json.dumps({"config": {"name": "mine", "checkpoint": {"folder": "gs://old/x"}}})
    )
    record = Record(run_dir, RUN)
    record.copy()
    gcs.put("runs/mine/checkpoints/10/params/large", b"0")
    folder = at_hand(RUN)
    assert folder.name == "mine" and {path.name for path in folder.iterdir()} >= {"tokenizer", "events.jsonl"}
    assert not (folder / "checkpoints").exists()
    assert json.loads((folder / "config.json").read_text())["config"]["checkpoint"]["folder"] == RUN
    (run_dir / "events.jsonl").write_text("a line more")
    record.copy()
    assert (at_hand(RUN) / "events.jsonl").read_text() == "a line more"
    assert at_hand("~/x") == Path("~/x").expanduser()


def test_a_missing_or_unreadable_run_is_reported(gcs):
    with pytest.raises(UserError, match="gs://bucket/runs/none holds no run"):
        at_hand("gs://bucket/runs/none")
    gcs.put("runs/mine/config.json", b"{}")
    gcs.forbidden = True
    with pytest.raises(UserError, match=f"{RUN} cannot be read: Forbidden"):
        at_hand(RUN)

"""Test a run's record: events.jsonl keeps what is appended, what it says of batches and saved steps, and a bucket."""

from dataclasses import replace

import jax
import pytest

from hosts.clock import Timeline
from run.ending import failure_recorded, notify_of_failure
from run.folder import RunFolder
from run.record import ACTIVITIES, place_of, saved_up_to
from system.errors import Exit, StartAgain, StorageLost, TrainingAborted, UserError
from tests.helpers import tiny_config

RUN = "gs://bucket/runs/mine"
CONFIG = replace(tiny_config(), run_dir=RUN)
FILES = ("config.json", "events.jsonl", "loss.png", "metrics.jsonl", "summary.json", "tokenizer/tokenizer.json")


def test_events_are_read_in_order_and_a_half_line_is_cut_off(tmp_path):
    events = RunFolder(tmp_path).events
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


@pytest.mark.parametrize("line", [b"\x00\x00", b'{"event": "sav{"event": "saved"}', b'{"event": "saved", "step": "x"}'])
def test_a_damaged_line_is_reported_and_skipped(tmp_path, capsys, line):
    events = RunFolder(tmp_path).events
    events.add("start", 0)
    with events.path.open("ab") as file:
        file.write(line + b"\n")
    events.add("saved", 10)
    for _ in range(2):
        assert [(event["event"], event["step"]) for event in events.read()] == [("start", 0), ("saved", 10)]
    assert capsys.readouterr().err == f"{events.path}: line 2 is damaged, and skipped\n"


def event(name, step, **facts):
    return {"event": name, "step": step, **facts}


def test_the_newest_step_that_was_saved():
    assert saved_up_to([event("start", 0)]) == 0
    assert saved_up_to([event("start", 0), event("saved", 20), event("start", 10)]) == 20
    assert saved_up_to([event("start", 30), event("stop", 45)]) == 30  # killed before the event "saved 30"


def test_the_batch_after_another_size_of_a_step_and_after_going_back():
    assert place_of([], 7, 100) == place_of([event("start", 0)], 7, 100) == (700, 100, None)
    events = [
        event("start", 0, tokens=0, tokens_per_step=100),
        event("start", 10, tokens=1000, tokens_per_step=150, mixture={"first_row": 0}),
        event("start", 20, tokens=2500, tokens_per_step=200),
        event("start", 15, tokens=1750, tokens_per_step=300),  # back to an earlier step
    ]
    expected = {9: (900, 100), 10: (1000, 150), 14: (1600, 150), 15: (1750, 300), 20: (3250, 300)}
    assert {step: place_of(events, step, 1)[:2] for step in expected} == expected
    mixtures = [place_of(events, step, 1).mixture for step in (9, 14, 15)]
    assert mixtures == [None, {"first_row": 0}, None]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TrainingAborted("ten in a row"), Exit.FAILED),
        (StorageLost("no answer"), Exit.PEER_LOST),
        (StartAgain("out of memory"), Exit.PEER_LOST),
        (RuntimeError("a defect"), Exit.FAILED),
        (UserError("a mistake"), "nothing"),
    ],
)
def test_a_start_that_fails_records_its_end_and_its_seconds(tmp_path, error, code):
    RunFolder(tmp_path).events.add("start", 0)
    RunFolder(tmp_path).events.add("saved", 20)
    with pytest.raises(type(error)), failure_recorded(RunFolder(tmp_path), Timeline()):
        raise error
    stops = [event for event in RunFolder(tmp_path).events.read() if event["event"] == "stop"]
    assert [(event["step"], event["code"]) for event in stops] == ([(20, code)] if code != "nothing" else [])
    assert all(event["error"].endswith(str(error)) and event["seconds"].keys() == {*ACTIVITIES} for event in stops)


@pytest.mark.parametrize(("processes", "code"), [(1, Exit.FAILED), (2, None)])
def test_a_start_records_no_code_that_depends_on_how_the_other_processes_end(tmp_path, processes, code, monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: processes)
    events = RunFolder(tmp_path).events
    events.add("start", 0)
    lost = jax.errors.JaxRuntimeError("INTERNAL: an operation of all devices failed")
    with pytest.raises(jax.errors.JaxRuntimeError), failure_recorded(RunFolder(tmp_path), Timeline()):
        raise lost
    assert events.read()[-1]["code"] == code


@pytest.fixture
def in_bucket() -> RunFolder:
    """Return a run in a bucket, with a record in this process's copy."""
    folder = RunFolder(RUN)
    for name in (*FILES, "tensorboard/events.1", "tensorboard/hparams/events.2", "config.json.partial"):
        (folder.local / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.local / name).write_text(f"of {name}")
    return folder


def contents(gcs) -> dict[str, str]:
    """Return the objects of the run, with their content."""
    return {name.removeprefix("runs/mine/"): content.decode() for name, (_, content) in gcs.objects.items()}


def test_changed_files_are_uploaded_again_and_removed_ones_deleted(in_bucket, gcs):
    in_bucket.upload()
    (in_bucket.local / "tensorboard/events.1").rename(in_bucket.local / "tensorboard/events.3")
    (in_bucket.local / "summary.json").unlink()  # left by a shorter run
    (in_bucket.local / "metrics.jsonl").write_text("more lines")
    in_bucket.upload()
    asked = len(gcs.asked)
    in_bucket.upload()  # nothing has changed
    assert not any(request.startswith(("POST", "PUT", "DELETE")) for request in gcs.asked[asked:])
    inside = contents(gcs)
    assert inside["metrics.jsonl"] == "more lines"
    assert inside.keys() == {*FILES, "tensorboard/events.3", "tensorboard/hparams/events.2"} - {"summary.json"}
    in_bucket.uploaded.clear()  # another process writes TensorBoard's file again, under another name
    (in_bucket.local / "tensorboard/events.3").rename(in_bucket.local / "tensorboard/events.4")
    in_bucket.upload()
    assert contents(gcs).keys() == inside.keys() - {"tensorboard/events.3"} | {"tensorboard/events.4"}


@pytest.mark.parametrize("process", [0, 3])
def test_the_traceback_and_the_last_events_are_kept(in_bucket, gcs, monkeypatch, process):
    in_bucket.upload()
    (in_bucket.local / "events.jsonl").write_text("a line more")
    monkeypatch.setattr("jax.process_index", lambda: process)
    with pytest.raises(ZeroDivisionError), notify_of_failure(CONFIG, in_bucket):
        raise ZeroDivisionError("division by zero")
    inside = contents(gcs)
    assert inside[f"traceback-{process}.txt"].endswith("ZeroDivisionError: division by zero\n")
    assert (inside["events.jsonl"] == "a line more") == (process == 0)


def test_a_missing_or_unreadable_run_is_reported(in_bucket, gcs):
    with pytest.raises(UserError, match="gs://bucket/runs/none holds no run"):
        RunFolder("gs://bucket/runs/none").fetched()
    gcs.put("runs/mine/config.json", b"{}")
    gcs.forbidden = True
    with pytest.raises(UserError, match=f"{RUN} cannot be read: Forbidden"):
        RunFolder(RUN).fetched()

"""Test checkpoints in a bucket (gs:// through Orbax, tensorstore and gcsfs) with a small server of its API."""

import json
import os
import re
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest
from gcsfs.retry import HttpError

from hosts.preflight import preflight
from options.schema import CheckpointConfig, MeshConfig
from run.checkpoint import Checkpoints
from run.checkpoint_files import Saving, delete
from run.folder import RunFolder
from run.lock import RunLock, take_over
from system.errors import StorageLost, TrainingAborted, UserError
from tests.fake_gcs import FakeGCS
from tests.helpers import tiny_config
from tests.run.checkpoints import (
    FACTS,
    KEEP_ALL,
    assert_equal,
    changed,
    close,
    opened,
    restored_newest,
    saved,
    state_on,
)
from training.mesh import make_mesh

RUN = "gs://bucket/runs/mine"


def under(gcs: FakeGCS, folder: str) -> set[str]:
    """Return the names of the folders in a folder."""
    prefix = f"runs/mine/{folder}/"
    return {name.removeprefix(prefix).split("/")[0] for name in gcs.objects if name.startswith(prefix)}


def test_checkpoints_that_are_half_written_or_half_deleted_are_ignored_and_deleted(gcs, monkeypatch, messages):
    state = saved(RUN, (1, 2))[1]
    with monkeypatch.context() as patch:
        patch.setattr(Saving, "_complete", Mock(side_effect=OSError))  # killed before the facts
        checkpoints = opened(RUN, KEEP_ALL)
        patch.setattr(checkpoints, "_try_to_clear", lambda: None)
        checkpoints.save(3, state, FACTS)
        checkpoints.wait()
        patch.setattr(type(checkpoints.folder), "rmtree", Mock(side_effect=OSError))  # killed after the facts
        delete(checkpoints.folder, [2])
    assert under(gcs, "checkpoints") == {"1", "2", "3"} and Checkpoints(RunFolder(RUN)).steps == [1]
    messages.clear()
    abstract = state_on(1)[1]
    restored, facts = restored_newest(RUN, abstract)
    assert under(gcs, "checkpoints") == {"1"} and facts["step"] == 1 and not messages
    assert not under(gcs, "bad-checkpoints") and not any(name.endswith("unfinished") for name in gcs.objects)
    assert_equal(restored, state._replace(step=1))
    assert_equal(Checkpoints(RunFolder(RUN)).restore_params(abstract.params)[0], state.params)


def test_a_checkpoint_whose_copy_is_under_way_is_set_aside_and_not_deleted(gcs, messages):
    saved(RUN, (1, 2))
    copied = {name: gcs.objects.pop(name) for name in sorted(gcs.objects) if "checkpoints/2/facts" in name}
    before = len(gcs.objects)
    assert copied and opened(RUN, KEEP_ALL).steps == [1]
    assert messages == ["checkpoint 2 cannot be read (it is incomplete); it is in bad-checkpoints"]
    assert under(gcs, "checkpoints") == {"1"} and len(gcs.objects) == before + 1  # a README


@pytest.mark.parametrize("folder", ["", "tokenizer/", "checkpoints/", "checkpoints/1/", "checkpoints/2/", "profile/"])
def test_a_folder_that_was_made_in_cloud_console_is_no_file(gcs, messages, folder):
    """Cloud Console makes an empty object for each folder, whose name ends in a slash."""
    saved(RUN, (1,))
    gcs.put("runs/mine/config.json", b"{}")
    gcs.put("runs/mine/tokenizer/tokenizer.json", b"of a tokenizer")
    gcs.put(f"runs/mine/{folder}", b"")
    local = RunFolder(RUN).fetched()
    assert (local / "config.json").read_bytes() == b"{}"
    assert [path.name for path in (local / "tokenizer").iterdir()] == ["tokenizer.json"]
    assert restored_newest(RUN, state_on(1)[1])[1]["step"] == 1
    assert len(messages) == (folder == "checkpoints/2/")  # an empty folder is an incomplete checkpoint


THEIRS = "process 7 on another, since then"


def test_a_run_that_another_start_takes_over_gives_way_and_changes_nothing_more(gcs):
    state, prefix, folder = state_on(1)[0], "runs/mine/", RunFolder(RUN)
    with pytest.raises(TrainingAborted, match=f"another process, too .{THEIRS}"), RunLock(folder):
        take_over(folder)
        (folder.local / "metrics.jsonl").write_text("ours")
        checkpoints = opened(folder, KEEP_ALL)
        checkpoints.save(1, state, FACTS)
        checkpoints.wait()
        checkpoints.save(2, state, FACTS)
        gcs.put(f"{prefix}lock", f"{THEIRS}\n".encode())  # before this save is complete
        gcs.put(f"{prefix}metrics.jsonl", b"theirs")
        gcs.put(f"{prefix}checkpoints/5/unfinished", b"")
        (folder.local / "metrics.jsonl").write_text("ours, and more")
        checkpoints.save(3, state, FACTS)
    assert checkpoints.steps[:1] == [1] and under(gcs, "checkpoints") >= {"1", "5"}
    assert "3" not in under(gcs, "checkpoints")
    assert gcs.objects[f"{prefix}lock"][1].decode() == f"{THEIRS}\n"
    with pytest.raises(UserError, match="another process, too"):
        folder.upload()
    assert gcs.objects[f"{prefix}metrics.jsonl"][1] == b"theirs"


def test_a_start_says_whom_it_replaces_and_a_refused_one_replaces_nobody(gcs, messages):
    folder = RunFolder(RUN)
    gcs.put("runs/mine/lock", f"{THEIRS}\n".encode())
    with pytest.raises(UserError, match="other options"), RunLock(folder):
        raise UserError("other options")
    assert gcs.objects["runs/mine/lock"][1].decode() == f"{THEIRS}\n" and not messages
    with RunLock(folder):
        take_over(folder)
        assert f"was being written to by {THEIRS}: if that process is alive" in messages[0]
        assert f"process {os.getpid()} on ".encode() in gcs.objects["runs/mine/lock"][1]
    assert "runs/mine/lock" not in gcs.objects and len(messages) == 1
    with RunLock(folder):
        take_over(folder)
        assert len(messages) == 1 and not folder.other_writer()
        del gcs.objects["runs/mine/lock"]  # by a process that took the run over, and has ended
        assert folder.other_writer() == "a process that has ended"


def test_a_damaged_checkpoint_is_set_aside(gcs, messages):
    state = saved(RUN, (1, 2))[1]
    arrays = [name for name in gcs.objects if name.startswith("runs/mine/checkpoints/2/rest/")]
    name = max(arrays, key=lambda name: len(gcs.objects[name][1]))
    generation, content = gcs.objects[name]
    middle = len(content) // 2
    gcs.objects[name] = (generation, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    restored, facts = restored_newest(RUN, state_on(1)[1])
    assert facts["step"] == 1 and "checkpoint 2 cannot be read" in messages[0]
    assert_equal(restored.params, state.params)
    assert under(gcs, "checkpoints") == {"1"}
    assert sorted(name[:2] for name in under(gcs, "bad-checkpoints")) == ["2-", "RE"]


def test_a_store_s_errors_cost_only_a_save(gcs):
    folder = RunFolder(RUN)
    folder.local.mkdir(parents=True, exist_ok=True)
    (folder.local / "metrics.jsonl").write_text("what was measured")
    checkpoints = opened(folder, CheckpointConfig(keep=1))
    state = changed(state_on(1)[0])
    checkpoints.save(1, state, FACTS)
    checkpoints.wait()
    assert gcs.objects["runs/mine/metrics.jsonl"][1] == b"what was measured"
    gcs.full = True
    checkpoints.save(2, state, FACTS)
    checkpoints.wait()
    assert len(checkpoints.failures) == 1 and re.match("Forbidden|PERMISSION_DENIED", checkpoints.failures[-1].message)
    gcs.full = False
    assert checkpoints.steps == [1]
    checkpoints.save(3, state, FACTS)
    close(checkpoints)
    assert opened(RUN, KEEP_ALL).steps == [3]
    assert under(gcs, "checkpoints") == {"3"}  # the failed save's files are deleted


@pytest.mark.parametrize("run_dir", [RUN, ""], ids=["bucket", "disk"])
def test_old_checkpoints_are_deleted_by_the_thread_that_saves(gcs, tmp_path, monkeypatch, run_dir):
    """A slow store must not stall the loop of any host."""
    checkpoints, threads = opened(run_dir or tmp_path, CheckpointConfig(keep=1)), []
    rmtree = type(checkpoints.folder).rmtree
    delete = lambda path: threads.append(threading.current_thread()) or rmtree(path)
    monkeypatch.setattr(type(checkpoints.folder), "rmtree", delete)
    for step in (1, 2, 3):
        checkpoints.save(step, state_on(1)[0], FACTS)
        checkpoints.wait()
    assert checkpoints.steps == [3] and len(threads) == 2
    assert threading.main_thread() not in threads


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("full", f"cannot write to {RUN}: Forbidden"),
        # tensorstore overwrites manifest.ocdbt: no save could succeed
        ("keeps", r"lacks storage\.objects\.delete: grant it roles/storage\.objectUser"),
    ],
)
def test_a_bucket_that_refuses_a_save_is_reported_before_the_first_step(gcs, fault, says):
    setattr(gcs, fault, True)
    with pytest.raises(UserError, match=says):
        preflight(replace(tiny_config(), run_dir=RUN), make_mesh(MeshConfig()), "tokenizer")


def test_a_missing_permission_is_named_with_its_role(gcs):
    message = "x@y.com does not have storage.buckets.get access to the Google Cloud Storage bucket."
    gcs.page = (403, json.dumps({"error": {"code": 403, "message": message}}).encode())
    with pytest.raises(UserError, match=r"lacks storage\.buckets\.get: grant it roles/storage\.legacyBucketReader"):
        opened(RUN, KEEP_ALL)


def test_a_store_that_answers_503_at_the_start_is_retried_and_then_lost(gcs, monkeypatch):
    saved(RUN, (1,))
    errors = [HttpError({"code": 503, "message": "try again"})]

    finished_steps = RunFolder.finished_steps

    def faulty(folder):
        if errors:
            raise errors.pop()
        return finished_steps(folder)

    monkeypatch.setattr(RunFolder, "finished_steps", faulty)
    assert Checkpoints(RunFolder(RUN)).steps == [1]
    errors += [HttpError({"code": 503, "message": "try again"})] * 9
    monkeypatch.setattr("system.files.RETRY_SECONDS", 0)
    with pytest.raises(StorageLost, match="try again"):
        Checkpoints(RunFolder(RUN))

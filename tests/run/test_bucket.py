"""Test checkpoints in a bucket (gs:// through Orbax, tensorstore and gcsfs) with a small server of its API."""

import json
import re
import threading
from dataclasses import replace

import pytest
from gcsfs.retry import HttpError

from configs.files import StorageLost
from configs.schema import CheckpointConfig, MeshConfig, UserError
from hosts.preflight import preflight
from run.checkpoint import Checkpoints, finished_steps
from run.record import local_path
from run.saver import Saver
from tests.fake_gcs import FakeGCS
from tests.helpers import tiny_config
from tests.run.test_checkpoint import FACTS, KEEP_ALL, assert_equal, changed, close, saved, state_on
from training.mesh import make_mesh

RUN = "gs://bucket/runs/mine"


def under(gcs: FakeGCS, folder: str) -> set[str]:
    """Return the names of the folders in a folder."""
    prefix = f"runs/mine/{folder}/"
    return {name.removeprefix(prefix).split("/")[0] for name in gcs.objects if name.startswith(prefix)}


def test_checkpoints_that_are_half_written_or_half_deleted_are_ignored_and_deleted(gcs):
    state = saved(RUN, (1, 2, 3))[1]
    lost = [name for name in gcs.objects if name.startswith(("runs/mine/checkpoints/2/", "runs/mine/checkpoints/3/"))]
    for name in lost:
        if name.endswith("facts/metadata") or ("/3/" in name and not name.endswith("manifest.ocdbt")):
            del gcs.objects[name]
    assert under(gcs, "checkpoints") == {"1", "2", "3"} and Checkpoints(RUN).steps == [1]
    abstract = state_on(1)[1]
    restored, facts = Saver(RUN, KEEP_ALL).restore_newest(abstract)
    assert under(gcs, "checkpoints") == {"1"} and facts["step"] == 1
    assert_equal(restored, state._replace(step=1))
    assert_equal(Checkpoints(RUN).restore_params(abstract.params)[0], state.params)


def test_a_damaged_checkpoint_is_set_aside(gcs, messages):
    state = saved(RUN, (1, 2))[1]
    arrays = [name for name in gcs.objects if name.startswith("runs/mine/checkpoints/2/rest/")]
    name = max(arrays, key=lambda name: len(gcs.objects[name][1]))
    generation, content = gcs.objects[name]
    middle = len(content) // 2
    gcs.objects[name] = (generation, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    restored, facts = Saver(RUN, KEEP_ALL).restore_newest(state_on(1)[1])
    assert facts["step"] == 1 and "checkpoint 2 cannot be read" in messages[0]
    assert_equal(restored.params, state.params)
    assert under(gcs, "checkpoints") == {"1"}
    assert sorted(name[:2] for name in under(gcs, "bad-checkpoints")) == ["2-", "RE"]


def test_a_store_s_errors_cost_only_a_save(gcs):
    local = local_path(RUN)
    local.mkdir(parents=True, exist_ok=True)
    (local / "metrics.jsonl").write_text("what was measured")
    checkpoints = Saver(RUN, CheckpointConfig(keep=1))
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
    assert Saver(RUN, KEEP_ALL).steps == [3]
    assert under(gcs, "checkpoints") == {"3"}  # the failed save's files are deleted


@pytest.mark.parametrize("run_dir", [RUN, ""], ids=["bucket", "disk"])
def test_old_checkpoints_are_deleted_by_the_thread_that_saves(gcs, tmp_path, monkeypatch, run_dir):
    """A slow store must not stall the loop of any host."""
    checkpoints, threads = Saver(run_dir or tmp_path, CheckpointConfig(keep=1)), []
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
        Saver(RUN, KEEP_ALL)


def test_a_store_that_answers_503_at_the_start_is_retried_and_then_lost(gcs, monkeypatch):
    saved(RUN, (1,))
    errors = [HttpError({"code": 503, "message": "try again"})]

    def faulty(folder):
        if errors:
            raise errors.pop()
        return finished_steps(folder)

    monkeypatch.setattr("run.checkpoint.finished_steps", faulty)
    assert Checkpoints(RUN).steps == [1]
    errors += [HttpError({"code": 503, "message": "try again"})] * 9
    monkeypatch.setattr("configs.files.RETRY_SECONDS", 0)
    with pytest.raises(StorageLost, match="try again"):
        Checkpoints(RUN)

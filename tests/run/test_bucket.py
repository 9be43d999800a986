"""Checkpoints in a bucket: gs:// through Orbax, tensorstore and gcsfs, against a small server that speaks its API."""

import json
import re
from dataclasses import replace

import fsspec.config
import pytest
from gcsfs.retry import HttpError

from configs.retry import StorageLost
from configs.schema import CheckpointConfig, MeshConfig, UserError
from hosts.preflight import preflight
from run.checkpoint import COMMITTED, Checkpoints, whole_steps
from run.record import Record
from tests.fake_gcs import FakeGCS
from tests.helpers import tiny_config
from tests.run.test_checkpoint import FACTS, KEEP_ALL, assert_equal, changed, saved
from tests.training.test_state import state_on
from training.mesh import make_mesh


@pytest.fixture
def bucket(gcs) -> FakeGCS:
    return gcs


RUN = "gs://bucket/runs/mine"


def under(bucket: FakeGCS, folder: str) -> set[str]:
    """Names of the folders in a folder."""
    prefix = f"runs/mine/{folder}/"
    return {name.removeprefix(prefix).split("/")[0] for name in bucket.objects if name.startswith(prefix)}


@pytest.mark.medium
@pytest.mark.parametrize(("saved_on", "restored_on"), [(8, 8), (8, 1)])
def test_round_trip(bucket, saved_on, restored_on):
    state = saved(RUN, devices=saved_on, seconds={3: 1.5})[3]
    _, abstract, _ = state_on(restored_on)
    found, facts = Checkpoints(RUN).restore(3, abstract)
    assert_equal(found, state._replace(step=3))
    assert (facts["step"], facts["seconds"]) == (3, 1.5)
    assert_equal(Checkpoints(RUN).restore_params(abstract.params)[0], state.params)


def test_the_users_own_settings_of_the_store_stay(bucket, monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "gcs", {"project": "mine"})
    Checkpoints(RUN, KEEP_ALL).close()
    assert fsspec.config.conf["gcs"] == {"project": "mine", "use_listings_cache": False}


def test_what_is_kept(bucket):
    saved(RUN, range(1, 8), CheckpointConfig(keep=2, keep_every=3), val_bpb={step: step % 4 for step in range(1, 8)})
    assert under(bucket, "checkpoints") == {"3", "4", "6", "7"}
    assert Checkpoints(RUN).steps == [3, 4, 6, 7]


@pytest.mark.parametrize("deleted_in_part", [False, True])
def test_one_half_written_or_half_deleted_is_none_and_is_cleared(bucket, deleted_in_part):
    state = saved(RUN, (1, 2))[1]
    lost = [name for name in sorted(bucket.objects) if name.startswith("runs/mine/checkpoints/2/")]
    assert f"runs/mine/checkpoints/2/{COMMITTED}" in lost
    for name in lost if deleted_in_part else [f"runs/mine/checkpoints/2/{COMMITTED}"]:
        if not name.endswith("manifest.ocdbt"):
            del bucket.objects[name]
    assert under(bucket, "checkpoints") == {"1", "2"} and Checkpoints(RUN).steps == [1]
    found, _ = Checkpoints(RUN, KEEP_ALL).restore_newest(state_on(1)[1], print)
    assert under(bucket, "checkpoints") == {"1"}
    assert_equal(found.params, state.params)


def test_a_damaged_one_is_put_aside(bucket):
    state = saved(RUN, (1, 2))[1]
    arrays = [name for name in bucket.objects if name.startswith("runs/mine/checkpoints/2/rest/")]
    name = max(arrays, key=lambda name: len(bucket.objects[name][1]))
    generation, content = bucket.objects[name]
    middle = len(content) // 2
    bucket.objects[name] = (generation, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    said = []
    found, facts = Checkpoints(RUN, KEEP_ALL).restore_newest(state_on(1)[1], said.append)
    assert facts["step"] == 1 and "checkpoint 2 cannot be read" in said[0]
    assert_equal(found.params, state.params)
    assert under(bucket, "checkpoints") == {"1"}
    assert sorted(name[:2] for name in under(bucket, "bad-checkpoints")) == ["2-", "RE"]


@pytest.mark.parametrize("record", [True, False])
def test_a_store_that_answers_errors_costs_a_save_and_no_more(bucket, tmp_path, record):
    (tmp_path / "metrics.jsonl").write_text("what was measured")
    checkpoints = Checkpoints(RUN, CheckpointConfig(keep=1), Record(tmp_path, RUN) if record else None)
    state = changed(state_on(1)[0])
    checkpoints.save(1, state, FACTS)
    assert checkpoints.failing() == 0
    bucket.full = True
    checkpoints.save(2, state, FACTS)
    assert checkpoints.failing() == 1 and re.match("Forbidden|PERMISSION_DENIED", checkpoints.failure)
    bucket.full = False
    assert checkpoints.steps == [1]
    checkpoints.save(3, state, FACTS)
    checkpoints.close()
    assert Checkpoints(RUN, KEEP_ALL).steps == [3]
    assert under(bucket, "checkpoints") == {"3"}  # what the one that failed was still writing is cleared
    assert not record or bucket.objects["runs/mine/metrics.jsonl"][1] == b"what was measured"


def test_a_bucket_that_cannot_be_written_is_said_before_the_first_step(bucket, tmp_path):
    bucket.full = True
    config = replace(tiny_config(), run_dir=str(tmp_path), checkpoint=CheckpointConfig(RUN))
    with pytest.raises(UserError, match=f"cannot write to {RUN}: Forbidden"):
        preflight(config, make_mesh(MeshConfig()), "data", "tokenizer")


def test_a_bucket_that_lets_nothing_be_overwritten_is_refused_before_the_first_step_with_the_role(bucket, tmp_path):
    """tensorstore overwrites manifest.ocdbt: nothing can be saved there."""
    bucket.keeps = True
    checkpoints = Checkpoints(RUN, CheckpointConfig())
    checkpoints.save(1, state_on(1)[0], FACTS)
    assert checkpoints.failing() == 1 and "manifest.ocdbt" in checkpoints.failure
    config = replace(tiny_config(), run_dir=str(tmp_path), checkpoint=CheckpointConfig(RUN))
    said = r"lacks storage\.objects\.delete: grant it roles/storage\.objectUser"
    with pytest.raises(UserError, match=said):
        preflight(config, make_mesh(MeshConfig()), "data", "tokenizer")


def test_a_permission_that_is_missing_is_named_with_its_role(bucket):
    message = "x@y.com does not have storage.buckets.get access to the Google Cloud Storage bucket."
    bucket.page = (403, json.dumps({"error": {"code": 403, "message": message}}).encode())
    with pytest.raises(UserError, match=r"lacks storage\.buckets\.get: grant it roles/storage\.legacyBucketReader"):
        Checkpoints(RUN, KEEP_ALL)


def test_a_store_that_answers_503_at_the_start_is_asked_again_and_then_lost(bucket, monkeypatch):
    saved(RUN, (1,))
    errors = [HttpError({"code": 503, "message": "try again"})]

    def faulty(folder):
        if errors:
            raise errors.pop()
        return whole_steps(folder)

    monkeypatch.setattr("run.checkpoint.whole_steps", faulty)
    assert Checkpoints(RUN).steps == [1]
    errors += [HttpError({"code": 503, "message": "try again"})] * 9
    monkeypatch.setattr("configs.retry.SECONDS", 0)
    with pytest.raises(StorageLost, match="try again"):
        Checkpoints(RUN)


def test_events_reach_the_bucket_between_saves(bucket, tmp_path):
    record = Record(tmp_path, RUN)
    for name in ("events.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_text("a line")
    record.copy_events()
    assert bucket.objects["runs/mine/events.jsonl"][1] == b"a line" and "runs/mine/metrics.jsonl" not in bucket.objects
    bucket.full = True
    record.copy_events()  # costs nothing

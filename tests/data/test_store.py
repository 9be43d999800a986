"""Test a dataset in a bucket, with a small, slow, failing server that speaks Google's API."""

import errno
import hashlib
import os
import re
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from huggingface_hub import HfFileSystem

import data.store as module
from configs.schema import DataConfig, MeshConfig, UserError
from data.dataset import Text, open_text
from data.loader import StepBatches, train_batches
from data.prepare.preparation import Preparation, prepare
from data.shards import BLOCK_BYTES
from data.store import OUTAGE, Store
from tests.data.preparations import write_files
from tests.data.prepare.test_remote import Hub, ask, serving
from tests.fake_gcs import FakeGCS
from training.mesh import batch_sharding, make_mesh

SIZE, LENGTH, ROWS = 270, 64, 24
URL = "gs://bucket/text"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Write a dataset of several shards of several blocks."""
    folder = tmp_path_factory.mktemp("made")
    words = np.random.default_rng(0).integers(0, 10**6, 60_000).astype(str)
    source = write_files(folder / "text", {f"{i}.txt": " ".join(part) for i, part in enumerate(np.split(words, 60))})
    settings = Preparation(source=source, vocab_size=SIZE, val_fraction=0.2, shard_tokens=120_000)
    prepare(settings, folder / "made")
    assert len(list((folder / "made").glob("train*.bin"))) >= 2
    return folder / "made"


@pytest.fixture(scope="module")
def expected(made, tmp_path_factory) -> str:
    """Return the digest of the disk's batches."""
    return digest(opened(made, tmp_path_factory.mktemp("cache")))


@pytest.fixture
def bucket(gcs, made):
    """Put the dataset into a bucket."""
    for path in sorted(made.rglob("*")):
        if path.is_file() and path.name != "lock":
            gcs.put(f"text/{path.relative_to(made)}", path.read_bytes())
    return gcs


def opened(source, cache: Path, **options) -> Text:
    return open_text(DataConfig(source=str(source), **options), SIZE, LENGTH, ROWS, cache)


def digest(text: Text, steps=3, local=range(ROWS)) -> str:
    steps_of = StepBatches(text.train, text.mixture, 0, (1, ROWS, LENGTH), np.array(local))
    batches = [steps_of[i] for i in range(steps)]
    parts = [batch[name].tobytes() for batch in batches for name in ("inputs", "targets", "weights")]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def reads_of_shards(bucket: FakeGCS) -> list[str]:
    return [asked for asked in bucket.asked if "alt=media" in asked and ".bin" in asked]


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_batches_equal_the_disk_s_and_a_start_reads_no_shard(bucket, made, tmp_path, packing):
    bucket.seconds, bucket.failing = 0.01, 0.02
    on_disk, remote = (opened(source, tmp_path / "cache", packing=packing) for source in (made, URL))
    assert remote.fingerprint == on_disk.fingerprint
    assert packing == "best_fit" or not reads_of_shards(bucket)  # best fit's plan asks for the first token
    half = range(ROWS // 2)
    assert digest(remote, 1, half) == digest(on_disk, 1, half)
    assert 0 < len(reads_of_shards(bucket)) < 2 * ROWS  # a document is in one or two blocks; failed reads are repeated
    assert digest(remote) == digest(on_disk)
    again = opened(URL, tmp_path / "cache", packing=packing)
    before = len(reads_of_shards(bucket))
    assert digest(again) == digest(on_disk) and len(reads_of_shards(bucket)) == before


def test_a_shard_that_changed_after_the_run_began_is_named(bucket, tmp_path):
    text = opened(URL, tmp_path / "cache")
    name = "text/train_000000.bin"
    bucket.put(name, bytes(len(bucket.objects[name][1])))
    steps = StepBatches(text.train, text.mixture, 0, (1, ROWS, LENGTH), np.arange(ROWS))
    batches = train_batches(steps, batch_sharding(make_mesh(MeshConfig())), 2)
    with pytest.raises(UserError, match=f"{URL}/train_000000.bin is damaged, or changed"):
        for _ in range(3):  # which a loop sees through its threads
            next(batches)
    for thread in threading.enumerate():  # readers of later batches, which another test would meet at its server
        if thread.name.startswith("grain-prefetch"):
            thread.join()
    bucket.put(name, b"short")
    with pytest.raises(UserError, match=rf"{URL}/train_000000\.bin"):
        digest(text)
    with pytest.raises(UserError, match=rf"{URL}/train_000000\.bin is damaged: 5 bytes"):
        opened(URL, tmp_path / "cache")
    del bucket.objects[name]
    with pytest.raises(UserError, match=rf"{URL}/train_000000\.bin is missing"):
        opened(URL, tmp_path / "cache")
    with pytest.raises(UserError, match=rf"{URL}/train_000000\.bin: cannot be read: FileNotFoundError"):
        digest(text)


def test_a_bucket_without_a_dataset_is_named(bucket, tmp_path):
    for url in ("gs://another/text", "gs://bucket/nothing", "nowhere://x/y", "memory://none"):
        with pytest.raises(UserError, match=rf"--data\.source={url}: (cannot be read|nothing is there)"):
            opened(url, tmp_path / "cache")
    bucket.put("raw/x.txt", b"text")
    with pytest.raises(UserError, match=r"python -m data\.prepare --source=gs://bucket/raw --out=DIR"):
        opened("gs://bucket/raw", tmp_path / "cache")
    bucket.forbidden = True
    with pytest.raises(UserError, match=rf"--data\.source={URL}: cannot be read: .*Forbidden.*you may not read this"):
        opened(URL, tmp_path / "cache")


def test_a_block_damaged_in_transfer_or_in_the_cache_is_read_again(bucket, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("data.dataset_folder.CACHE_GB", 0.01)
    text, ask, asked = opened(URL, tmp_path / "cache"), module.read_range, set()

    def damaged(filesystem, path, start, stop):
        content = ask(filesystem, path, start, stop)
        if (path, start) in asked:
            return content
        asked.add((path, start))
        return bytes(len(content)) if start % (2 * BLOCK_BYTES) else content[:-1]

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_range", damaged)
        assert digest(text) == expected and asked
    kept = tmp_path / "cache" / "blocks"
    content = bytearray(kept.read_bytes())
    content[::100] = bytes(len(content[::100]))
    kept.write_bytes(content)
    before = len(reads_of_shards(bucket))
    assert digest(opened(URL, tmp_path / "cache")) == expected and len(reads_of_shards(bucket)) > before


def test_the_cache_stays_under_its_limit_and_later_runs_share_it(bucket, expected, tmp_path, monkeypatch):
    most = 3 * BLOCK_BYTES
    monkeypatch.setattr("data.dataset_folder.CACHE_GB", most / 1e9)
    for _ in range(2):
        assert digest(opened(URL, tmp_path / "cache")) == expected
        assert 0 < (tmp_path / "cache" / "blocks").stat().st_size <= most


@pytest.mark.parametrize("call", ["pwrite", "pread"])
def test_a_full_or_failing_disk_disables_the_cache_and_is_reported_once(
    bucket, expected, tmp_path, monkeypatch, capfd, call
):
    monkeypatch.setattr(module.os, call, Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    assert digest(opened(URL, tmp_path / "cache")) == expected
    assert capfd.readouterr().err.count(f"{tmp_path}/cache/blocks cannot be ") == 1


def test_an_outage_costs_only_time(bucket, made, expected, tmp_path, monkeypatch, capfd):
    text, store, failed, seen = opened(URL, tmp_path / "cache"), Store(URL), OUTAGE.failed, []
    monkeypatch.setattr(module, "SECONDS", 1)  # gcsfs itself would try for half a minute
    monkeypatch.setattr(OUTAGE, "reported", -30.0)  # so that the first failure is reported

    def up_after_some_failures(*failure):
        failed(*failure)
        seen.append(OUTAGE.seconds)
        if len(seen) >= 3:
            bucket.down, bucket.page = False, None

    monkeypatch.setattr(OUTAGE, "failed", up_after_some_failures)
    bucket.down = True
    assert digest(text) == expected
    assert len(seen) >= 3 and OUTAGE.since is None
    log = capfd.readouterr().err
    assert re.search(rf"{URL}\S*: no answer for 0 s .*; trying again", log)
    assert "the store answers again" in log
    for page in (
        (200, b"<html>The network will be back soon.</html>"),
        (503, "<html>Der Server antwortet nicht; später!</html>".encode("latin-1")),
    ):
        bucket.page = page
        seen.clear()
        path = made / "train_000000.bin"
        assert store.read(path.name, 9, 2000) == path.read_bytes()[9:2000] and len(seen) == 3


def test_shards_of_other_programs_are_read_completely_once(bucket, made, expected, tmp_path):
    for name in list(bucket.objects):
        if not re.fullmatch(r"text/(train|val)_\d+\.bin", name):
            del bucket.objects[name]
    tokenizer = str(made / "tokenizer")
    first = opened(URL, tmp_path / "cache", tokenizer=tokenizer)
    assert len(reads_of_shards(bucket)) == len(list(made.glob("*.bin")))
    assert digest(first) == expected
    before = len(reads_of_shards(bucket))
    again = opened(URL, tmp_path / "cache", tokenizer=tokenizer)
    assert len(reads_of_shards(bucket)) == before and again.fingerprint == first.fingerprint
    changed = bytearray(bucket.objects["text/train_000000.bin"][1])
    changed[-2] ^= 1
    bucket.put("text/train_000000.bin", bytes(changed))
    assert opened(URL, tmp_path / "cache", tokenizer=tokenizer).fingerprint != first.fingerprint


def test_shards_on_the_hub_are_read_in_ranges(made, expected, tmp_path, monkeypatch):
    files = {f"mine/{path.relative_to(made)}": path.read_bytes() for path in made.rglob("*") if path.is_file()}
    tokens = type("Tokens", (Hub,), {"repositories": {"owner/tokens": files}, "asked": []})
    url = "hf://datasets/owner/tokens/mine"
    HfFileSystem.clear_instance_cache()
    with serving(tokens) as endpoint:
        ask(endpoint, monkeypatch)
        assert digest(opened(url, tmp_path / "cache")) == expected
        ranges = [asked for name, asked in tokens.asked if name.endswith(".bin")]
        bounds = [[int(bound) for bound in one.removeprefix("bytes=").split("-")] for one in ranges]
        assert bounds and all(last - first < 3 * BLOCK_BYTES for first, last in bounds)
        with pytest.raises(UserError, match=rf"--data\.source={url}/else: (cannot be read|nothing is there)"):
            opened(f"{url}/else", tmp_path / "cache")
        with pytest.raises(UserError, match=r"owner/nobody: cannot be read: FileNotFoundError"):
            opened("hf://datasets/owner/nobody", tmp_path / "cache")

"""Test text at a URL whose server fails now and then."""

import gzip
import json

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from configs.retry import StorageLost
from data.prepare.listing import find_corpus

TEXTS = [f"text {i} " * 50_000 for i in range(5)]


@pytest.fixture
def bucket(monkeypatch):
    """Return files in memory. Every third read fails once `failures` is not empty."""
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    monkeypatch.setattr("data.prepare.corpus.BUFFER_BYTES", 2**16)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    files = fsspec.filesystem("memory")
    files.pipe({"/texts/a.jsonl": lines, "/texts/b.jsonl.gz": gzip.compress(lines, 0)})
    failures, reads, read = [], [], MemoryFile.read

    def failing(file, size=-1):
        reads.append(size)
        if failures and len(reads) % 3 == 0:
            raise failures[0]
        return read(file, size)

    monkeypatch.setattr(MemoryFile, "read", failing)
    yield failures
    files.rm("/texts", recursive=True)


def texts() -> list[str]:
    corpus = find_corpus("memory://texts")
    return [document.text for file in corpus.files for document in corpus.documents(file)]


def test_a_failed_read_is_retried_without_losing_or_repeating_bytes(bucket):
    bucket.append(ConnectionResetError("reset"))
    assert texts() == 2 * TEXTS


def test_a_span_is_read_from_its_start(bucket):
    bucket.append(TimeoutError())
    corpus = find_corpus("memory://texts")
    file, middle = corpus.files[0], 900_000
    parts = [*corpus.read(file, 0, middle), *corpus.read(file, middle, None)]
    assert [text for _, text, _ in parts] == TEXTS


def test_an_unreachable_server_is_no_user_error(bucket, monkeypatch):
    monkeypatch.setattr("configs.retry.SECONDS", 0)
    monkeypatch.setattr(MemoryFile, "read", lambda *_: (_ for _ in ()).throw(ConnectionResetError("reset")))
    with pytest.raises(StorageLost, match=r"memory://.*reset"):
        texts()

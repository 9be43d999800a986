"""Test that many workers write what one writes, also if they or the command are killed."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import data.prepare.parts
from data.prepare.listing import find_corpus
from data.prepare.preparation import Preparation, prepare
from data.prepare.selection import train_tokenizer
from system.errors import UserError
from tests.data.preparations import ROOT, digests, facts_of, tokens_of

WORDS = ["alpha", "naïve", "日本語", "12345", "it's", "\n", "  ", "foo_bar();", "\t", "the"]


def text(generator: random.Random, words: int) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(words))


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Preparation:
    """Write files of every kind, some in several tasks, with skipped documents and one duplicate."""
    folder, generator = tmp_path_factory.mktemp("source"), random.Random(0)
    (folder / "text").mkdir()
    for i in range(12):
        (folder / "text" / f"{i}.txt").write_text(text(generator, 9 * i + 3))
    lines = [json.dumps({"text": text(generator, generator.randint(1, 150))}) for _ in range(200)]
    lines[7], lines[25], lines[45], lines[120], lines[150], lines[160] = "junk", "junk", "junk", "", lines[3], "{}"
    (folder / "text" / "t.jsonl").write_text("\n".join(lines))
    rows = pa.table({"text": [text(generator, generator.randint(0, 90)) for _ in range(200)]})
    pq.write_table(rows, folder / "text" / "t.parquet", row_group_size=30)
    train_tokenizer([text(generator, 5000)], 300).save(folder / "tokenizer")
    given = {"tokenizer": str(folder / "tokenizer"), "on_error": "skip", "val_fraction": 0.1, "shard_tokens": 9000}
    return Preparation(source=str(folder / "text"), **given)


@pytest.fixture(scope="module", autouse=True)
def many_tasks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.prepare.parts, "TASK_BYTES", (9_000, 9_000))
        yield


@pytest.fixture(scope="module")
def serial(source, many_tasks, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("serial") / "out"
    prepare(source, out, workers=1)
    return out


KILLED = """
import os, signal, sys
from pathlib import Path
import data.prepare.parts as module
from data.prepare.preparation import Preparation, prepare

write, calls = module.write_dataset_json, iter(range(99))
module.write_dataset_json = lambda *given: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == 3 else write(*given)
module.TASK_BYTES = 9_000, 9_000
prepare(Preparation(**eval(sys.argv[1])), Path(sys.argv[2]), workers=2)
"""


@pytest.mark.medium
def test_a_kill_of_the_command_changes_nothing(source, serial, tmp_path):
    """Kill it when the fourth task's shards are in the folder and not yet in the record, while its workers encode."""
    words = [sys.executable, "-c", KILLED, repr(vars(source)), str(tmp_path / "out")]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert 3 <= len(facts_of(tmp_path / "out")["shards"]) < len(facts_of(serial)["shards"]) - 3
    prepare(source, tmp_path / "out", workers=1)
    assert digests(tmp_path / "out") == digests(serial)


def test_a_killed_worker_ends_the_command(source, tmp_path, monkeypatch):
    monkeypatch.setattr("data.prepare.parts._start_worker", os._exit)
    with pytest.raises(UserError, match="fewer --workers"):
        prepare(source, tmp_path / "out", workers=2)


def test_the_source_s_first_failure_is_reported_and_skipping_it_continues(source, serial, tmp_path, capfd):
    with pytest.raises(UserError, match=r"t\.jsonl line 8: not JSON"):
        prepare(replace(source, on_error="stop"), tmp_path / "out", workers=2)
    assert facts_of(tmp_path / "out")["shards"]
    prepare(source, tmp_path / "out", workers=1)
    assert digests(tmp_path / "out") == digests(serial)
    said = capfd.readouterr().err
    assert re.search(r"  3 \(.*%\): not JSON \(first: t\.jsonl line 8\)\n", said)
    assert re.search(r"  1 \(.*%\): no text under 'text'; .* \(first: t\.jsonl line 161\)\n", said)


@pytest.mark.medium
def test_duplicates_are_left_out_and_counted_by_any_number_of_workers(source, serial, tmp_path):
    unique = replace(source, deduplicate=True)
    for name, workers in (("one", 1), ("two", 2)):
        prepare(unique, tmp_path / name, workers=workers)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    every = lambda folder: [tokens.tobytes() for part in ("train", "val") for tokens in tokens_of(folder, part)]
    assert facts_of(tmp_path / "one")["skipped"]["a duplicate"] >= 1
    assert sorted(every(tmp_path / "one")) == sorted(set(every(serial)))
    before = digests(tmp_path / "one")
    sorted((tmp_path / "one").glob("train_*.bin"))[1].unlink()
    prepare(unique, tmp_path / "one", workers=1)
    assert digests(tmp_path / "one") == before


def test_spans_side_by_side_read_each_document_once_under_the_file_s_numbers(source, tmp_path):
    generator = random.Random(1)
    (tmp_path / "lone.txt").write_text("".join(text(generator, 40) + "\n" for _ in range(900)) + "é" * 50_000 + "\nend")
    for place in (source.source, str(tmp_path / "lone.txt")):
        corpus = find_corpus(place, on_error="skip")
        for file in filter(corpus.is_divisible, corpus.files):
            whole = list(corpus.read(file))
            for size in (1, 997, 20_011):
                cuts = [*range(0, file.size, max(size, file.size // 60))]
                read = []
                for begin, end in zip(cuts, [*cuts[1:], None]):
                    before = corpus.numbers_before(file, begin)
                    read += [(before + n, t, p) for n, t, p in corpus.read(file, begin, end)]
                assert read == whole, (file.name, size)

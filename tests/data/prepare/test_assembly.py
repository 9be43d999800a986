"""Test that a dataset does not depend on the order of its tasks or on interruptions."""

import json
import os
import pickle
import random
import tracemalloc
from collections import Counter, deque
from pathlib import Path

import numpy as np
import pytest

import data.prepare.parts
import data.prepare.shard_layout
from configs.schema import UserError
from data.prepare.corpus import Corpus
from data.prepare.engines import Ended, Engine, Job, LocalEngine
from data.prepare.parts import Recipe, Task, make_tasks, write_part
from data.prepare.preparation import Preparation, Where, prepare
from data.prepare.shard_layout import layouts_of
from data.prepare.source_files import SourceFile
from data.tokenizer import train_tokenizer
from tests.data.preparations import digests, facts_of


class AnyOrder(Engine):
    """Run up to five jobs in an order drawn from a seed, in this process. Stop after `jobs` of them, as if killed."""

    def __init__(self, seed: int, jobs: int = 10**6):
        super().__init__()
        self.dice, self.left = random.Random(seed), jobs

    def run(self, waiting: deque[Job]) -> Ended:
        begun: list[Job] = []
        while begun or waiting:
            while waiting and len(begun) < 5:
                begun.append(waiting.popleft())
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            yield from LocalEngine(1).run(deque([begun.pop(self.dice.randrange(len(begun)))]))


@pytest.fixture
def source(tmp_path, monkeypatch) -> Preparation:
    monkeypatch.setattr(data.prepare.parts, "TASK_BYTES", (2_000, 2_000))
    (tmp_path / "text").mkdir()
    for name in "abc":
        lines = [json.dumps({"text": f"{name} {i} word" * (i % 7 + 1)}) for i in range(60)]
        lines[10] = "junk"
        (tmp_path / "text" / f"{name}.jsonl").write_text("\n".join(lines))
    train_tokenizer(["some words"], 266).save(tmp_path / "tokenizer")
    given = {"tokenizer": str(tmp_path / "tokenizer"), "shard_tokens": 1200, "val_fraction": 0.2}
    return Preparation(source=str(tmp_path / "text"), on_error="skip", **given)


def make(monkeypatch, source: Preparation, out: Path, *engine: int) -> None:
    monkeypatch.setattr(Where, "open", lambda *_: AnyOrder(*engine))
    prepare(source, out)


def test_tasks_in_any_order_stopped_anywhere_give_the_same_bytes(source, tmp_path, monkeypatch):
    prepare(source, tmp_path / "serial", where=Where(workers=1))
    expected = digests(tmp_path / "serial")
    assert len([name for name in expected if name.startswith("train") and name.endswith(".bin")]) > 3
    for seed in range(3):
        out, jobs = tmp_path / str(seed), 4
        while not (out / "dataset.json").exists() or not facts_of(out)["complete"]:
            try:
                make(monkeypatch, source, out, seed, jobs)
            except KeyboardInterrupt:
                jobs += 1
        assert digests(out) == expected


def test_the_source_s_first_failure_is_reported_in_any_order(source, tmp_path, monkeypatch):
    for seed in range(3):
        with pytest.raises(UserError, match=r"a\.jsonl line 11: not JSON"):
            make(monkeypatch, Preparation(**vars(source) | {"on_error": "stop"}), tmp_path / str(seed), seed)


def simulate_part(recipe: Recipe, task: Task, documents: int) -> None:
    """Write a part from lengths like web text's. One document in 100 is a duplicate, and tokens are holes."""
    dice = np.random.default_rng(task.number)
    lengths = dice.lognormal(np.log(400), 1.0, documents).astype(np.int64) + 1
    hashes = dice.integers(0, 2**64, (documents, 2), np.uint64)
    hashes[1::100] = hashes[:-1:100]
    write_part(task, Counter(), np.append(0, np.cumsum(lengths)), 4 * lengths, hashes[:, 0] < 2**58, hashes, None)
    os.truncate(task.out / "tokens", int(lengths.sum()) * recipe.dtype.itemsize)


def test_a_simulated_terabyte_takes_two_bytes_a_document_and_a_task_is_sent_its_own_files(tmp_path, monkeypatch):
    monkeypatch.setattr(data.prepare.shard_layout, "COMPARED", 2**11)
    monkeypatch.setattr(data.prepare.parts, "TASK_BYTES", (10**11, 10**11))
    peaks = []
    for documents in (30_000, 90_000):
        folder = tmp_path / str(documents)
        (folder / "parts").mkdir(parents=True)
        recipe = Recipe(folder, "", 50_000, 0.05, None, deduplicate=True, seed=0, shard_tokens=100_000_000)
        files = [SourceFile(f"{i:06d}.jsonl", f"/text/{i:06d}.jsonl", 5 * 10**8) for i in range(2_000)]
        tasks = make_tasks(recipe, Corpus("/text", files, ""), files)
        for task in tasks:
            simulate_part(recipe, task, documents // len(tasks))
        tracemalloc.start()
        assert len(layouts_of(recipe, tasks)) * recipe.shard_tokens >= documents * 400
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 2 * 60_000
    assert len(tasks) == 10 and max(len(pickle.dumps(task)) for task in tasks) < 200 * 200

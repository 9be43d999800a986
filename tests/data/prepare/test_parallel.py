"""Test that many workers write what one writes, in any order of tasks, and if they are stopped or killed."""

import json
import os
import pickle
import random
import tracemalloc
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import submitit  # noqa: F401  (it closes what others log to, which must not be a test's captured output)

import data.prepare.parts
import data.prepare.shard_layout
from configs.retry import StorageLost
from configs.schema import UserError
from data.prepare.corpus import Corpus
from data.prepare.engines import Ended, Engine, Job, LocalEngine, SlurmEngine
from data.prepare.listing import find_corpus
from data.prepare.parts import Recipe, Task, make_tasks, write_part
from data.prepare.preparation import Preparation, Where, prepare
from data.prepare.selection import train_tokenizer
from data.prepare.shard_layout import layouts_of
from data.prepare.source_files import SourceFile
from data.tokenizer import load_tokenizer
from tests.data.preparations import DeadlyCorpus, digests, facts_of, prepare_under_fire, tokens_of
from tests.launch.real_slurm import real

ROOT = Path(__file__).parents[3]
WORDS = ["alpha", "naïve", "日本語", "12345", "it's", "\n", "  ", "foo_bar();", "\t", "the"]


def recipe(folder: Path, sha256: str = "") -> Recipe:
    return Recipe(folder, sha256, 300, 0.1, None, deduplicate=False, seed=None, shard_tokens=9000)


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
    lines[7], lines[25], lines[45], lines[120], lines[150] = "junk", "junk", "junk", "", lines[3]
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
    prepare(source, out, where=Where(workers=1))
    return out


@pytest.fixture
def slurm(monkeypatch):
    """Use SLURM itself, which starts jobs in the current folder: the repository's root."""
    monkeypatch.chdir(ROOT)
    with real(monkeypatch):
        yield


@pytest.mark.slow
def test_slurm_jobs_write_the_bytes_of_one_worker_and_name_a_deadly_document(slurm, source, serial, tmp_path):
    for workers in (1, 2):
        out = tmp_path / str(workers)
        prepare(source, out, where=Where(engine="slurm", workers=workers, jobs=2, sbatch="--nice=1"))
        assert digests(out) == digests(serial)
    (failed,), tasks = run_deadly(source, tmp_path, SlurmEngine(tmp_path, 1, 3, ""))
    assert "a.jsonl line 41: a worker died on it 3 times" in str(failed)
    assert not tasks[-1].out.exists() and all(task.out.exists() for task in tasks[:-1])
    with pytest.raises(UserError, match=r"sbatch failed.*nowhere"):
        prepare(source, tmp_path / "refused", where=Where(engine="slurm", sbatch="--partition=nowhere"))


def test_a_system_that_assigns_no_processors_uses_all(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS has none
    engine = Where().open(tmp_path)
    assert isinstance(engine, LocalEngine) and engine.workers == os.cpu_count()


def test_a_slurm_job_that_dies_keeps_its_finished_tasks(tmp_path):
    finished, lost = Mock(spec=Task), Mock(spec=Task)
    finished.out, lost.out, lost.at = tmp_path / "finished", tmp_path / "lost", lambda: None  # it was not begun
    finished.out.touch()
    engine, waiting = object.__new__(SlurmEngine), deque()
    engine.fruitless = 0
    paths = SimpleNamespace(result_pickle=tmp_path / "none")
    for job, failure in engine._end(SimpleNamespace(paths=paths), [finished, lost], waiting):
        assert job is finished and failure is None
        job.out.unlink()  # its output is taken at once
    assert list(waiting) == [lost]


def test_missing_slurm_is_reported(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no `sbatch` here"):
        prepare(source, tmp_path / "out", where=Where(engine="slurm"))
    assert not (tmp_path / "out").exists()


def test_kills_of_workers_and_the_command_change_nothing(source, serial, tmp_path):
    corpus = find_corpus(source.source)
    assert len(make_tasks(recipe(tmp_path), corpus, corpus.files)) > 8
    kills, log = prepare_under_fire(source, tmp_path / "out", 9_000, 3, random.Random(0))
    assert kills == 3, log
    assert digests(tmp_path / "out") == digests(serial)


def run_deadly(source, tmp_path: Path, engine: Engine, last: str = "deadly") -> tuple[list[Exception], list[Task]]:
    """Return the failures and all tasks for a file whose last document is `last`: it kills its reader."""
    (tmp_path / "text").mkdir()
    fine = "".join(json.dumps({"text": f"fine {i}" * 99}) + "\n" for i in range(40))
    (tmp_path / "text" / "a.jsonl").write_text(fine + json.dumps({"text": last}))
    corpus = DeadlyCorpus(**vars(find_corpus(str(tmp_path / "text"))))
    tokenizer = load_tokenizer(source.tokenizer)
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "parts").mkdir(exist_ok=True)
    tasks = make_tasks(recipe(tmp_path, tokenizer.sha256), corpus, corpus.files)
    failures = [failure for _, failure in engine.run(deque(tasks))]
    assert len(tasks) > 2 and len(failures) == len(tasks)
    return [*filter(None, failures)], tasks


def test_a_document_that_kills_every_worker_is_named(source, tmp_path):
    (failed,), tasks = run_deadly(source, tmp_path, LocalEngine(2))
    assert "a.jsonl line 41: a worker died on it 3 times" in str(failed)
    assert not tasks[-1].out.exists() and all(task.out.exists() for task in tasks[:-1])


def test_a_store_that_is_lost_in_a_worker_is_no_death_of_it(source, tmp_path):
    (failed,), _ = run_deadly(source, tmp_path, LocalEngine(2), "away")
    assert isinstance(failed, StorageLost) and str(failed) == "the store"


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


def make(monkeypatch, source: Preparation, out: Path, *engine: int) -> None:
    monkeypatch.setattr(Where, "open", lambda *_: AnyOrder(*engine))
    prepare(source, out)


def test_tasks_in_any_order_stopped_anywhere_give_the_same_bytes(source, serial, tmp_path, monkeypatch):
    assert len(list(serial.glob("train*.bin"))) > 3
    for seed in range(3):
        out, jobs = tmp_path / str(seed), 4
        while not (out / "dataset.json").exists() or not facts_of(out)["complete"]:
            try:
                make(monkeypatch, source, out, seed, jobs)
            except KeyboardInterrupt:
                jobs += 1
        assert digests(out) == digests(serial)


def test_the_source_s_first_failure_is_reported_in_any_order(source, tmp_path, monkeypatch):
    for seed in range(3):
        with pytest.raises(UserError, match=r"t\.jsonl line 8: not JSON"):
            make(monkeypatch, replace(source, on_error="stop"), tmp_path / str(seed), seed)


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


def test_duplicates_are_left_out_and_counted_and_a_seed_gives_an_order(source, serial, tmp_path):
    for name, workers in (("one", 1), ("two", 2)):
        prepare(replace(source, deduplicate=True, shuffle=3), tmp_path / name, where=Where(workers=workers))
    prepare(replace(source, shuffle=4), tmp_path / "other", where=Where(workers=1))
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    skipped = facts_of(tmp_path / "one")["skipped"]
    folders = (serial, tmp_path / "one", tmp_path / "other")
    every = lambda folder: [tokens.tobytes() for part in ("train", "val") for tokens in tokens_of(folder, part)]
    whole, mixed, other = map(every, folders)
    assert skipped["a duplicate"] >= 1 and len(set(mixed)) == len(mixed)
    assert set(mixed) == set(whole) and mixed != sorted(set(whole), key=whole.index)
    assert Counter(other) == Counter(whole) and other != whole
    path = sorted((tmp_path / "one").glob("train_*.bin"))[1]
    before = digests(tmp_path / "one")
    path.unlink()
    prepare(replace(source, deduplicate=True, shuffle=3), tmp_path / "one", where=Where(workers=1))
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

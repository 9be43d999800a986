"""Test that a disk which does not answer is not taken for one without the file: nothing is deleted or begun again."""

from dataclasses import replace
from pathlib import Path

import pytest

from data.dataset_folder import open_dataset
from data.prepare.listing import find_corpus
from data.prepare.preparation import Preparation, prepare
from data.prepare.selection import train_tokenizer
from evaluation.results import ItemLog
from hosts.preflight import problems_here
from options.schema import DataConfig
from run.config_json import config_of_run
from run.folder import RunFolder
from run.lock import RunLock
from run.metrics import drop_metrics_after
from run.status import inspect_run
from system.errors import StorageLost, UserError
from tests.data.preparations import digests, write_files
from tests.helpers import tiny_config
from tests.run.claims import claim

TEXTS = {f"{i}.txt": f"document {i}: " + " ".join(f"word{i * j % 97}" for j in range(90)) for i in range(9)}


def test_the_record_of_a_run_keeps_its_lines(tmp_path, unanswered):
    RunFolder(tmp_path).events.add("start", 0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "time": 1.0}\n')
    before = digests(tmp_path)
    unanswered |= {"metrics.jsonl", "events.jsonl"}
    with pytest.raises(OSError, match="Stale"):
        RunFolder(tmp_path).events.add("saved", 1)
    with pytest.raises(OSError, match="Stale"):
        drop_metrics_after(RunFolder(tmp_path), 1)
    unanswered.clear()
    assert digests(tmp_path) == before


def test_a_log_of_items_keeps_its_lines(tmp_path, unanswered):
    ItemLog(tmp_path / "items.jsonl", {"step": 8}).extend([{"item": 1}])
    unanswered.add("items.jsonl")
    with pytest.raises(UserError, match="Stale"):
        ItemLog(tmp_path / "items.jsonl", {"step": 8})
    unanswered.clear()
    assert ItemLog(tmp_path / "items.jsonl", {"step": 8}) == [{"item": 1}]


def test_a_refused_start_deletes_no_record(tmp_path, unanswered):
    config = replace(tiny_config(), run_dir=str(tmp_path))
    with pytest.raises(UserError, match="a shard has changed"), RunLock(RunFolder(tmp_path)):
        claim(config)
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0, "time": 1.0}\n')
        unanswered.add("metrics.jsonl")
        raise UserError("a shard has changed")
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "lock", "metrics.jsonl"}


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
def test_a_start_does_not_go_on_without_a_file_of_the_run(tmp_path, unanswered, monkeypatch, name):
    config = replace(tiny_config(), run_dir=str(tmp_path))
    claim(config)
    RunFolder(tmp_path).events.add("saved", 8)
    unanswered.add(name)
    with pytest.raises(OSError, match="Stale"):
        inspect_run(RunFolder(tmp_path), config, "print")
    monkeypatch.setattr("system.files.RETRY_SECONDS", 0)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    if name == "config.json":
        with pytest.raises(StorageLost, match="Stale"):
            config_of_run(RunFolder(tmp_path))


def test_a_dataset_is_neither_prepared_again_nor_taken_for_text(tmp_path, unanswered, monkeypatch):
    source, out = write_files(tmp_path / "text", TEXTS), tmp_path / "out"
    settings = Preparation(source=source, vocab_size=280, val_fraction=0.3)
    prepare(settings, out)
    before = digests(out)
    monkeypatch.setattr("system.files.RETRY_SECONDS", 0)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    for name in ("dataset.json", "train_000000.bin", "3.txt"):
        unanswered.add(name)
        with pytest.raises(StorageLost, match="Stale"):
            prepare(settings, out)
        unanswered.clear()
    for name in ("dataset.json", "train_000000.starts.npy"):
        unanswered.add(name)
        with pytest.raises(StorageLost, match="Stale"):
            open_dataset(str(out), DataConfig(), 280, tmp_path / "cache").document_starts("train")
        unanswered.clear()
    assert digests(out) == before
    assert len(find_corpus(source).files) == len(TEXTS)


def test_a_tokenizer_of_a_run_is_compared_once_the_disk_answers(tmp_path, unanswered, monkeypatch):
    prepare(
        Preparation(source=write_files(tmp_path / "text", TEXTS), vocab_size=280, val_fraction=0.3), tmp_path / "out"
    )
    tokenizer = open_dataset(str(tmp_path / "out"), DataConfig(), 280, tmp_path / "cache").tokenizer
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: unanswered.clear())
    (tmp_path / "run").mkdir()
    other = train_tokenizer(["other words"], 280)
    (tmp_path / "run" / "tokenizer.json").write_text(other.json)
    unanswered.add("tokenizer.json")
    with pytest.raises(UserError, match="another tokenizer"):
        tokenizer.require_same_in(tmp_path / "run")


def test_a_host_waits_for_the_folder_of_a_run(tmp_path, unanswered, monkeypatch):
    unanswered.add(Path(tmp_path).name)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: unanswered.clear())
    assert problems_here(replace(tiny_config(), run_dir=str(tmp_path))) == [] and not unanswered

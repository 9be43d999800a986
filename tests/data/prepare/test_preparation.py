import json
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import data.prepare.preparation as module
import data.prepare.selection as selection
from data.dataset_folder import open_dataset
from data.prepare.preparation import Preparation, prepare
from data.prepare.selection import train_tokenizer
from data.tokenizer import load_tokenizer
from options.schema import DataConfig
from system.errors import UserError
from tests.data.preparations import digests, facts_of, jsonl, read_shard, texts_of, tokens_of, write_files

SIZE = 300
LINES = [json.dumps({"text": f"line {i} " * (i % 9 + 1)}) for i in range(40)]


@pytest.fixture
def settings(tmp_path: Path) -> Preparation:
    words = lambda i: " ".join(f"word{j * i % 97} é" for j in range(50))
    files = {f"{i}.txt": f"document {i}: {words(i)}" for i in range(20)} | {"table.jsonl": "\n".join(LINES)}
    return Preparation(
        source=write_files(tmp_path / "text", files), vocab_size=SIZE, val_fraction=0.3, shard_tokens=500
    )


def documents(folder: Path, part: str) -> list[str]:
    """Return the documents of a split, each after its BOS."""
    tokenizer, pieces = load_tokenizer(folder / "tokenizer"), tokens_of(folder, part)
    assert all(piece[0] == tokenizer.bos and (piece == tokenizer.bos).sum() == 1 for piece in pieces)
    return [tokenizer.decode(piece[1:].tolist()) for piece in pieces]


def every_document(folder: Path) -> Counter:
    return Counter(documents(folder, "train") + documents(folder, "val"))


def test_both_splits_contain_all_text_with_a_bos_before_each_document(settings, tmp_path):
    prepare(settings, tmp_path / "out")
    facts, parts = facts_of(tmp_path / "out"), {part: documents(tmp_path / "out", part) for part in ("train", "val")}
    assert Counter(parts["train"] + parts["val"]) == Counter(texts_of(settings.source))
    assert len(facts["shards"]) > 5 and facts["complete"]
    for part, texts in parts.items():
        assert len(texts) > 5
        assert facts[part]["documents"] == len(texts)
        assert facts[part]["bytes"] == sum(len(text.encode()) for text in texts)
        assert facts[part]["tokens"] == sum(len(read_shard(p)) for p in (tmp_path / "out").glob(f"{part}_*.bin"))
    for shard in facts["shards"]:
        assert 250 < sum(shard[part]["tokens"] for part in ("train", "val") if part in shard) < 500 + 800


def test_fewer_than_two_texts_are_refused(tmp_path):
    for texts in ([], ["the same"], ["the same"] * 50):
        (tmp_path / "a.jsonl").write_text(jsonl(*({"text": text} for text in texts)) or "{}")
        says = rf"{len(texts)} document\(s\) with text .*at least 2 different"
        with pytest.raises(UserError, match=says):
            prepare(Preparation(source=f"{tmp_path}/a.jsonl", on_error="skip", vocab_size=266), tmp_path / "out")


def test_the_tokenizer_sees_no_held_out_text_and_a_sample_of_every_file(settings, tmp_path, monkeypatch):
    seen = []

    def train(texts, size):
        seen[:] = texts
        return train_tokenizer(seen, size)

    monkeypatch.setattr(selection, "train_tokenizer", train)
    prepare(settings, tmp_path / "out")
    assert Counter(seen) == Counter(documents(tmp_path / "out", "train"))
    prepare(replace(settings, sample_bytes=2000, vocab_size=270), tmp_path / "sampled")
    assert 0 < sum(map(len, seen)) < sum(map(len, documents(tmp_path / "sampled", "train")))
    lines = sum("line" in text for text in seen)
    assert 0 < lines < 15 and len(seen) - lines > 10


def test_a_second_call_does_nothing_and_a_deleted_shard_is_made_again_to_the_bit(settings, tmp_path, monkeypatch):
    prepare(settings, tmp_path / "out")
    before = digests(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(selection, "train_tokenizer", None)
        patch.setattr(module, "_only_one", None)  # the folder may be read-only
        prepare(settings, tmp_path / "out")
    assert digests(tmp_path / "out") == before
    for part in ("train", "val"):
        sorted((tmp_path / "out").glob(f"{part}_*.bin"))[1].unlink()
        prepare(settings, tmp_path / "out")
        assert digests(tmp_path / "out") == before


def test_of_two_preparations_at_once_one_waits_for_the_other(settings, tmp_path, monkeypatch):
    trained = []

    def slowly(texts, size):
        trained.append(size)
        time.sleep(0.3)
        return train_tokenizer(texts, size)

    monkeypatch.setattr(selection, "train_tokenizer", slowly)
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(prepare, [settings] * 3, [tmp_path / "out"] * 3))
    assert trained == [SIZE]
    assert every_document(tmp_path / "out") == Counter(texts_of(settings.source))


def test_a_too_large_vocabulary_names_a_valid_size_and_claims_no_folder(tmp_path):
    files = {f"{i}.txt": f"hello hello world hello hello world {i}" for i in range(10)}
    settings = Preparation(source=write_files(tmp_path / "text", files | {"notes.rst": "words"}), val_fraction=0.3)
    with pytest.raises(UserError, match=r"vocab_size of 32768 .*more text, .*; left out: 1 \.rst") as error:
        prepare(settings, tmp_path / "out")
    size = re.search(r"--vocab_size=(\d+) \(of train.py: --model.vocab_size=\1\) or less", str(error.value))
    assert size
    prepare(replace(settings, vocab_size=int(size[1])), tmp_path / "out")
    assert load_tokenizer(tmp_path / "out" / "tokenizer").vocab_size == int(size[1])


def test_other_options_or_text_and_a_folder_of_something_else_are_refused_and_change_nothing(settings, tmp_path):
    prepare(settings, tmp_path / "out")
    before = digests(tmp_path / "out")
    for change, says in (
        ({"vocab_size": 301}, "vocab_size: 300 -> 301"),
        ({"tokenizer": "nowhere"}, "tokenizer:  -> nowhere"),
    ):
        with pytest.raises(UserError, match=says):
            prepare(replace(settings, **change), tmp_path / "out")
    Path(settings.source, "3.txt").write_text("changed")
    with pytest.raises(UserError, match=r"version: .*changes with the source's files"):
        prepare(settings, tmp_path / "out")
    assert digests(tmp_path / "out") == before
    with pytest.raises(UserError, match="is not empty and has no dataset"):
        prepare(settings, Path(settings.source))


@pytest.fixture
def splits(tmp_path) -> Preparation:
    """Write two published splits. The second repeats two texts of the first."""
    texts = [f"text {i} of some words, " + " ".join(str(i * j) for j in range(20)) for i in range(30)]
    splits = {"train-00000.jsonl": texts[:20], "validation-00000.jsonl": texts[18:25]}
    write = lambda some: jsonl(*({"text": text} for text in some))
    source = write_files(tmp_path / "text", {name: write(some) for name, some in splits.items()})
    train_tokenizer(texts, 280).save(tmp_path / "tok")
    return Preparation(source=source, tokenizer=str(tmp_path / "tok"), val_fraction=0.3)


def test_a_validation_split_is_held_out_and_keeps_the_texts_that_training_repeats(splits, tmp_path, capfd):
    prepare(splits, tmp_path / "all")
    assert [facts_of(tmp_path / "all")[part]["documents"] for part in ("train", "val")] == [20, 7]
    out = tmp_path / "out"
    prepare(replace(splits, deduplicate=True), out)
    parts = [documents(out, part) for part in ("train", "val")]
    assert len(parts[0]) == 18 and len(parts[1]) == 7 and not set(parts[0]) & set(parts[1])
    assert facts_of(out)["skipped"] == {"a duplicate": 2}
    log = capfd.readouterr().err
    assert "1 of them held out (validation-00000.jsonl ...)" in log and "2 (7.4%): a duplicate" in log
    assert open_dataset(str(out), DataConfig(), 280, tmp_path).held_out == "files of their own"

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import data.prepare as module
from configs.schema import Config, DataConfig, ModelConfig, UserError, validate
from data.prepare import prepare
from data.tokenizer import BOS, token_bytes, train_tokenizer

SIZE = 300


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"document {i}: " + " ".join(f"word{j * i % 97} é" for j in range(50)))
    return DataConfig(source=str(folder), val_fraction=0.3)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def refuse(*_):
    raise AssertionError("prepared anew")


def texts_of(config: DataConfig) -> list[str]:
    return [path.read_text() for path in Path(config.source).iterdir()]


def test_both_parts_hold_all_text_a_bos_before_each_document(config, cache):
    dataset = prepare(config, SIZE, cache)
    bos, texts = dataset.tokenizer.token_to_id(BOS), []
    for part, tokens in (("train", dataset.train), ("val", dataset.val)):
        documents = np.split(tokens, np.flatnonzero(tokens == bos))[1:]
        facts = {
            "documents": len(documents),
            "tokens": len(tokens),
            "bytes": token_bytes(dataset.tokenizer)[tokens].sum(),
        }
        assert dataset.facts[part] == facts
        assert len(documents) > 1
        texts += [dataset.tokenizer.decode(document[1:].tolist()) for document in documents]
    assert sorted(texts) == sorted(texts_of(config))


def test_tokenizer_never_sees_the_held_out_text(config, cache, monkeypatch):
    seen = []

    def train(texts, size):
        seen.extend(texts)
        return train_tokenizer(seen, size)

    monkeypatch.setattr(module, "train_tokenizer", train)
    dataset = prepare(config, SIZE, cache)
    assert len(seen) == dataset.facts["train"]["documents"] < len(texts_of(config))


def test_second_call_reads_the_cache(config, cache, monkeypatch):
    first = prepare(config, SIZE, cache)
    monkeypatch.setattr(module, "train_tokenizer", refuse)
    monkeypatch.setattr(module, "write_shard", refuse)
    again = prepare(config, SIZE, cache)
    assert again.facts == first.facts
    assert again.train.tolist() == first.train.tolist()
    assert again.val.tolist() == first.val.tolist()
    assert again.tokenizer.to_str() == first.tokenizer.to_str()


def test_fingerprint_changes_with_the_text_the_split_and_the_vocabulary_and_with_nothing_else(config, cache, tmp_path):
    prints = [prepare(config, SIZE, cache).fingerprint, prepare(config, SIZE + 1, cache).fingerprint]
    same = prepare(replace(config, workers=7), SIZE, tmp_path / "elsewhere")
    assert same.fingerprint == prints[0]
    prints.append(prepare(replace(config, val_fraction=0.6), SIZE, cache).fingerprint)
    path = Path(config.source) / "3.txt"
    text = path.read_text()
    path.write_text(text + "!")
    prints.append(prepare(config, SIZE, cache).fingerprint)
    assert len(set(prints)) == 4
    path.write_text(text)
    assert prepare(config, SIZE, cache).fingerprint == prints[0]


def test_fingerprint_tells_where_the_held_out_part_begins(cache, tmp_path):
    """The hashes of these names fall in their order, so that the split moves along the same sequence of documents."""
    for name in ("b", "d", "e"):
        (tmp_path / f"{name}.txt").write_text("words and more words " * 9)
    datasets = [prepare(DataConfig(str(tmp_path), fraction), 262, cache) for fraction in (0.5, 0.99)]
    assert [dataset.facts["train"]["documents"] for dataset in datasets] == [2, 1]
    assert datasets[0].fingerprint != datasets[1].fingerprint


@pytest.mark.parametrize("killed_at", ["train.bin", "val.bin", "rename"])
def test_a_killed_preparation_leaves_nothing_that_is_taken_for_whole(config, cache, tmp_path, monkeypatch, killed_at):
    whole = prepare(config, SIZE, tmp_path / "elsewhere")

    def write_or_die(path: Path, *rest):
        if path.name == killed_at:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        write_shard(path, *rest)

    def die(*_):
        raise KeyboardInterrupt

    write_shard = module.write_shard
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_shard", write_or_die)
        if killed_at == "rename":
            patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, SIZE, cache)
    assert not (cache / whole.fingerprint).exists()
    again = prepare(config, SIZE, cache)
    assert again.train.tolist() == whole.train.tolist()
    assert again.val.tolist() == whole.val.tolist()


def test_of_two_preparations_at_once_one_is_kept(config, cache, monkeypatch):
    def while_another_prepares(texts, size):
        monkeypatch.setattr(module, "train_tokenizer", train_tokenizer)
        prepare(config, SIZE, cache)
        return train_tokenizer(texts, size)

    monkeypatch.setattr(module, "train_tokenizer", while_another_prepares)
    dataset = prepare(config, SIZE, cache)
    assert [folder.name for folder in cache.iterdir()] == [dataset.fingerprint]


@pytest.mark.parametrize(
    ("texts", "some_size_works"), [(["hello hello world", "held out"] * 5, True), (["a", "b"], False)]
)
def test_too_large_vocabulary_names_a_size_that_works_if_there_is_one(texts, some_size_works, cache, tmp_path):
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    config = DataConfig(source=str(tmp_path))
    with pytest.raises(UserError, match=r"--model\.vocab_size=32768 .*more text") as error:
        prepare(config, 32768, cache)
    sizes = re.findall(r"use --model\.vocab_size=(\d+)", str(error.value))
    assert bool(sizes) == some_size_works
    for size in sizes:
        validate(Config(name="x", model=ModelConfig(vocab_size=int(size))))
        assert prepare(config, int(size), cache).tokenizer.get_vocab_size() == int(size)


def test_skipped_files_are_said_and_recorded(config, cache, capfd):
    (Path(config.source) / "latin.txt").write_bytes(b"\xff\xfe")
    dataset = prepare(config, SIZE, cache)
    assert dataset.facts["skipped_files"] == ["latin.txt"]
    said = capfd.readouterr()
    assert "latin.txt" in said.err and "UTF-8" in said.err and not said.out


def test_saved_tokenizer_is_the_datasets(config, cache, tmp_path):
    dataset = prepare(config, SIZE, cache)
    dataset.save_tokenizer(tmp_path / "run" / "tokenizer")
    assert module.load_tokenizer(tmp_path / "run/tokenizer/tokenizer.json").to_str() == dataset.tokenizer.to_str()

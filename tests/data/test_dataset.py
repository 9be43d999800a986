import json
import os
import re
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import data.dataset_folder as module
from data.dataset import absolute, join_source, open_text, read_source, split_source
from data.dataset_folder import open_dataset
from data.prepare.preparation import Preparation, prepare, prepare_raw
from data.prepare.selection import train_tokenizer
from options.schema import DataConfig
from system.errors import UserError
from tests.data.preparations import tokens_of, write_files

ROOT = Path(__file__).parents[2]
SIZE = 300


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Return a folder with raw text and three datasets of it: `made`, `second` with more held-out text, and `other`
    with another tokenizer."""
    folder = tmp_path_factory.mktemp("prepared")
    words = lambda i: " ".join(f"word{j * i % 97} é" for j in range(i))
    write_files(folder / "raw", {f"{i}.txt": f"document {i}: {words(i)}" for i in range(40)})
    settings = {
        "made": {"vocab_size": SIZE, "val_fraction": 0.3, "shard_tokens": 1000},
        "second": {"tokenizer": str(folder / "made" / "tokenizer"), "val_fraction": 0.5},
        "other": {"vocab_size": SIZE - 1, "val_fraction": 0.3},
    }
    for name, given in settings.items():
        prepare(Preparation(source=str(folder / "raw"), **given), folder / name)
    return folder


@pytest.fixture
def raw(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared / "raw", tmp_path / "raw")


@pytest.fixture
def made(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared / "made", tmp_path / "made")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "tok"
    train_tokenizer(["some words of text " * 50], 270).save(folder)
    return folder


def opened(folder: Path, cache: Path, length=16, rows=8, vocab_size=SIZE, **options):
    return open_text(DataConfig(source=str(folder), **options), vocab_size, length, rows, cache)


def counted(rows) -> list[int]:
    """Return the targets that count, in the order of the rows."""
    return [t for i in range(len(rows)) for t in rows[i]["targets"][rows[i]["weights"] > 0].tolist()]


@pytest.mark.parametrize(
    ("source", "names", "shares"),
    [
        ("hf:a/b", ["hf:a/b"], [1]),
        ("0.7:/a,0.3:/b c", ["/a", "/b c"], [0.7, 0.3]),
        ("1:d,3:gs://b/c", ["d", "gs://b/c"], [0.25, 0.75]),
    ],
)
def test_sources_and_shares(source, names, shares):
    assert read_source(source) == (names, [Fraction(str(share)) for share in shares])
    assert join_source(split_source(source)) == source


@pytest.mark.parametrize("source", ["0.5:a,b", "0:a,1:b", "-1:a", "1:a,", "1:a,1:a"])
def test_an_invalid_source_is_refused_by_name(source):
    with pytest.raises(UserError, match=re.escape(f"--data.source={source}: ")):
        read_source(source)


def test_a_prepared_folder_gives_its_tokens_in_order(made, cache):
    text = opened(made, cache)
    for part, (rows,) in (("train", text.train), ("val", text.val)):
        inputs = [token for i in range(len(rows)) for token in rows[i]["inputs"].tolist()]
        assert inputs == np.concatenate(tokens_of(made, part))[: len(inputs)].tolist() and len(inputs) > 500
    assert text.tokenizer.vocab_size == SIZE


def test_best_fit_counts_every_token_once_by_a_plan_that_is_made_once_and_stored_in_the_cache(made, cache, monkeypatch):
    """Make it from one shard at a time. The dataset's folder cannot be written."""
    monkeypatch.setattr(module, "PLANNED", 1)
    (made / "plans").write_text("in the way")
    opened(made, cache, packing="best_fit")
    assert len(list((cache / "plans").iterdir())) == 2
    monkeypatch.setattr(module, "plan_rows", None)
    again = opened(made, cache, packing="best_fit")
    for part, (rows,) in (("train", again.train), ("val", again.val)):
        assert sorted(counted(rows)) == sorted(np.concatenate(tokens_of(made, part))) and len(rows) > 3


def test_a_mixture_s_fingerprint_depends_on_shares_and_its_held_out_text_is_reported(prepared, cache, capfd):
    with pytest.raises(UserError, match="a text is named twice: give it the sum of its shares"):
        opened(f"0.5:{prepared}/made,0.5:{prepared}/../{prepared.name}/made", cache)
    assert not capfd.readouterr().err
    texts = [opened(f"{a}:{prepared}/made,{b}:{prepared}/second", cache) for a, b in ((3, 1), (1, 1), (6, 2))]
    assert [text.weights for text in texts] == [[0.75, 0.25], [0.5, 0.5], [0.75, 0.25]]
    prints = [text.fingerprint for text in texts]
    assert prints[0] == prints[2] != prints[1]
    assert "held out of one dataset and trained on in another" in (log := capfd.readouterr().err)
    assert "below 0.3" in log and "below 0.5" in log
    with pytest.raises(UserError, match=rf"another tokenizer.*--tokenizer={prepared}/made/tokenizer"):
        opened(f"1:{prepared}/made,1:{prepared}/other", cache)


def test_a_run_of_some_epochs_repeats_no_row_beyond_them(made, cache):
    text = opened(made, cache)
    rows = len(text.train[0]) // 3 - 1  # of a step: they do not divide the epoch
    for epochs in (1.0, 2.5):
        steps = text.steps(epochs, rows)
        (passes,) = text.epochs(steps * rows).values()
        assert passes <= epochs < passes + rows / len(text.train[0])
    assert text.steps(0.01, rows) == 1


def test_an_empty_prompt_becomes_the_beginning_of_a_held_out_document(made, prepared, cache):
    held_out = tokens_of(made, "val")
    text = opened(made, cache)
    first, given, second = text.prompts(("", "given", ""))
    documents = [text.tokenizer.decode(ids[1:].tolist()) for ids in held_out]
    assert given == "given" and first != second and all(prompt.startswith("document ") for prompt in (first, second))
    assert all(any(document.startswith(prompt) for document in documents) for prompt in (first, second))
    both = opened(f"0.5:{made},0.5:{prepared}/second", cache).prompts([""] * 99)
    assert both[-1] == ""  # fewer held-out documents than prompts


def test_raw_text_is_prepared_in_the_cache_once_and_again_when_it_changes(raw, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_prepare_raw", prepare_raw)  # in this process
    os.utime(raw / "3.txt", ns=(1, 1))
    first = opened(raw, cache)
    (shard,) = (cache / "datasets").glob("*/train_*.bin")
    made = shard.stat().st_mtime_ns
    assert opened(raw, cache, workers=7).fingerprint == first.fingerprint and shard.stat().st_mtime_ns == made
    os.utime(raw / "3.txt", ns=(2, 2))
    assert opened(raw, tmp_path / "another machine").fingerprint == first.fingerprint
    (raw / "3.txt").write_text("another text")
    prints = [first.fingerprint, opened(raw, cache).fingerprint]
    prints.append(opened(raw, cache, val_fraction=0.6).fingerprint)
    prints.append(opened(raw, cache, vocab_size=SIZE + 1).fingerprint)
    assert len(set(prints)) == 4


def test_a_relative_source_leads_to_the_same_text_from_any_folder(made, tokenizer, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(made.parent)
    sources = (made.name, f"0.7:{made.name},0.3:./{made.name},1:raw", "raw/*.txt")
    kept = [absolute(DataConfig(source=source, tokenizer="tok")) for source in sources]
    here = opened(made.name, cache)
    monkeypatch.chdir("/")
    assert opened(kept[0].source, cache).fingerprint == here.fingerprint
    mixed = f"0.7:{made},0.3:{made},1:{tmp_path}/raw"
    assert [c.source for c in kept] == [str(made), mixed, f"{tmp_path}/raw/*.txt"]
    assert {c.tokenizer for c in kept} == {f"{tmp_path}/tok"}
    for source in ("stdlib", "hf:a/b", "gs://bucket/x", "/a/b", "0.5:/a,2:/b", "1:/a"):
        config = DataConfig(source=source, tokenizer="tiktoken:gpt2")
        assert absolute(config) == config


def test_another_tokenizer_than_the_datasets_is_refused(made, cache, tokenizer, tmp_path):
    for other in (str(tokenizer), "tiktoken:gpt2"):  # a mixture's raw text may need one: the dataset's
        with pytest.raises(UserError, match=f"{made} was made with another.*={other} .*give {made}/tokenizer"):
            opened(made, cache, tokenizer=other)
    assert opened(made, cache, tokenizer=str(made / "tokenizer")).tokenizer.vocab_size == SIZE
    spelled = json.dumps(json.loads((made / "tokenizer" / "tokenizer.json").read_text()), indent=2)
    (tmp_path / "tokenizer.json").write_text(spelled)
    assert opened(made, cache, tokenizer=str(tmp_path / "tokenizer.json")).tokenizer.vocab_size == SIZE
    (made / "tokenizer" / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="is not the dataset's: its SHA-256"):
        opened(made, cache)


def test_text_that_does_not_fit_the_run_is_refused(made, cache):
    for options, says in (
        ({"vocab_size": SIZE - 1}, "--model.vocab_size=299 is too small"),
        ({"rows": 10**6}, "a step takes 1000000 rows (--batch.tokens_per_step="),
        ({"length": 10**6}, "gives 0 rows of 1000000 tokens"),
    ):
        with pytest.raises(UserError, match=re.escape(says)):
            opened(made, cache, **options)
    assert opened(made, cache, vocab_size=SIZE + 20).tokenizer.vocab_size == SIZE  # the network may be larger


def test_text_elsewhere_is_refused_with_what_brings_it_here(cache):
    with pytest.raises(UserError, match=r"--data\.source=gs://bucket/x: .*gcsfuse"):
        open_dataset("gs://bucket/x", DataConfig(), SIZE, cache)
    with pytest.raises(UserError, match=r"python -m data\.prepare --source=hf:owner/name --out=DIR"):
        open_dataset("hf:owner/name", DataConfig(), SIZE, cache)


def test_an_incomplete_dataset_and_shards_without_their_record_are_refused(made, cache):
    record, facts = made / "dataset.json", json.loads((made / "dataset.json").read_bytes())
    record.write_text(json.dumps({**facts, "shards": facts["shards"][:3], "complete": False}))
    with pytest.raises(UserError, match="is not complete; continue its preparation"):
        opened(made, cache)
    record.unlink()
    with pytest.raises(UserError, match=r"made has shards without a dataset\.json; copy it there again"):
        opened(made, cache)

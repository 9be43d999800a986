"""Test that damaged data and mistakes end in one message, are counted, or are repaired."""

import errno
import fcntl
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from data.dataset import Text, open_text
from data.prepare.preparation import Preparation, prepare
from data.prepare.selection import train_tokenizer
from options.schema import DataConfig
from system.errors import UserError
from tests.data.preparations import facts_of, write_files

SIZE = 270


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Return a folder with `text` and its dataset `made`."""
    folder = tmp_path_factory.mktemp("prepared")
    write_files(folder / "text", {f"{i}.txt": f"document {i}: " + "some words of text " * i for i in range(20)})
    prepare(preparation(folder), folder / "made")
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """Return a copy of it, to be damaged."""
    shutil.copytree(prepared / "made", tmp_path / "made")
    os.symlink(prepared / "text", tmp_path / "text")
    return tmp_path


def preparation(folder: Path, **options) -> Preparation:
    given = {"vocab_size": SIZE, "val_fraction": 0.3, "shard_tokens": 500} | options
    return Preparation(source=str((folder / "text").resolve()), **given)


def opened(folder: Path, packing="best_fit", **options) -> Text:
    config = DataConfig(source=str(folder / "made"), packing=packing, **options)
    return open_text(config, SIZE, 16, 4, folder / "cache")


# Dataset folders.


def test_every_reader_names_a_damaged_record(folder):
    path = folder / "made" / "dataset.json"
    whole = path.read_bytes()
    damaged = [b"", b"null", b"{}", b'{"shards": 3', b"[" * 99_999, b"\xff", whole[: len(whole) // 2]]
    damaged += [
        whole.replace(b'"documents": ', b'"documents": null, "x": '),
        whole.replace(b"held_out_by", b"held_out"),
    ]
    for content in damaged:
        path.write_bytes(content)
        for use in (lambda: opened(folder), lambda: prepare(preparation(folder), folder / "made")):
            with pytest.raises(UserError, match=r"dataset\.json is damaged, .*; delete .*made, and prepare it again"):
                use()


def test_a_damaged_plan_or_index_is_named(folder):
    opened(folder)
    (plan,) = (folder / "made" / "plans").glob("train*")
    (plan / "starts").write_bytes((plan / "starts").read_bytes()[:-8])
    with pytest.raises(UserError, match=r"plans/train.* is damaged.*; delete it, and it is made again"):
        opened(folder)
    shutil.rmtree(plan)
    path = folder / "made" / "train_000000.starts.npy"
    whole = path.read_bytes()
    for content in (b"", b"no array", whole[:-3]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"train_000000\.starts\.npy is missing or damaged; bring it back"):
            opened(folder)


# Tokenizers that change text.


def test_a_document_whose_tokens_count_other_bytes_stops_the_preparation_or_is_left_out(tmp_path, monkeypatch):
    """The tokenizer composes accents, as Qwen's does. Only a document that it is not tried with has a loose one."""
    monkeypatch.setattr("data.prepare.preparation.LOOKED_AT", 2)
    library = Tokenizer.from_str(train_tokenizer(["some words of text, é"], 266).json)
    library.normalizer = normalizers.NFC()
    library.save(str(tmp_path / "nfc.json"))
    texts = [f" some words of text {i}\n" for i in range(20)]
    lines = [json.dumps({"text": text}) + "\n" for text in [*texts[:7], "loose e\u0301 " * 3, *texts[7:]]]
    (tmp_path / "text.jsonl").write_text("".join(lines))
    given = Preparation(source=f"{tmp_path}/text.jsonl", tokenizer=f"{tmp_path}/nfc.json", val_fraction=0.3)
    for deduplicate in (False, True):
        out = tmp_path / f"{deduplicate}"
        settings = replace(given, deduplicate=deduplicate)
        with pytest.raises(UserError, match=r"text\.jsonl line 8: its tokens count 27 bytes, and its text has 30"):
            prepare(settings, out)
        prepare(replace(settings, on_error="skip"), out)
        facts = facts_of(out)
        assert facts["skipped"]["whose tokens count other bytes than the text has"] == 1
        assert facts["train"]["documents"] + facts["val"]["documents"] == 20


def test_a_tokenizer_that_decodes_to_the_text_and_counts_other_bytes_is_refused(tmp_path, prepared):
    library = Tokenizer.from_str(train_tokenizer(["some words of text"], 266).json)
    library.normalizer = normalizers.Replace("x", "yy")
    library.decoder = decoders.Sequence([library.decoder, decoders.Replace("yy", "x")])
    library.save(str(tmp_path / "doubled.json"))
    with pytest.raises(UserError, match=r"doubled.json would make bits per byte wrong: \d+\.txt: its tokens count"):
        prepare(replace(preparation(prepared), tokenizer=f"{tmp_path}/doubled.json"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Folders that cannot be written.


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("write", [0, 2, 6, 10])
def test_a_preparation_reports_a_full_disk_and_resumes_later(prepared, tmp_path, monkeypatch, write):
    """Fill the disk at one write after another: the record, a tokenizer file, the record, a part, a shard."""
    writes = iter(range(99))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: no_room() if next(writes) == write else None)
        with pytest.raises(UserError, match=rf"{tmp_path}/out cannot be written: .*No space left.*command continues"):
            prepare(preparation(prepared), tmp_path / "out")
    assert not [path for path in (tmp_path / "out").rglob("*.*") if path.suffix == ".partial" or len(path.suffix) == 33]
    prepare(preparation(prepared), tmp_path / "out")
    for path in (prepared / "made").rglob("*.*"):
        assert (tmp_path / "out" / path.relative_to(prepared / "made")).read_bytes() == path.read_bytes()


def test_a_preparation_says_that_it_waits_and_needs_no_locks(prepared, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=[BlockingIOError, None, OSError(errno.ENOSYS, "")]))
    for name, says in (("busy", "is being prepared by another process"), ("lustre", "is on a disk without locks")):
        prepare(preparation(prepared), tmp_path / name)
        assert f"{tmp_path / name} {says}" in capfd.readouterr().err


def test_a_tokenizer_that_cannot_be_used_leaves_no_folder(prepared, tmp_path):
    (tmp_path / "empty.json").write_text("{}")
    words = Tokenizer(models.WordLevel({"a": 0}, "a"))
    words.save(str(tmp_path / "words.json"))
    words.add_special_tokens(["<s>"])
    words.save(str(tmp_path / "lossy.json"))
    refused = {
        "none.json": f"{tmp_path}/none.json: no readable tokenizer",
        "empty.json": f"{tmp_path}/empty.json: no readable tokenizer",
        "words.json": "no token that starts a document",
        "lossy.json": "loses text",
    }
    for name, message in refused.items():
        with pytest.raises(UserError, match=message):
            prepare(replace(preparation(prepared), tokenizer=str(tmp_path / name)), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_an_invalid_option_is_named_before_anything_is_created(prepared, tmp_path):
    for name, value in {"vocab_size": 257, "sample_bytes": 0, "shard_tokens": 2**31, "val_fraction": math.nan}.items():
        with pytest.raises(UserError, match=f"--{name}={value} cannot work: "):
            prepare(replace(preparation(prepared), **{name: value}), tmp_path / "out")
    assert not (tmp_path / "out").exists()

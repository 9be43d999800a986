"""Test that damaged data and mistakes end in one message, are counted, or are repaired."""

import errno
import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data.dataset_folder
import data.prepare.preparation
import data.shards
from configs.schema import DataConfig, UserError
from data.dataset import Text, open_text
from data.packing import load_plan
from data.prepare.listing import find_corpus
from data.prepare.preparation import Preparation, prepare
from data.record import read_record
from data.shards import write_shard

SIZE = 270
few = settings(max_examples=40)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Return a folder with `text` and its dataset `made`."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "text").mkdir()
    for i in range(20):
        (folder / "text" / f"{i}.txt").write_text(f"document {i}: " + "some words of text " * i)
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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda one: st.lists(one, max_size=3),
    max_leaves=5,
)
records = st.dictionaries(st.sampled_from(["text", "id"]), json_values).map(lambda value: json.dumps(value).encode())
cut_records = st.tuples(records, st.integers(0, 9)).map(lambda one: one[0][: -one[1] or None])


@few
@given(st.lists(st.one_of(records, cut_records, st.binary(max_size=40)), max_size=6))
def test_any_lines_give_text_or_a_problem_each(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("lines")
    (folder / "x.jsonl").write_bytes(b"\n".join(lines))
    corpus = find_corpus(str(folder), on_error="skip")
    read = list(corpus.documents(corpus.files[0]))
    assert len(read) == sum(bool(line.strip()) for line in b"\n".join(lines).split(b"\n"))
    for document in read:
        assert bool(document.text) != bool(document.problem)
        document.text.encode()


# Tables.

NO_TEXT = {
    "list": pa.array([["a"], ["b"]]),
    "int64": pa.array([1, 2]),
    "double": pa.array([1.5, None]),
    "struct": pa.array([{"a": "x"}, {"a": "y"}]),
    "map": pa.array([[("a", "x")]] * 2, pa.map_(pa.string(), pa.string())),
    "date32": pa.array([1, 2], pa.date32()),
    "null": pa.nulls(2),
}


@pytest.mark.parametrize("kind", NO_TEXT)
@pytest.mark.parametrize("other", [True, False])
def test_a_column_that_holds_no_text_is_refused_and_those_that_do_are_named(tmp_path, kind, other):
    columns = {"text": NO_TEXT[kind]} | ({"body": pa.array(["a", "b"])} if other else {})
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    corpus = find_corpus(str(tmp_path), on_error="skip")
    says = rf"x\.parquet has {kind}.* in its column 'text', not text; " + (
        "give.*one of: body$" if other else "nor else"
    )
    with pytest.raises(UserError, match=says):
        list(corpus.documents(corpus.files[0]))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view(), "dictionary"]
)
def test_every_kind_of_text_column_is_read(tmp_path, kind):
    values = pa.array(["one", "naïve", "one", None], pa.string() if kind == "dictionary" else kind)
    values = values.dictionary_encode() if kind == "dictionary" else values
    pq.write_table(pa.table({"text": values}), tmp_path / "x.parquet")
    corpus = find_corpus(str(tmp_path), on_error="skip")
    assert [document.text for document in corpus.documents(corpus.files[0])] == ["one", "naïve", "one", ""]


def table_bytes() -> bytes:
    content = io.BytesIO()
    texts = [f"a text of some length, number {i}" for i in range(200)]
    pq.write_table(pa.table({"text": texts}), content, write_page_checksum=True, row_group_size=50)
    return content.getvalue()


TABLE = table_bytes()


def texts_of(path: Path) -> list[str]:
    corpus = find_corpus(str(path), on_error="skip")
    return [document.text for document in corpus.documents(corpus.files[0])]


@settings(max_examples=60)
@given(st.integers(0, len(TABLE) - 1), st.integers(1, 255))
def test_a_table_with_a_byte_that_flipped_is_refused_or_gives_its_texts(tmp_path_factory, place, mask):
    path = tmp_path_factory.mktemp("table") / "x.parquet"
    damaged = bytearray(TABLE)
    damaged[place] ^= mask
    path.write_bytes(damaged)
    try:
        texts = texts_of(path)
    except UserError as error:
        assert str(path) in str(error)
    else:
        assert len(texts) == 200 or place > len(TABLE) // 2  # the footer's facts about rows have no checksum


def test_a_table_whose_pages_are_corrupt_is_refused_and_named(tmp_path):
    damaged = bytearray(TABLE)
    damaged[60:90] = bytes(30)
    (tmp_path / "x.parquet").write_bytes(damaged)
    with pytest.raises(UserError, match=r"x\.parquet: cannot be read to its end"):
        texts_of(tmp_path / "x.parquet")


@pytest.mark.parametrize("name", [b"text", b"note"])
def test_a_table_whose_columns_have_names_of_no_text_is_refused(tmp_path, name):
    content = io.BytesIO()
    pq.write_table(pa.table({"text": ["a"], "note": ["b"]}), content, store_schema=False)
    (tmp_path / "x.parquet").write_bytes(content.getvalue().replace(name, b"\xb2" * 4))
    with pytest.raises(UserError, match=r"x\.parquet: not a parquet file"):
        texts_of(tmp_path / "x.parquet")


def test_a_table_with_fewer_rows_than_it_says_is_refused(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").write_bytes(TABLE)
    batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda table, *a, **k: list(batches(table, *a, **k))[:-1])
    with pytest.raises(UserError, match=r"x\.parquet is damaged: \d+ rows, but its metadata has 200"):
        texts_of(tmp_path / "x.parquet")


def test_a_file_that_vanished_since_it_was_listed_is_named(tmp_path):
    (tmp_path / "x.txt").write_text("text")
    corpus = find_corpus(str(tmp_path))
    (tmp_path / "x.txt").unlink()
    with pytest.raises(UserError, match=r"x\.txt: cannot be read"):
        list(corpus.documents(corpus.files[0]))


# Dataset folders.


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b"{}", b'{"shards": 3', b"[" * 99_999, b"\xff", "half", "types"]
)
def test_every_reader_names_a_damaged_record(folder, content):
    path = folder / "made" / "dataset.json"
    whole = path.read_text()
    changed = {"half": whole[: len(whole) // 2], "types": whole.replace('"tokens": ', '"tokens": "many", "x": ')}
    path.write_bytes(changed[content].encode() if isinstance(content, str) else content)
    for use in (lambda: opened(folder), lambda: prepare(preparation(folder), folder / "made")):
        with pytest.raises(
            UserError, match=r"dataset\.json is damaged; delete the folder .*made, and prepare it again"
        ):
            use()


@few
@given(st.data())
def test_a_record_with_any_value_replaced_is_read_or_refused(prepared, tmp_path_factory, data):
    facts = json.loads((prepared / "made" / "dataset.json").read_text())
    place = facts
    while isinstance(place, dict | list) and place:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if data.draw(st.booleans()) or not isinstance(place[key], dict | list):
            place[key] = data.draw(json_values)
            break
        place = place[key]
    folder = tmp_path_factory.mktemp("record")
    shutil.copytree(prepared / "made", folder / "made")
    (folder / "made" / "dataset.json").write_text(json.dumps(facts))
    try:
        assert opened(folder).train
    except UserError as error:
        assert "made" in str(error)


@pytest.mark.parametrize("content", [b"", b"no array", b"cut"])
def test_a_damaged_index_of_documents_is_named(folder, content):
    path = folder / "made" / "train_000000.starts.npy"
    path.write_bytes(path.read_bytes()[:-3] if content == b"cut" else content)
    with pytest.raises(UserError, match=r"train_000000\.starts\.npy is not the index .*; delete it"):
        opened(folder)
    path.unlink()
    assert len(opened(folder).train[0]) > 3


def test_a_damaged_plan_is_named(folder):
    opened(folder)
    (plan,) = (folder / "made" / "plans").glob("train*")
    (plan / "starts").write_bytes((plan / "starts").read_bytes()[:-8])
    with pytest.raises(UserError, match=r"plans/train.* is damaged.*; delete it, and it is made again"):
        opened(folder)
    shutil.rmtree(plan)
    opened(folder)


def test_shards_without_held_out_text_are_refused(folder, tmp_path):
    for name in ("train", "val"):
        write_shard(tmp_path / f"{name}.bin", np.zeros(0, int), 300)
    config = DataConfig(source=str(tmp_path), packing="best_fit", tokenizer=str(folder / "made" / "tokenizer"))
    with pytest.raises(UserError, match="no token of `train`"):
        open_text(config, SIZE, 16, 4, tmp_path / "cache")


# Folders that cannot be written.


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_a_prepared_dataset_opens_on_a_read_only_disk(folder, monkeypatch, capfd, packing):
    expected = opened(folder, packing).train[0][1]["inputs"].tolist()
    shutil.rmtree(folder / "made" / "plans", ignore_errors=True)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    monkeypatch.setattr(Path, "mkdir", no_room)
    assert opened(folder, packing).train[0][1]["inputs"].tolist() == expected
    log = capfd.readouterr().err
    assert ("cannot be written: each start makes this plan again" in log) == (packing == "best_fit")


def test_a_half_written_examination_is_repeated(folder):
    for sidecar in (folder / "made").glob("*.blocks"):  # without them shards are read completely, which is recorded
        sidecar.unlink()
    expected = opened(folder).fingerprint
    for path in (folder / "cache" / "examined").iterdir():
        path.write_bytes(path.read_bytes()[:20])
    assert opened(folder).fingerprint == expected


def test_plans_are_as_readable_as_the_umask_says(folder):
    opened(folder)
    umask = os.umask(0)
    os.umask(umask)
    paths = list((folder / "made" / "plans").rglob("*"))
    assert paths
    for path in paths:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask


def test_another_users_plan_is_recreated_in_the_cache(folder, monkeypatch):
    expected = len(opened(folder).train[0])

    def load(home: Path):
        if folder / "made" in home.parents:
            raise PermissionError(13, "Permission denied", str(home))
        return load_plan(home)

    monkeypatch.setattr(data.dataset_folder, "load_plan", load)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    # The shards' own indices have the same owner, and would be searched otherwise.
    for index in (folder / "made").glob("*.starts.npy"):
        index.unlink()
    assert len(opened(folder).train[0]) == expected
    assert len(list((folder / "cache" / "plans").iterdir())) == 2


@pytest.mark.parametrize("write", range(8))
def test_a_preparation_reports_a_full_disk_and_resumes_later(prepared, tmp_path, monkeypatch, write):
    """Fill the disk at one write after another: the record, a tokenizer file, the record, an index, a shard, its
    sidecar, the record."""
    writes = iter(range(99))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: no_room() if next(writes) == write else None)
        with pytest.raises(UserError, match=rf"{tmp_path}/out cannot be written: .*No space left.*command continues"):
            prepare(preparation(prepared), tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.partial"))
    prepare(preparation(prepared), tmp_path / "out")
    for path in (prepared / "made").rglob("*.*"):
        assert (tmp_path / "out" / path.relative_to(prepared / "made")).read_bytes() == path.read_bytes()


def test_a_complete_dataset_in_a_read_only_folder_opens(folder, monkeypatch):
    monkeypatch.setattr(data.prepare.preparation, "_only_one", no_room)
    prepare(preparation(folder), folder / "made")


# Places of a dataset.


def test_a_dataset_is_prepared_in_the_working_folder(prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare(preparation(prepared), Path("."))
    assert read_record(Path("."))["complete"]
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} >= {"lock", "dataset.json"}
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}?*"))  # no neighbour is created


def test_a_tokenizer_that_changed_under_a_preparation_is_refused(folder):
    (folder / "made" / "train_000001.bin").unlink()
    path = folder / "made" / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace("{", "{ ", 1))
    with pytest.raises(UserError, match="tokenizer is not the first shards"):
        prepare(preparation(folder), folder / "made")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("vocab_size", [0, 10, -5, 257, 2**22 + 1, 10**30]),
        ("sample_bytes", [0, -1]),
        ("shard_tokens", [0, -1, 2**31]),
        ("val_fraction", [0.0, float("nan"), float("inf")]),
        ("max_files", [0, -1]),
    ],
)
def test_an_invalid_option_is_named_before_anything_is_created(prepared, tmp_path, name, values):
    for value in values:
        options = {} if name == "max_files" else {name: value}
        with pytest.raises(UserError, match=f"--{name}={value} cannot work: "):
            prepare(replace(preparation(prepared), **options), tmp_path / "out", None if options else value)
    assert not (tmp_path / "out").exists()

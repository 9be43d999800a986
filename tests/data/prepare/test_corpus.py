import gzip
import re
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema import UserError
from data.prepare.corpus import Corpus
from data.prepare.listing import find_corpus
from data.prepare.source_files import CHUNK_BYTES
from data.record import hash_share
from tests.data.preparations import jsonl, write_files


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


def texts(corpus: Corpus) -> dict[str, str]:
    return {d.name: d.text for file in corpus.files for d in corpus.documents(file) if not d.problem}


def problems(corpus: Corpus) -> dict[str, str]:
    return {d.name: d.problem for file in corpus.files for d in corpus.documents(file) if d.problem}


def names(corpus: Corpus) -> list[str]:
    return [file.name for file in corpus.files]


def test_stdlib_source_leaves_out_installed_packages(tmp_path, monkeypatch):
    files = ("os.py", "json/tool.py", "notes.txt", "site-packages/jax/api.py", "a/dist-packages/b.py")
    write_files(tmp_path, dict.fromkeys(files, "x = 1"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert names(find_corpus("stdlib")) == ["json/tool.py", "os.py"]


def test_a_folder_or_a_glob_gives_its_text_files_in_the_order_of_their_names(tmp_path):
    files = {"b/2.md": "two", "a.txt": "one\r\n", "b/1.py": "three", "b/picture.png": "no text"}
    write_files(tmp_path, files)
    assert texts(find_corpus(str(tmp_path))) == {name: files[name] for name in ("a.txt", "b/1.py", "b/2.md")}
    for pattern, matches in {"*.txt": ["a.txt"], "b/*": ["1.py", "2.md"], "**/*.??": ["b/1.py", "b/2.md"]}.items():
        assert names(find_corpus(f"{tmp_path}/{pattern}")) == matches


@pytest.mark.parametrize(
    ("text", "spread"),
    [
        *(("".join(f"line {i} {'é' * (i % 90)}{end}" for i in range(2000)), 200) for end in ("\n", "\r\n")),
        ("".join(f"line {i}\n" for i in range(9000)) + "a last line without an end", 20),
        ("word " * 10_000, 5),
        ("é" * 50_000, 2),
        ("a " + "x€" * 40_000 + "\nshort\n" + "y" * 40_000, CHUNK_BYTES),
    ],
)
def test_a_single_file_is_cut_at_line_ends_else_spaces_else_characters_and_nothing_is_lost(tmp_path, text, spread):
    (tmp_path / "one.txt").write_bytes(text.encode())
    pieces = list(texts(find_corpus(f"{tmp_path}/one.txt")).values())
    assert "".join(pieces) == text and len(pieces) > 2
    if spread > 5 and spread < CHUNK_BYTES:
        assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert all(abs(len(piece.encode()) - CHUNK_BYTES) < spread for piece in pieces[:-1])


RECORDS = [{"text": "one"}, {"text": "two\nlines", "id": 7}, {"id": 3, "text": "naïve"}]


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        *(("x.jsonl", bytes), ("x.jsonl.gz", gzip.compress), ("x.jsonl.zst", zstd), ("x.json.gz", gzip.compress)),
        *(("x.json.zst", zstd), ("x.JSONL", bytes)),
    ],
)
def test_every_line_of_a_jsonl_is_a_document_compressed_or_not(tmp_path, name, pack):
    content = jsonl(*RECORDS[:2]) + "\n" + jsonl(RECORDS[2])
    corpus = find_corpus(write_files(tmp_path, {name: pack(content.encode())}))
    assert texts(corpus) == {f"{name} line 1": "one", f"{name} line 2": "two\nlines", f"{name} line 4": "naïve"}


def test_a_table_gives_its_rows(tmp_path):
    table = pa.table({"id": [1, 2], "body": ['one, "two"\nlines', "naïve"]})
    pq.write_table(table, tmp_path / "e.parquet", row_group_size=1)
    corpus = find_corpus(str(tmp_path), text_column="body")
    assert texts(corpus) == {"e.parquet row 1": 'one, "two"\nlines', "e.parquet row 2": "naïve"}
    with pytest.raises(UserError, match=r"e\.parquet has no column 'text' with text; give --text_column, one of: body"):
        texts(find_corpus(str(tmp_path)))


@pytest.mark.parametrize(("name", "encoding"), [("a.txt", "utf-16"), ("a.jsonl", "utf-16"), ("a.txt", "utf-16-le")])
def test_a_byte_order_mark_is_no_text_and_utf_16_is_refused_with_its_name(tmp_path, name, encoding):
    content = jsonl({"text": "words"}) if name == "a.jsonl" else "words"
    (tmp_path / "b.txt").write_text("another")
    (tmp_path / name).write_bytes(content.encode("utf-8-sig"))
    assert "words" in texts(find_corpus(str(tmp_path))).values()
    (tmp_path / name).write_bytes(content.encode(encoding))
    with pytest.raises(UserError, match=rf"{name}.*UTF-16, not UTF-8"):
        texts(find_corpus(str(tmp_path)))


def test_excluded_files_are_listed_with_the_option_that_includes_them(tmp_path):
    write_files(tmp_path, {"a.txt": "one", "b.rst": "two" * 9, "c.json": "{}", "d.txt.gz": "x", "e.png": "x" * 999})
    corpus = find_corpus(str(tmp_path))
    assert all(f"1 {extension}" in corpus.left_out for extension in (".rst", ".json", ".gz", ".png"))
    assert "--text_extensions" in corpus.left_out
    taken = find_corpus(str(tmp_path), text_extensions=".rst")
    assert names(taken) == ["a.txt", "b.rst"]
    with pytest.raises(UserError, match=r"--text_extensions=rst cannot work: write \.rst or \.rst,\.tex"):
        find_corpus(str(tmp_path), text_extensions="rst")


def bad_files(folder: Path) -> str:
    pq.write_table(pa.table({"id": [0, 1, 2], "text": ["fine", None, ""]}), folder / "e.parquet", row_group_size=2)
    files = {
        "a.txt": "",
        "b.txt": "café".encode("latin-1"),
        "c.jsonl": jsonl({"text": "fine"}) + "{no json\n" + jsonl({"id": 1}, ["text"], {"text": None}, {"text": ""}),
        "d.jsonl": b"".join(b'{"text": ' + line + b"}\n" for line in BAD_LINES),
    }
    return write_files(folder, files)


BAD_LINES = {
    b'"caf\xe9"': "not UTF-8",
    b'"half \\ud83d of a smile"': "invalid Unicode (a lone surrogate)",
    b'"\xed\xa0\xbd"': "invalid Unicode (a lone surrogate)",
    b"[" * 100_000 + b"]" * 100_000: "not JSON",
    b'"cut': "not JSON",
    b"1" + b"0" * 5000: "no text under 'text'",
}
BAD = {
    "a.txt": "empty",
    "b.txt": "not UTF-8",
    "c.jsonl line 2": "not JSON",
    "c.jsonl line 3": "no text under 'text'",
    "c.jsonl line 4": "no text under 'text'",
    "c.jsonl line 5": "no text under 'text'",
    "c.jsonl line 6": "empty",
    **{f"d.jsonl line {i}": problem for i, problem in enumerate(BAD_LINES.values(), 1)},
    "e.parquet row 2": "empty",
    "e.parquet row 3": "empty",
}


def test_the_first_document_that_cannot_be_read_stops_or_all_are_skipped_each_with_its_place_and_reason(tmp_path):
    corpus = find_corpus(bad_files(tmp_path), on_error="skip")
    assert problems(corpus) == BAD
    stopping = find_corpus(str(tmp_path))
    for place in ("a.txt", "c.jsonl line 2", "d.jsonl line 1", "e.parquet row 2"):
        (file,) = (file for file in stopping.files if file.name == place.split()[0])
        with pytest.raises(UserError, match=rf"{re.escape(place)}: {BAD[place]};.*--on_error=skip"):
            list(stopping.documents(file))
    assert list(texts(corpus)) == ["c.jsonl line 1", "e.parquet row 1"]
    write_files(tmp_path, {"f/x.jsonl": b'{"id": 1' + b"0" * 5000 + b', "text": "fine"}'})
    assert list(texts(find_corpus(f"{tmp_path}/f")).values()) == ["fine"]


@pytest.mark.parametrize(
    ("compression", "pack"),
    [(".gz", gzip.compress), (".zst", zstd)],
)
def test_a_compressed_file_that_is_empty_or_cut_off_is_refused_and_named(tmp_path, compression, pack):
    content = pack("".join(jsonl({"text": hash_share(str(i))}) for i in range(3000)).encode())
    for left in (b"", content[: len(content) // 2]):
        write_files(tmp_path, {f"x.jsonl{compression}": left})
        with pytest.raises(UserError, match=rf"x\.jsonl\{compression}: cannot be read to its end"):
            texts(find_corpus(str(tmp_path), on_error="skip"))


@pytest.mark.parametrize("source", ["nowhere", "", "picture.png", "*.md", "gs://bucket/x"])
def test_a_source_without_text_is_refused_and_named(tmp_path, monkeypatch, source):
    write_files(tmp_path, {"empty/x.png": "x", "picture.png": "x"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=source.replace("*", r"\*") or str(tmp_path)):
        find_corpus(source or str(tmp_path))


def test_a_file_that_cannot_be_read_stops_or_is_reported(tmp_path, capfd):
    write_files(tmp_path, {"a.txt": "one"})
    (tmp_path / "b.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"b\.txt cannot be read: .*--on_error=skip"):
        find_corpus(str(tmp_path))
    assert names(find_corpus(str(tmp_path), on_error="skip")) == ["a.txt"]
    assert "b.txt cannot be read" in capfd.readouterr().err


def test_the_version_changes_with_the_files(tmp_path):
    source = write_files(tmp_path, {"a.txt": "one", "b.txt": "two"})
    versions = [find_corpus(source).version, find_corpus(source).version]
    write_files(tmp_path, {"b.txt": "other"})
    versions.append(find_corpus(source).version)
    write_files(tmp_path, {"c.txt": "three"})
    versions.append(find_corpus(source).version)
    assert versions[0] == versions[1] and len(set(versions)) == 3

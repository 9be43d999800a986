import csv
import errno
import gzip
import io
import os
import re
import sysconfig
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare import listing
from data.prepare.chat_formats import OTHERWISE
from data.prepare.corpus import Corpus
from data.prepare.listing import find_corpus, hold_out
from data.prepare.selection import hash_share
from data.prepare.source_files import CHUNK_BYTES, SourceFile
from system.errors import UserError
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


def test_linked_folders_are_read_once_under_their_own_name_if_they_have_one(tmp_path):
    write_files(tmp_path, {"b/1.py": "three", "b/2.md": "two", "other/more/a.txt": "one"})
    (tmp_path / "b/round").symlink_to(tmp_path)
    (tmp_path / "a link").symlink_to(tmp_path / "b")
    assert names(find_corpus(f"{tmp_path}/[ab]*/*.py")) == ["b/1.py"]
    (tmp_path / "b/out").symlink_to(tmp_path / "other")
    (tmp_path / "b/out again").symlink_to(tmp_path / "other/more")
    assert names(find_corpus(f"{tmp_path}/b")) == ["1.py", "2.md", "out/more/a.txt"]


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


PACKED = {"jsonl": bytes, "JSONL": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstd, "json.gz": gzip.compress}
PACKED |= {"json.zst": zstd, "JSONL.GZ": gzip.compress}


@pytest.mark.parametrize("suffix", PACKED)
def test_every_line_of_a_jsonl_is_a_document_compressed_or_not(tmp_path, suffix):
    name = f"x.{suffix}"
    content = jsonl({"text": "one"}, {"text": "two\nlines", "id": 7}) + "\n" + jsonl({"id": 3, "text": "naïve"})
    corpus = find_corpus(write_files(tmp_path, {name: PACKED[suffix](content.encode())}))
    assert texts(corpus) == {f"{name} line 1": "one", f"{name} line 2": "two\nlines", f"{name} line 4": "naïve"}


VALUES = ["one", 'two, "quoted"\tand\r\nlines\n', "naïve", "x" * 2**21, " ", "after a row of 2 MB"]


@pytest.mark.parametrize(("packing", "pack"), [("", bytes), (".gz", gzip.compress), (".zst", zstd)])
@pytest.mark.parametrize(("kind", "separator"), [("csv", ","), ("TSV", "\t")])
def test_every_row_of_a_csv_or_tsv_is_a_document_compressed_or_not(tmp_path, kind, separator, packing, pack):
    content = io.StringIO()
    csv.writer(content, delimiter=separator).writerows([["id", "text"], *enumerate(VALUES)])
    name = f"x.{kind}{packing}"
    for mark in ("utf-8", "utf-8-sig"):
        corpus = find_corpus(write_files(tmp_path, {name: pack(content.getvalue().encode(mark))}))
        assert texts(corpus) == dict(zip([f"{name} line {line}" for line in (2, 3, 6, 7, 8, 9)], VALUES))


def test_a_line_s_end_within_quotes_is_kept_wherever_the_reader_s_buffer_ends(tmp_path):
    """pyarrow's reader loses a byte where its block of 1 MB ends in one (apache/arrow#51368)."""
    for size in range(2**20 - 15, 2**20 - 10):
        value = "z" * size + "A\r\nB"
        (tmp_path / "x.csv").write_text(f'id,text\n0,"{value}"\n1,plain\n', newline="")
        assert list(texts(find_corpus(str(tmp_path))).values()) == [value, "plain"]


def test_a_bad_row_of_a_csv_is_skipped_with_its_line_and_reason(tmp_path):
    rows = [b"text,id", b"fine,1", b"hello, world,2", b"short", b"caf\xe9,4", b",5", b"", b'"two\nlines",6', b"fine,7"]
    corpus = find_corpus(write_files(tmp_path, {"x.csv": b"\n".join(rows)}), on_error="skip")
    unequal = "not as many values as the header has names; a value with a separator or a line's end needs quotes"
    bad = {3: unequal, 4: unequal, 5: "not UTF-8", 6: "empty"}
    assert problems(corpus) == {f"x.csv line {line}": problem for line, problem in bad.items()}
    assert texts(corpus) == {"x.csv line 2": "fine", "x.csv line 8": "two\nlines", "x.csv line 10": "fine"}
    with pytest.raises(UserError, match=r"x\.csv line 3: not as many values .* needs quotes; .*--on_error=skip"):
        texts(find_corpus(str(tmp_path)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no column 'text', but none; .*; the file's first line names its columns, with commas between"),
        ("body;id\nx;1\n", "has no column 'text', but body;id; .*--text_column names another.*, with commas between"),
        ("text\n".encode("utf-16"), "UTF-16, not UTF-8; convert it: iconv"),
        ('text,id\nfine,1\n"never closed,2\nx,3\n', "the row that begins at line 3 cannot be read: unexpected end"),
        ('text,id\n"said" he,1\n', "the row that begins at line 2 cannot be read: ',' expected after '\"'"),
    ],
)
def test_a_csv_without_the_column_or_with_damaged_quotes_is_refused(tmp_path, content, says):
    write_files(tmp_path, {"x.csv": content})
    with pytest.raises(UserError, match=rf"x\.csv:? {says}"):
        texts(find_corpus(str(tmp_path), on_error="skip"))


def test_a_source_s_csv_is_read_if_there_is_no_other_text(tmp_path):
    write_files(tmp_path, {"a/x.csv": "text\none\n", "a/y.tsv": "text\ntwo\n", "b/x.csv": "k\n1\n", "b/z.txt": "three"})
    corpus = find_corpus([f"{tmp_path}/a", f"{tmp_path}/b", f"{tmp_path}/b/x.csv"], text_column="k")
    assert names(corpus) == ["a/x.csv", "a/y.tsv", "b/z.txt", "x.csv/x.csv"]
    assert list(texts(find_corpus(f"{tmp_path}/a")).values()) == ["one", "two"]
    corpus = find_corpus(f"{tmp_path}/b")
    assert names(corpus) == ["z.txt"] and "left out: 1 .csv" in corpus.left_out
    assert "a .csv or .tsv is read in a source without other text: --source='DIR/*.csv'" in corpus.left_out
    assert names(find_corpus(f"{tmp_path}/b", exclude=["*.txt"])) == ["x.csv"]


@pytest.mark.parametrize(
    ("files", "read"),
    [
        (("README.md", "a.csv", "b.tsv"), ["a.csv", "b.tsv"]),
        (("README.md", "a.csv", "b.parquet", "c.txt"), ["b.parquet"]),
        (("README.md", "a.png"), ["README.md"]),
    ],
)
def test_the_hub_s_csv_is_read_if_there_is_no_other_table(monkeypatch, files, read):
    listed = [SourceFile(name, f"hf:owner/name@0:{name}", 1) for name in files]
    monkeypatch.setattr(listing, "_hub_files", lambda *_: listed)
    assert names(find_corpus("hf:owner/name")) == read


def test_a_table_gives_its_rows(tmp_path):
    table = pa.table({"id": [1, 2], "body": ['one, "two"\nlines', "naïve"]})
    pq.write_table(table, tmp_path / "e.parquet", row_group_size=1)
    corpus = find_corpus(str(tmp_path), text_column="body")
    assert texts(corpus) == {"e.parquet row 1": 'one, "two"\nlines', "e.parquet row 2": "naïve"}


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
    b'"a \0 byte"': "not JSON",
    b'"half \\ud83d of a smile"': "invalid Unicode (a lone surrogate)",
    b"[" * 100_000 + b"]" * 100_000: "not JSON",
    b'"cut': "not JSON",
    b"1" + b"0" * 400: f"no text under 'text'; {OTHERWISE}",
}
BAD = {
    "a.txt": "empty",
    "b.txt": "not UTF-8",
    "c.jsonl line 2": "not JSON",
    **{f"c.jsonl line {i}": f"no text under 'text'; {OTHERWISE}" for i in (3, 4, 5)},
    "c.jsonl line 6": "empty",
    **{f"d.jsonl line {i}": problem for i, problem in enumerate(BAD_LINES.values(), 1)},
    "e.parquet row 2": "empty",
    "e.parquet row 3": "empty",
}


def test_the_first_document_that_cannot_be_read_stops_or_all_are_skipped_each_with_its_place_and_reason(tmp_path):
    corpus = find_corpus(bad_files(tmp_path), on_error="skip")
    assert problems(corpus) == BAD
    assert list(texts(corpus)) == ["c.jsonl line 1", "e.parquet row 1"]
    stopping = find_corpus(str(tmp_path))
    files = {file.name: file for file in stopping.files}
    for place in ("b.txt", "c.jsonl line 2", "d.jsonl line 1"):
        with pytest.raises(UserError, match=rf"{re.escape(place)}: {BAD[place]};.*--on_error=skip"):
            list(stopping.documents(files[place.split()[0]]))
    for name in ("a.txt", "e.parquet"):  # an empty one stops nothing
        assert {document.problem for document in stopping.documents(files[name])} - {""} == {"empty"}


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.json.gz", "x.csv.gz"])
def test_zeros_behind_the_content_of_a_gz_are_no_damage(tmp_path, name):
    content = "text\none\ntwo\n" if "csv" in name else jsonl({"text": "one"}, {"text": "two"})
    write_files(tmp_path, {name: gzip.compress(content.encode()) + bytes(512)})
    assert list(texts(find_corpus(str(tmp_path))).values()) == ["one", "two"]


NUL = "NUL bytes in place of text: the file was damaged"


@pytest.mark.parametrize(
    ("files", "bad"),
    [
        ({"x.jsonl": jsonl({"text": "one"}).encode() + bytes(300)}, "x.jsonl line 2"),
        ({"x.jsonl": jsonl({"text": "one"}).encode() + b'{"text": "tw' + bytes(300)}, "x.jsonl line 2"),
        ({"x.txt": b"one" + bytes(300), "y.txt": "another"}, "x.txt"),
        ({"x.txt": bytes(300) + b"one", "y.txt": "another"}, "x.txt"),
        ({"x.csv": b"text\none\n" + bytes(300)}, "x.csv line 3"),
        ({"x.csv": b"text,id\none,1\n" + bytes(300)}, "x.csv line 3"),
    ],
)
def test_nul_bytes_are_called_damage_and_not_utf_16(tmp_path, files, bad):
    corpus = find_corpus(write_files(tmp_path, files), on_error="skip")
    ((name, problem),) = problems(corpus).items()
    assert name == bad and problem.startswith(NUL) and len(texts(corpus)) == 1


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("zst", zstd)])
def test_a_compressed_file_that_is_empty_or_cut_off_is_refused_and_named(tmp_path, suffix, pack):
    content = pack("".join(jsonl({"text": hash_share(str(i))}) for i in range(3000)).encode())
    for part in (b"", content[: len(content) // 2]):
        write_files(tmp_path, {f"x.jsonl.{suffix}": part})
        with pytest.raises(UserError, match=rf"x\.jsonl\.{suffix}: cannot be read to its end"):
            texts(find_corpus(str(tmp_path), on_error="skip"))


COLUMNS = {"list<element: string>": [["a"], ["b"]], "double": [1.5, None], "int64": [1, 2]}
COLUMNS |= {"struct<en: string, de: string>": [{"en": "one", "de": "eins"}] * 2}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_without_text_is_refused(tmp_path, kind):
    pq.write_table(pa.table({"text": COLUMNS[kind], "body": ["a", "b"]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=rf"x\.parquet: the column 'text' is {kind}, not text; .*--text_column names"):
        texts(find_corpus(str(tmp_path)))
    with pytest.raises(UserError, match=r"x\.parquet has no column 'words', but text, body; .*--text_column"):
        texts(find_corpus(str(tmp_path), text_column="words"))


def test_every_kind_of_text_column_is_read(tmp_path):
    values = pa.array(["one", "naïve", "one", None])
    for column in (values, values.dictionary_encode(), *map(values.cast, (pa.binary(), pa.string_view()))):
        pq.write_table(pa.table({"text": column}), tmp_path / "x.parquet")
        assert list(texts(find_corpus(str(tmp_path))).values()) == ["one", "naïve", "one"]


@pytest.mark.parametrize("mark", ["utf-8-sig", "utf-8"])
def test_a_byte_order_mark_is_no_text_in_any_format(tmp_path, mark):
    words = "\ufeffwords" if mark == "utf-8-sig" else "words"
    pq.write_table(pa.table({"text": [words]}), tmp_path / "a.parquet")
    write_files(tmp_path, {"b.jsonl": jsonl({"text": words}).encode(mark), "c.txt": words, "d.py": words})
    assert list(texts(find_corpus(str(tmp_path))).values()) == ["words"] * 4
    assert list(texts(find_corpus(f"{tmp_path}/c.txt")).values()) == ["words"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_refused_with_its_name(tmp_path, name, encoding):
    content = jsonl({"text": "words"}) if name == "a.jsonl" else "words"
    write_files(tmp_path, {name: content.encode(encoding), "b.txt": "another"})
    with pytest.raises(UserError, match=rf"{name}.*: UTF-16, not UTF-8; convert it: iconv"):
        texts(find_corpus(str(tmp_path)))


def test_hidden_files_and_broken_links_are_left_out_and_counted(tmp_path):
    files = dict.fromkeys(("a.txt", ".git/b.txt", "c/.venv/d.py", "c/._e.txt", "c/f.txt"), "words")
    write_files(tmp_path, files)
    (tmp_path / "g.txt").symlink_to("nowhere")
    corpus = find_corpus(str(tmp_path))
    assert names(corpus) == ["a.txt", "c/f.txt"]
    assert "left out: 4 hidden or linked to nothing (.git ...)" in corpus.left_out
    assert names(find_corpus(f"{tmp_path}/.git")) == ["b.txt"]


def test_what_is_left_out_of_many_sources_is_said_once(tmp_path):
    """The five most frequent extensions have their counts, the others one count, and hidden files one, too."""
    files = ["a.txt", ".x", ".y", *(f"name.{kind}" for kind in "abcdefg"), *(f"more.{kind}" for kind in "efg")]
    write_files(tmp_path, {f"{source}/{name}": "words" for source in "uvw" for name in files})
    corpus = find_corpus([f"{tmp_path}/{source}" for source in "uvw"], exclude=["w"])
    assert corpus.left_out == (
        "; left out: 4 .e, 4 .f, 4 .g, 2 .a, 2 .b, 4 of 2 other extensions (data.prepare and evaluate.py take "
        "--text_extensions), 6 hidden or linked to nothing (.x ...), 11 by --exclude"
    )


def test_patterns_exclude_paths_folders_and_files(tmp_path):
    files = ("a.txt", "a_test.txt", "x/testdata/b.txt", "x/testdata/y/c.txt", "x/d.txt", "x/vendor/e.txt")
    source = write_files(tmp_path, dict.fromkeys(files, "words"))
    corpus = find_corpus(source, exclude=("testdata", "*_test.*", "x/v*", "z"))
    assert names(corpus) == ["a.txt", "x/d.txt"] and "left out: 4 by --exclude" in corpus.left_out
    with pytest.raises(UserError, match="no file is left; left out: 6 by --exclude"):
        find_corpus(source, exclude=("*",))


def test_several_sources_are_one_corpus_in_their_order(tmp_path):
    write_files(tmp_path, {"ko/a.txt": "one", "ar/a.txt": "two", "ar/b.md": "no", "c.txt": "three"})
    sources = [f"{tmp_path}/ko", f"{tmp_path}/ar/*.txt", f"{tmp_path}/c.txt", f"{tmp_path}/ko/*"]
    corpus = find_corpus(sources)
    assert [document.text for file in corpus.files for document in corpus.documents(file)] == ["one", "two", "three"]
    assert corpus.source == " ".join(sources) and len({file.url for file in corpus.files}) == 3
    assert find_corpus(sources).version == corpus.version != find_corpus(sources[:2]).version
    with pytest.raises(UserError, match=r"nowhere: nothing found there"):
        find_corpus([*sources, "nowhere"])
    for other in ("stdlib", "hf:owner/name"):
        with pytest.raises(UserError, match="several sources are files, folders and globs on this machine"):
            find_corpus([sources[0], other])


def test_a_source_is_another_version_exactly_if_its_text_is(tmp_path, monkeypatch):
    """A small source is compared by content, a large one by sizes and times of change."""

    def version(text: str, changed: int = 1_700_000_000) -> str:
        (tmp_path / "a.txt").write_text(text)
        os.utime(tmp_path / "a.txt", (changed, changed))
        return find_corpus(str(tmp_path)).version

    first = version("one")
    assert version("two") != first
    assert version("one", 1_800_000_000) == first
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert find_corpus(str(tmp_path)).version != first
    monkeypatch.setattr(listing, "COMPARED_BYTES", 2)
    assert version("one") == version("two") != version("one", 1_800_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(listing, "COMPARED_BYTES", 99)
        patch.setattr(listing, "open_source", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(UserError, match=r"a\.txt: cannot be read to its end: .*Permission denied"):
            version("one")


@pytest.mark.parametrize(
    ("files", "held_out", "tests"),
    [
        (("train-00000-of-00002.parquet", "validation-00000-of-00001-869c.parquet"), 1, 0),
        (("data/train.jsonl", "data/val.jsonl.gz", "data/test.jsonl"), 1, 1),
        (("train/a.jsonl", "test/b.jsonl", "dev/c.jsonl", "dev/c.txt"), 1, 1),
        (("a.txt", "b.txt", "validation.txt"), 1, 0),
        (("a.jsonl", "eval_3.jsonl"), 1, 0),
        (("README.md", "test_cli_hint_suite.txt", "src/a.txt"), 0, 0),
        (("cmd/test.py", "cmd/testdata/test/x.txt", "test/fixed/a.txt", "requirements/test.txt"), 0, 0),
        (("requirements/base.txt", "requirements/dev.txt", "dev-guide.txt"), 0, 0),
        (("test-00000.jsonl", "test-00001.jsonl"), 0, 0),
    ],
)
def test_only_names_of_published_splits_hold_out_or_refuse(tmp_path, files, held_out, tests):
    write_files(tmp_path, dict.fromkeys(files, "words"))
    corpus = find_corpus(str(tmp_path))
    if tests:
        with pytest.raises(UserError, match=rf"{tests} file\(s\) of a test split, .*--exclude='\[Tt\]est\*'"):
            hold_out(corpus)
        corpus = find_corpus(str(tmp_path), exclude=["[Tt]est*"])
    assert sum(file.held_out for file in hold_out(corpus).files) == held_out


def test_extensions_are_left_out_and_counted_or_added(tmp_path):
    files = {"a.pptx": b"PK\x03\x04\xff", "b.tex": "é" * 5000, "c.json": "[]", "d.gz": gzip.compress(b"x"), "e": "x"}
    source = write_files(tmp_path, files)
    with pytest.raises(UserError, match=r"no file of text found there.*take --text_extensions") as error:
        find_corpus(source)
    assert all(f"1 {extension}" in str(error.value) for extension in (".pptx", ".json", ".gz", "without an extension"))
    for extensions in (".tex", ".Tex, rst"):
        assert names(find_corpus(source, text_extensions=extensions)) == ["b.tex"]

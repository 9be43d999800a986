import sysconfig
from pathlib import Path

import pytest

from configs.schema import UserError
from data.corpus import CHUNK_CHARACTERS, Corpus, read_corpus


def write_files(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


def many(first: int, last: int) -> dict[str, str]:
    return {f"part{i % 7}/{i}.txt": f"text {i}" for i in range(first, last)}


def names(corpus: Corpus) -> tuple[set[str], set[str]]:
    return {document.name for document in corpus.train}, {document.name for document in corpus.val}


def test_stdlib_source_is_the_standard_library_of_this_python():
    corpus = read_corpus("stdlib", 0.05)
    train, val = names(corpus)
    assert {"argparse.py", "json/decoder.py"} <= train | val
    assert all(name.endswith(".py") for name in train | val)


def test_stdlib_source_leaves_out_installed_packages(tmp_path, monkeypatch):
    files = ("os.py", "json/tool.py", "notes.txt", "site-packages/jax/api.py", "a/dist-packages/b.py")
    write_files(tmp_path, dict.fromkeys(files, "x = 1"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    train, val = names(read_corpus("stdlib", 0.5))
    assert train | val == {"os.py", "json/tool.py"}


def test_folder_gives_its_text_files_in_the_order_of_their_names(tmp_path):
    files = {"b/2.md": "two", "a.txt": "one", "b/1.py": "three", "picture.png": "no text", "empty.txt": ""}
    corpus = read_corpus(write_files(tmp_path, files), 0.4)
    for part in (corpus.train, corpus.val):
        assert [document.name for document in part] == sorted(document.name for document in part)
    assert {d.name: d.text for d in corpus.train + corpus.val} == {n: files[n] for n in ("a.txt", "b/1.py", "b/2.md")}


def test_documents_keep_their_side_when_others_come_and_go(tmp_path):
    source = write_files(tmp_path, many(0, 200))
    train, val = names(read_corpus(source, 0.2))
    write_files(tmp_path, many(200, 400))
    for i in range(50):
        (tmp_path / f"part{i % 7}" / f"{i}.txt").unlink()
    train_after, val_after = names(read_corpus(source, 0.2))
    assert len(train_after | val_after) == 350
    assert not (train & val_after or val & train_after)


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.8])
def test_held_out_share_is_near_val_fraction(tmp_path, fraction):
    train, val = names(read_corpus(write_files(tmp_path, many(0, 600)), fraction))
    assert not train & val
    assert len(train | val) == 600
    assert abs(len(val) / 600 - fraction) < 0.05


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_each_side_gets_a_document_however_few_there_are(tmp_path, fraction):
    train, val = names(read_corpus(write_files(tmp_path, {"a.txt": "a", "b.txt": "b"}), fraction))
    assert len(train) == len(val) == 1


def test_files_that_are_not_utf8_are_skipped_and_named(tmp_path):
    write_files(tmp_path, {"a.txt": "a", "b.txt": "b"})
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    corpus = read_corpus(str(tmp_path), 0.5)
    assert corpus.skipped == ["latin.txt"]
    assert names(corpus)[0] | names(corpus)[1] == {"a.txt", "b.txt"}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", ["", "a last line without an end"])
def test_single_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path, end, last):
    text = "".join(f"line {i} {'é' * (i % 90)}{end}" for i in range(2000)) + last
    path = tmp_path / "one.txt"
    path.write_bytes(text.encode())
    corpus = read_corpus(str(path), 0.3)
    pieces = [d.text for d in sorted(corpus.train + corpus.val, key=lambda d: d.name)]
    assert "".join(pieces) == text
    assert all(piece.endswith(end) and CHUNK_CHARACTERS <= len(piece) < CHUNK_CHARACTERS + 110 for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("files", "source", "told"),
    [
        ({}, "nowhere", "neither a file nor a folder"),
        ({}, ".", r"0 document\(s\)"),
        ({"picture.png": "x"}, ".", r"0 document\(s\)"),
        ({"only.txt": "x"}, ".", r"1 document\(s\).* at least 2"),
        ({"short.txt": "x"}, "short.txt", r"1 document\(s\).* at least 2"),
    ],
)
def test_too_little_text_is_refused_with_its_source_named(tmp_path, files, source, told):
    write_files(tmp_path, files)
    path = str(tmp_path / source)
    with pytest.raises(UserError, match=told) as error:
        read_corpus(path, 0.1)
    assert f"--data.source={path}" in str(error.value)


def test_a_single_file_that_is_not_utf8_is_refused_for_that_reason(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("café\n".encode("latin-1") * 10_000)
    with pytest.raises(UserError, match="UTF-8"):
        read_corpus(str(path), 0.1)

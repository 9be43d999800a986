"""Test which files on this machine are text: links, unreadable files, and paths with a glob's characters."""

import os
from pathlib import Path

import pytest

from configs.schema import DataConfig, UserError
from data.prepare.listing import find_corpus
from data.prepare.preparation import prepare_raw
from data.record import hash_share, read_record
from tests.data.preparations import write_files


def write(folder: Path, *names: str) -> Path:
    write_files(folder, {name: b"text of " + name.encode(errors="replace") for name in names})
    return folder


def texts(source: object, **options) -> dict[str, str]:
    corpus = find_corpus(str(source), **options)
    return {d.name.removesuffix("#00000000"): d.text for file in corpus.files for d in corpus.documents(file)}


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Return a folder with two files, links to a file and a folder elsewhere, and some to what it has already."""
    write(tmp_path / "elsewhere", "one.txt", "more/two.txt", "blob")
    folder = write(tmp_path / "text", "a.txt", "sub/b.txt")
    for name, target in {
        "link.txt": tmp_path / "elsewhere" / "one.txt",
        "linked": tmp_path / "elsewhere" / "more",
        "named.txt": tmp_path / "elsewhere" / "blob",  # like the hub's cache
        **{"0again.txt": folder / "a.txt", "0whole": folder, "0sub": folder / "sub", "sub/up": folder},
        "linked2": tmp_path / "elsewhere" / "more",
    }.items():
        (folder / name).symlink_to(target)
    return folder


LINKED = {
    "a.txt": "text of a.txt",
    "link.txt": "text of one.txt",
    "linked/two.txt": "text of more/two.txt",
    "named.txt": "text of blob",
    "sub/b.txt": "text of sub/b.txt",
}


def test_links_are_followed_and_each_text_is_read_once_under_its_own_name(linked, tmp_path, capsys):
    assert texts(linked) == LINKED
    (tmp_path / "alias").symlink_to(linked)
    (linked / "itself").symlink_to(linked / "itself")
    assert texts(tmp_path / "alias", on_error="skip") == LINKED
    assert "itself cannot be read: Too many levels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.txt", ["a.txt", "link.txt", "named.txt"]),
        ("l*/*.txt", ["linked/two.txt"]),
        ("**/*.txt", list(LINKED)),
        ("0sub/*.txt", ["b.txt"]),
        ("**/0su*/*.txt", ["0sub/b.txt"]),
    ],
)
def test_globs_follow_links_and_skip_folders_that_cannot_match(linked, monkeypatch, pattern, names):
    forbidden(monkeypatch, *["sub"] * ("**" not in pattern and "sub" not in pattern))
    assert list(texts(f"{linked}/{pattern}")) == names


def forbidden(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Deny permission for files and folders of these names."""
    access, scandir = os.access, os.scandir

    def denying_scandir(path: str | int):
        if isinstance(path, str) and os.path.basename(path) in names:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "access", lambda path, mode: os.path.basename(path) not in names and access(path, mode))
    monkeypatch.setattr(os, "scandir", denying_scandir)


@pytest.mark.parametrize(
    ("name", "why", "read"),
    [
        *(("gone.txt", "a link that leads nowhere", 5), ("gone_folder", "a link that leads nowhere", 5)),
        *(("a.txt", "no permission to read it", 4), ("sub", "Permission denied", 4)),
    ],
)
def test_what_cannot_be_read_is_refused_or_reported_and_counted(linked, monkeypatch, capsys, name, why, read):
    (linked / "0picture.png").symlink_to("/nowhere/at/all")  # no text file, wherever it leads
    for link in ("0sub", "0again.txt"):
        (linked / link).unlink()
    if name.startswith("gone"):
        (linked / name).symlink_to("/nowhere/at/all")
    else:
        forbidden(monkeypatch, name)
    with pytest.raises(UserError, match=rf"/{name} cannot be read: {why}.*--on_error=skip"):
        find_corpus(str(linked))
    assert len(texts(linked, on_error="skip")) == read
    assert f"/{name} cannot be read: {why}" in capsys.readouterr().err
    made = prepare_raw(str(linked), DataConfig(val_fraction=0.5), 266, linked.parent / "cache", "")
    assert read_record(made)["skipped"] == {why: 1}


@pytest.mark.parametrize("folder", ["bad[2023]", "what?", "std::vector", "stars*", "x:/y"])
def test_an_existing_path_is_no_glob(tmp_path, folder):
    write(tmp_path / folder, "std::vector.md", "a[1].txt")
    assert list(texts(tmp_path / folder)) == ["a[1].txt", "std::vector.md"]
    assert list(texts(tmp_path / folder / "std::vector.md")) == ["std::vector.md"]
    assert list(texts(f"{tmp_path / folder}/*.md")) == ["std::vector.md"]


def test_a_file_whose_name_is_not_utf8_is_read_and_split(tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    write(tmp_path, name)
    assert list(texts(tmp_path)) == [f"{name}"]
    assert 0 <= hash_share(name) < 1

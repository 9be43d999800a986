"""Test which files on this machine are text: links, unreadable files, and paths with a glob's characters."""

import os
from pathlib import Path

import pytest

from configs.schema import UserError
from data.prepare.listing import find_corpus
from data.record import hash_share


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"text of " + name.encode(errors="replace"))
    return folder


def texts(source: object, **options) -> dict[str, str]:
    corpus = find_corpus(str(source), **options)
    return {
        d.name.removesuffix("#00000000"): d.text or d.problem for file in corpus.files for d in corpus.documents(file)
    }


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Return a folder with two files, and links to a file and a folder elsewhere."""
    write(tmp_path / "elsewhere", "one.txt", "more/two.txt", "blob")
    folder = write(tmp_path / "text", "a.txt", "sub/b.txt")
    (folder / "link.txt").symlink_to(tmp_path / "elsewhere" / "one.txt")
    (folder / "linked").symlink_to(tmp_path / "elsewhere" / "more")
    (folder / "named.txt").symlink_to(tmp_path / "elsewhere" / "blob")  # like the hub's cache
    return folder


LINKED = {
    "a.txt": "text of a.txt",
    "link.txt": "text of one.txt",
    "linked/two.txt": "text of more/two.txt",
    "named.txt": "text of blob",
    "sub/b.txt": "text of sub/b.txt",
}


def test_linked_files_and_folders_are_read_under_the_links_names(linked):
    assert texts(linked) == LINKED


def test_a_linked_folder_and_a_folder_of_links_are_read(linked, tmp_path):
    (tmp_path / "alias").symlink_to(linked)
    assert texts(tmp_path / "alias") == LINKED
    for name in ("a.txt", "sub/b.txt"):
        (linked / name).unlink()
    assert list(texts(linked)) == ["link.txt", "linked/two.txt", "named.txt"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.txt", ["a.txt", "link.txt", "named.txt"]),
        ("l*/*.txt", ["linked/two.txt"]),
        ("**/*.txt", list(LINKED)),
        ("*/two.txt", ["linked/two.txt"]),
    ],
)
def test_globs_follow_links_too(linked, pattern, names):
    assert list(texts(f"{linked}/{pattern}")) == names


def test_a_glob_matches_names_of_links(linked):
    (linked / "sub" / "once_more").symlink_to(linked / "sub")
    assert list(texts(f"{linked}/**/once*/*.txt")) == ["sub/once_more/b.txt"]
    assert list(texts(f"{linked}/*/*/b.txt")) == ["sub/once_more/b.txt"]


def test_text_behind_several_links_is_read_once_under_its_own_name(linked):
    (linked / "0again.txt").symlink_to(linked / "a.txt")
    (linked / "0whole").symlink_to(linked)
    (linked / "0sub").symlink_to(linked / "sub")
    (linked / "linked2").symlink_to((linked / "linked").resolve())
    assert texts(linked) == LINKED


def test_loops_of_links_end(linked, tmp_path):
    (linked / "sub" / "up").symlink_to(linked)
    (tmp_path / "elsewhere" / "more" / "back").symlink_to(linked)
    (linked / "itself").symlink_to(linked / "itself")
    assert texts(linked, on_error="skip") == LINKED | {"itself": "Too many levels of symbolic links"}


@pytest.mark.parametrize("name", ["gone.txt", "gone_folder"])
def test_a_broken_link_is_refused_or_counted(linked, name):
    (linked / name).symlink_to("/nowhere/at/all")
    (linked / "picture.png").symlink_to("/nowhere/at/all")  # no text file, wherever it leads
    with pytest.raises(
        UserError, match=rf"1 file\(s\) or folder\(s\) cannot be read, .*/{name} the first: a link that"
    ):
        find_corpus(str(linked))
    assert texts(linked, on_error="skip") == LINKED | {name: "a link that leads nowhere"}


def forbidden(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Deny permission for files and folders of these names."""
    access, scandir = os.access, os.scandir

    def denying_scandir(path: str):
        if os.path.basename(path) in names:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "access", lambda path, mode: os.path.basename(path) not in names and access(path, mode))
    monkeypatch.setattr(os, "scandir", denying_scandir)


@pytest.mark.parametrize(("name", "why"), [("a.txt", "no permission"), ("sub", "Permission denied")])
def test_unreadable_files_are_refused_or_counted(linked, monkeypatch, name, why):
    forbidden(monkeypatch, name)
    with pytest.raises(UserError, match=rf"1 file\(s\) or folder\(s\).*/{name} the first: {why}.*--on_error=skip"):
        find_corpus(str(linked))
    read = texts(linked, on_error="skip")
    assert read[name].startswith(why) and len(read) == len(LINKED)


def test_a_glob_skips_folders_that_cannot_match(linked, monkeypatch):
    forbidden(monkeypatch, "sub")
    assert list(texts(f"{linked}/*.txt")) == ["a.txt", "link.txt", "named.txt"]
    assert list(texts(f"{linked}/l*/*.txt")) == ["linked/two.txt"]


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

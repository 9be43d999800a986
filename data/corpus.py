"""Documents: where the text comes from, and which part of it is held out."""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from configs.schema import UserError

SUFFIXES = (".txt", ".md", ".py")
CHUNK_CHARACTERS = 16_384


@dataclass(frozen=True)
class Document:
    """A text, and a name that stays the same on every machine."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents in the order of their names, and the files that were left out because they are not UTF-8."""

    train: list[Document]
    val: list[Document]
    skipped: list[str]


def read_corpus(source: str, val_fraction: float) -> Corpus:
    """Reads all documents of `source` and holds out those whose name's hash falls below `val_fraction`.

    So a document keeps its side when others come and go, but for a corpus so small that one side would be empty.
    `source` is `stdlib`, a folder, or one text file, which is cut at line ends into documents of some 16,000
    characters. UserError where there is nothing to read, or too little to hold something out.
    """
    skipped: list[str] = []
    documents = sorted(_documents(source, skipped), key=lambda document: document.name)
    if len(documents) < 2:
        raise UserError(
            f"--data.source={source}: {len(documents)} document(s) with text found there; at least 2 are needed, one "
            "to train on and one to hold out (a folder's files are documents; a single file is cut at a line end every "
            "16,000 characters)"
        )
    by_hash = sorted(documents, key=lambda document: _hash(document.name))
    held_out = sum(_hash(document.name) < val_fraction for document in documents)
    # A small corpus may have no hash that low, or only such: each side gets one document at least.
    held_out = min(max(held_out, 1), len(documents) - 1)
    names = {document.name for document in by_hash[:held_out]}
    return Corpus(
        train=[document for document in documents if document.name not in names],
        val=[document for document in documents if document.name in names],
        skipped=skipped,
    )


def _documents(source: str, skipped: list[str]) -> Iterator[Document]:
    path = Path(sysconfig.get_path("stdlib") if source == "stdlib" else source).expanduser()
    if path.is_file():
        if not (text := _read(path, path.name, skipped)):
            raise UserError(
                f"--data.source={source}: the file is {'not UTF-8' if skipped else 'empty'}; give UTF-8 text"
            )
        yield from _cut(path.name, text)
    elif path.is_dir():
        suffixes = (".py",) if source == "stdlib" else SUFFIXES
        for file in path.rglob("*"):
            parts = file.relative_to(path).parts
            installed = source == "stdlib" and {"site-packages", "dist-packages"} & set(parts)
            if file.suffix in suffixes and file.is_file() and not installed:
                name = "/".join(parts)
                if text := _read(file, name, skipped):
                    yield Document(name, text)
    else:
        raise UserError(
            f"--data.source={source}: neither a file nor a folder; "
            f"give `stdlib`, a text file, or a folder of {', '.join(SUFFIXES)} files"
        )


def _read(path: Path, name: str, skipped: list[str]) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        skipped.append(name)
        return ""


def _cut(name: str, text: str) -> Iterator[Document]:
    lines, size, count = [], 0, 0
    for line in text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= CHUNK_CHARACTERS:
            yield Document(f"{name}#{count:08d}", "".join(lines))
            lines, size, count = [], 0, count + 1
    if lines:
        yield Document(f"{name}#{count:08d}", "".join(lines))


def _hash(name: str) -> float:
    """A number in [0, 1) from a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64

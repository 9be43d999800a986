"""Documents: where the text comes from, read one after the other, and which of them are held out."""

import codecs
import glob
import hashlib
import itertools
import json
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

import fsspec
import pyarrow
import pyarrow.json
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from configs.schema import UserError
from data.records import TABLE_SUFFIXES, TEXT_SUFFIXES, SourceFile, chunks, lines, lines_before, rows

LONG = 2**24  # bytes of a document, above which it is not held as characters: with one emoji each takes 4 bytes


@dataclass(frozen=True)
class Document:
    """A text, and a name that stays the same on every machine."""

    name: str
    text: str
    problem: str = ""
    """Why there is no text, and the document is skipped."""


@dataclass(frozen=True)
class Corpus:
    """The files of a source, in the order of their names."""

    source: str
    files: list[SourceFile]
    version: str
    """Differs when a file does: the hub's revision, or a digest of names, sizes and times of change."""
    filesystem: Any
    """fsspec's, that opens them."""
    text_column: str = "text"
    on_error: Literal["stop", "skip"] = "stop"

    def documents(self, file: SourceFile) -> Iterator[Document]:
        """The file's documents, one by one. One that is empty or cannot be read is a UserError, or, with
        `on_error="skip"`, a document with a problem. UserError where the file is damaged."""
        for number, text, problem in self.read(file):
            if text or problem:
                yield Document(self.name(file, number), text if isinstance(text, str) else text.decode(), problem)

    def read(self, file: SourceFile, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, str | bytes, str]]:
        """Number, text (a long one in UTF-8) and problem of each document of a span of the file, and of each empty
        line, which has neither. Raises as `documents` does."""
        if file.problem:
            yield 1, "", file.problem
            return
        try:
            for number, content in self._contents(file, start, stop):
                if not content and self._is_lines(file):
                    yield number, "", ""
                    continue
                text, problem = _text_of(file, content, self.text_column)
                if problem and self.on_error == "stop":
                    first = self.numbers_before(file, start)
                    raise UserError(
                        f"{self.source}: {self.name(file, first + number)}: {problem}; mend it, or count and skip "
                        "such: --on_error=skip"
                    )
                yield number, text, problem
        except (OSError, EOFError, pyarrow.ArrowException) as error:
            raise UserError(f"{file.url}: cannot be read to its end: {error}") from error

    def name(self, file: SourceFile, number: int) -> str:
        """The name of the document of this number, from 1, of a file."""
        if file.problem or not (file.name.endswith(TABLE_SUFFIXES) or self._is_cut(file)):
            return file.name
        if self._is_cut(file):
            return f"{file.name}#{number - 1:08d}"
        return f"{file.name} {'line' if self._is_lines(file) else 'row'} {number}"

    def numbers_before(self, file: SourceFile, start: int) -> int:
        """What is to be added to a document's number in a span that begins at `start`."""
        if not start or not self.is_numbered_by_span(file):
            return 0
        with self.filesystem.open(_local(file.url), "rb") as opened:
            return lines_before(opened, start)

    def is_numbered_by_span(self, file: SourceFile) -> bool:
        """Whether the numbers of a span's documents start anew."""
        return file.name.endswith(".jsonl")

    def is_divisible(self, file: SourceFile) -> bool:
        """Whether a span of the file can be read without what lies before."""
        return file.name.endswith((".jsonl", ".parquet")) or (self._is_cut(file) and "://" not in file.url)

    def _is_lines(self, file: SourceFile) -> bool:
        return file.name.endswith(TABLE_SUFFIXES) and not file.name.endswith(".parquet")

    def _is_cut(self, file: SourceFile) -> bool:
        return len(self.files) == 1 and file.name.endswith(TEXT_SUFFIXES) and not file.problem

    def _contents(self, file: SourceFile, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
        """Number and raw content of each document."""
        with self.filesystem.open(_local(file.url), "rb") as opened:
            if file.name.endswith(".parquet"):
                yield from rows(file, opened, self.text_column, start, stop)
            elif self._is_lines(file):
                yield from lines(file, opened, start, stop)
            elif self._is_cut(file):
                yield from chunks(opened, start, stop)
            else:
                yield 1, opened.read()


def find_corpus(source: str, text_column: str = "text", on_error: Literal["stop", "skip"] = "stop") -> Corpus:
    """The files of `source`: `stdlib`, a file, a folder, a glob (local, or a URL that fsspec knows), or
    `hf:OWNER/NAME[:FOLDER]`. A local path that exists is no glob, whatever its letters. UserError where there are no
    files, and, unless `on_error="skip"`, where one of them or a folder cannot be read."""
    filesystem: Any = LocalFileSystem()
    if source.startswith("hf:"):
        files, version = _hub_files(source)
    elif "://" in source and not os.path.lexists(source):
        filesystem, files, version = _remote_files(source)
    else:
        files, version = _local_files(source)
    if not files:
        raise UserError(
            f"{source or 'an empty --source'}: no file of text found there; give `stdlib`, `hf:OWNER/NAME`, or a file, "
            f"a folder or a glob of {', '.join(TEXT_SUFFIXES + TABLE_SUFFIXES)}"
        )
    if (broken := [file for file in files if file.problem]) and on_error == "stop":
        raise UserError(
            f"{source}: {len(broken)} file(s) or folder(s) cannot be read, {broken[0].url} the first: "
            f"{broken[0].problem}; mend that, or count and skip such: --on_error=skip"
        )
    return Corpus(source, files, version, filesystem, text_column, on_error)


def hash_share(text: str) -> float:
    """Return a number in [0, 1) from a text. A document is held out if it is below the fraction to hold out: so equal
    texts share a side in every dataset, whatever else is in it."""
    content = text.encode(errors="surrogateescape")  # a file's name may be any bytes
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


def _local_files(source: str) -> tuple[list[SourceFile], str]:
    """A path, or a glob below the longest part of it that exists as it is written."""
    library = source == "stdlib"
    location = sysconfig.get_path("stdlib") if library else os.path.expanduser(source.removeprefix("file://"))
    root, pattern = Path(os.path.abspath(location)), []
    while glob.has_magic(str(root)) and not os.path.lexists(root):
        root, pattern = root.parent, [root.name, *pattern]
    if not location or not os.path.lexists(root):
        return [], ""
    try:
        whole, steps = re.compile(glob_translate("/".join(pattern))), [re.compile(glob_translate(p)) for p in pattern]
    except ValueError as error:
        raise UserError(f"{source}: not a glob: {error}") from error
    suffixes = (".py",) if library else TEXT_SUFFIXES + TABLE_SUFFIXES
    fixed = pattern.index("**") if "**" in pattern else len(pattern)  # each of these steps is one folder's name

    def enters(folder: str) -> bool:
        names = folder.split("/")
        if library:
            return names[-1] not in ("site-packages", "dist-packages")
        far_enough = bool(pattern) and fixed == len(pattern) <= len(names)
        return not far_enough and all(step.match(name) for step, name in zip(steps[:fixed], names))

    takes = lambda name: name.endswith(suffixes) and (not pattern or whole.match(name) is not None)
    # What links in a system's library lead to is not of the library.
    found = sorted(_walk(str(root), takes, enters, len(pattern), links=not library), key=lambda one: one[0].url)
    return [file for file, _ in found], _version((f.name, f.size, [changed, None, None, None]) for f, changed in found)


def _walk(
    root: str, takes: Callable[[str], bool], enters: Callable[[str], bool], tail: int, links: bool
) -> Iterator[tuple[SourceFile, float | None]]:
    """The files below `root` whose names below it `takes` accepts, in folders that `enters` accepts, and when they
    changed. Each is read once: under its own name, else under the first of those that links give it. So is a folder,
    for each of its names' last `tail` parts: what a glob finds in it depends on them."""
    files, folders, linked = set(), set(), [(root, os.path.realpath(root))]
    while linked:
        waiting, linked = sorted(linked, reverse=True), []
        while waiting:
            path, real = waiting.pop()
            name, is_folder = path.removeprefix(root).lstrip("/") or os.path.basename(root), False
            try:
                status = os.stat(real)
                is_folder = stat.S_ISDIR(status.st_mode)
                key = (real, *(name.split("/")[-tail:] if tail else ()))
                if is_folder and key not in folders and (path == root or enters(name)):
                    folders.add(key)
                    with os.scandir(real) as entries:
                        for entry in entries:
                            below = os.path.join(path, entry.name)
                            if not entry.is_symlink():
                                waiting.append((below, os.path.join(real, entry.name)))
                            elif links:
                                linked.append((below, os.path.realpath(entry.path)))
                elif stat.S_ISREG(status.st_mode) and takes(name) and real not in files:
                    files.add(real)
                    problem = "" if os.access(real, os.R_OK) else "no permission to read it"
                    yield SourceFile(name, path, status.st_size, problem), status.st_mtime
            except OSError as error:
                if is_folder or takes(name) or not PurePath(name).suffix:  # a link of such a name may lead to a folder
                    problem = error.strerror if os.path.lexists(real) else "a link that leads nowhere"
                    yield SourceFile(name, path, 0, problem or "it cannot be read"), None


def _remote_files(source: str) -> tuple[Any, list[SourceFile], str]:
    try:
        filesystem, root = fsspec.core.url_to_fs(source)
        found = (filesystem.glob if glob.has_magic(root) else filesystem.find)(root, detail=True)
    except Exception as error:  # of the scheme's library: it may be missing, or have no access
        raise UserError(f"{source}: cannot be read: {error}") from error
    root = "/".join(itertools.takewhile(lambda part: not glob.has_magic(part), root.split("/")))
    files, facts_of_files = [], []
    for path, facts in sorted(found.items()):
        name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
        if facts.get("type", "file") == "file" and name.endswith(TEXT_SUFFIXES + TABLE_SUFFIXES):
            files.append(SourceFile(name, filesystem.unstrip_protocol(path), facts.get("size") or 0))
            changed = [facts.get(key) for key in ("mtime", "LastModified", "updated", "etag")]
            facts_of_files.append((name, files[-1].size, changed))
    return filesystem, files, _version(facts_of_files)


def _version(facts: Iterable[tuple[str, int, list]]) -> str:
    """A digest of each file's name, size and times of change."""
    return hashlib.sha256("".join(map(repr, facts)).encode()).hexdigest()


def _hub_files(source: str) -> tuple[list[SourceFile], str]:
    from huggingface_hub import HfApi  # half a second to import

    repository, _, folder = source.removeprefix("hf:").partition(":")
    try:
        facts = HfApi().dataset_info(repository, files_metadata=True)
    except Exception as error:  # of the network, of the hub, or of a name that cannot be one
        raise UserError(f"{source}: the hub does not give this dataset: {error}") from error
    every = [file for file in facts.siblings or [] if file.rfilename.endswith(TABLE_SUFFIXES)]
    chosen = [file for file in every if file.rfilename.startswith(f"{folder}/" if folder else "")]
    if every and not chosen:
        folders = sorted({file.rfilename.rpartition("/")[0] for file in every})
        raise UserError(f"{source}: the dataset has no folder {folder}; its folders with text: {', '.join(folders)}")
    url = f"hf:{repository}@{facts.sha}:"
    files = [SourceFile(file.rfilename, url + file.rfilename, file.size or 0) for file in chosen]
    return sorted(files, key=lambda file: file.name), f"{facts.sha}/{folder}"


def _local(url: str) -> str:
    """Where a file is opened: one of the hub on this machine, downloaded from where a download stopped."""
    if not url.startswith("hf:"):
        return url
    from huggingface_hub import hf_hub_download

    repository, _, rest = url.removeprefix("hf:").partition("@")
    revision, _, name = rest.partition(":")
    try:
        return hf_hub_download(repository, name, repo_type="dataset", revision=revision)
    except Exception as error:  # of the network, the hub or the disk
        raise UserError(f"{name} of {repository} was not downloaded ({error}); the same command goes on") from error


def _text_of(file: SourceFile, content: bytes, column: str) -> tuple[str | bytes, str]:
    """A document's text, in UTF-8 where it is long, and why there is none."""
    is_line = file.name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl")
    if len(content) > LONG:
        text = _value(content, column) if is_line else content
        if text is not None and _is_utf8(text):
            return (text, "") if text else ("", f"no text under {column!r}")
    try:
        if not is_line:
            text = content.decode()
        else:
            record = json.loads(content, parse_int=float)  # an int of more than 4,300 digits would be refused
            text = record.get(column) if isinstance(record, dict) else None
            if not isinstance(text, str):
                return "", f"no text under {column!r}"
            text.encode()
    except UnicodeDecodeError:
        return "", "not UTF-8"
    except UnicodeEncodeError:
        return "", "half a character (a lone surrogate)"
    except json.JSONDecodeError:
        return "", "not JSON"
    except RecursionError:
        return "", "nested too deeply"
    return text, "" if text else "empty"


def _value(line: bytes, column: str) -> bytes | None:
    """A column of a long line of JSON, in UTF-8, empty where it is not there; None where `json` is to say what is
    wrong. `json` would hold the characters of line and value."""
    schema = pyarrow.schema([(column, pyarrow.large_string())])
    options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    reading = pyarrow.json.ReadOptions(use_threads=False, block_size=len(line) + 1)
    try:
        table = pyarrow.json.read_json(pyarrow.BufferReader(line), reading, options)
    except pyarrow.ArrowException:
        return None
    values = table.column(column).cast(pyarrow.large_binary())
    value = values[0].as_py() if len(values) == 1 else b""
    return None if value == b"" else value or b""


def _is_utf8(content: bytes) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(content), 2**20):
            decoder.decode(content[start : start + 2**20])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True

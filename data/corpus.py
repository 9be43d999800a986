"""Documents: where the text comes from, read one after the other, and which of them are held out."""

import glob
import hashlib
import io
import itertools
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

import fsspec
import pyarrow
import pyarrow.parquet

from configs.schema import UserError

TEXT_SUFFIXES = (".txt", ".md", ".py")
TABLE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
CHUNK_BYTES = 16_384


@dataclass(frozen=True)
class Document:
    """A text, and a name that stays the same on every machine."""

    name: str
    text: str
    problem: str = ""
    """Why there is no text, and the document is skipped."""


@dataclass(frozen=True)
class SourceFile:
    """A file of documents."""

    name: str
    """Its path below the source, the same on every machine."""
    url: str
    """Where fsspec, or for `hf:` the hub's client, opens it."""
    size: int
    """Bytes, compressed as it lies there."""


@dataclass(frozen=True)
class Corpus:
    """The files of a source, in the order of their names."""

    source: str
    files: list[SourceFile]
    version: str
    """Differs when a file does: the hub's revision, or a digest of names, sizes and times of change."""
    text_column: str = "text"
    on_error: Literal["stop", "skip"] = "stop"

    def documents(self, file: SourceFile) -> Iterator[Document]:
        """The file's documents, one by one. One that is empty or cannot be read is a UserError, or, with
        `on_error="skip"`, a document with a problem."""
        for name, content in self._records(file):
            text, problem = "", ""
            try:
                lines = file.name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl")
                text = _json_text(content, self.text_column) if lines else content.decode()
                problem = "" if text else "empty"
            except UnicodeDecodeError:
                problem = "not UTF-8"
            except json.JSONDecodeError:
                problem = "not JSON"
            except KeyError:
                problem = f"no text under {self.text_column!r}"
            if problem and self.on_error == "stop":
                raise UserError(f"{self.source}: {name}: {problem}; mend it, or count and skip such: --on_error=skip")
            yield Document(name, text, problem)

    def _records(self, file: SourceFile) -> Iterator[tuple[str, bytes]]:
        """Name and raw content of each document."""
        with _open(file) as opened:
            if file.name.endswith(".parquet"):
                yield from _parquet(file, opened, self.text_column)
            elif file.name.endswith(TABLE_SUFFIXES):
                yield from _lines(file, opened)
            elif len(self.files) == 1:
                yield from _cut(file.name, opened)
            else:
                yield file.name, opened.read()


def find_corpus(source: str, text_column: str = "text", on_error: Literal["stop", "skip"] = "stop") -> Corpus:
    """The files of `source`: `stdlib`, a file, a folder, a glob (local, or a URL that fsspec knows), or
    `hf:OWNER/NAME[:FOLDER]`. UserError where there are none."""
    files, version = _hub_files(source) if source.startswith("hf:") else _files(source)
    if not files:
        raise UserError(
            f"{source}: no file of text found there; give `stdlib`, `hf:OWNER/NAME`, or a file, a folder or a glob of "
            f"{', '.join(TEXT_SUFFIXES + TABLE_SUFFIXES)}"
        )
    return Corpus(source, files, version, text_column, on_error)


def hash_share(name: str) -> float:
    """A number in [0, 1) from a name: a document is held out where it is below the fraction to hold out, and so keeps
    its side when others come and go."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _files(source: str) -> tuple[list[SourceFile], str]:
    location = sysconfig.get_path("stdlib") if source == "stdlib" else source
    suffixes = (".py",) if source == "stdlib" else TEXT_SUFFIXES + TABLE_SUFFIXES
    try:
        filesystem, root = fsspec.core.url_to_fs(location)
        if glob.has_magic(root):
            found = filesystem.glob(root, detail=True)
            fixed = itertools.takewhile(lambda part: not glob.has_magic(part), root.split("/"))
            root = "/".join(fixed)
        else:
            found = filesystem.find(root, detail=True)
    except (ImportError, ValueError, OSError) as error:  # a scheme without its library, or no access
        raise UserError(f"{source}: cannot be read: {error}") from error
    files, digest = [], hashlib.sha256()
    for path, facts in sorted(found.items()):
        name = path.removeprefix(root).lstrip("/") or path.rpartition("/")[2]
        installed = source == "stdlib" and {"site-packages", "dist-packages"} & set(name.split("/"))
        if facts["type"] == "file" and name.endswith(suffixes) and not installed:
            files.append(SourceFile(name, filesystem.unstrip_protocol(path), facts["size"]))
            changed = [facts.get(key) for key in ("mtime", "LastModified", "updated", "etag")]
            digest.update(repr((name, facts["size"], changed)).encode())
    return files, digest.hexdigest()


def _hub_files(source: str) -> tuple[list[SourceFile], str]:
    from huggingface_hub import HfApi  # half a second to import
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    repository, _, folder = source.removeprefix("hf:").partition(":")
    try:
        facts = HfApi().dataset_info(repository, files_metadata=True)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UserError(f"{source}: the hub does not give this dataset: {error}") from error
    every = [file for file in facts.siblings or [] if file.rfilename.endswith(TABLE_SUFFIXES)]
    chosen = [file for file in every if file.rfilename.startswith(f"{folder}/" if folder else "")]
    if every and not chosen:
        folders = sorted({file.rfilename.rpartition("/")[0] for file in every})
        raise UserError(f"{source}: the dataset has no folder {folder}; its folders with text: {', '.join(folders)}")
    url = f"hf:{repository}@{facts.sha}:"
    files = [SourceFile(file.rfilename, url + file.rfilename, file.size or 0) for file in chosen]
    return sorted(files, key=lambda file: file.name), f"{facts.sha}/{folder}"


def _open(file: SourceFile) -> Any:
    """The file's bytes; a file of the hub is downloaded first, from where a download stopped."""
    url = file.url
    if url.startswith("hf:"):
        from huggingface_hub import hf_hub_download

        repository, _, rest = url.removeprefix("hf:").partition("@")
        revision, _, name = rest.partition(":")
        try:
            url = hf_hub_download(repository, name, repo_type="dataset", revision=revision)
        except Exception as error:  # of the network, the hub or the disk
            raise UserError(f"{name} of {repository} was not downloaded ({error}); the same command goes on") from error
    opened: Any = fsspec.open(url, "rb")
    return opened.open()


def _lines(file: SourceFile, opened: Any) -> Iterator[tuple[str, bytes]]:
    packed = {".gz": "gzip", ".zst": "zstd"}.get(PurePath(file.name).suffix)
    try:
        stream = io.BufferedReader(pyarrow.CompressedInputStream(opened, packed), 2**20) if packed else opened
        yield from ((f"{file.name} line {i}", line) for i, line in enumerate(stream, 1) if line.strip())
    except OSError as error:
        raise UserError(f"{file.url}: cannot be read to its end: {error}") from error


def _parquet(file: SourceFile, opened: Any, column: str) -> Iterator[tuple[str, bytes]]:
    try:
        table = pyarrow.parquet.ParquetFile(opened)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file.url}: not a parquet file, or not a whole one: {error}") from error
    if column not in table.schema_arrow.names:
        names = ", ".join(table.schema_arrow.names)
        raise UserError(f"{file.url} has no column {column!r}; give --text_column, one of: {names}")
    number = 0
    for batch in table.iter_batches(1024, columns=[column]):
        for value in batch.column(0).cast(pyarrow.binary()):
            number += 1
            yield f"{file.name} row {number}", value.as_py() or b""


def _json_text(line: bytes, column: str) -> str:
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get(column), str):
        raise KeyError(column)
    return record[column]


def _cut(name: str, opened: Any) -> Iterator[tuple[str, bytes]]:
    """A single text, cut at line ends into documents of some 16,000 bytes; a longer line, at a space or a character."""
    text, count = b"", 0
    for line in iter(lambda: opened.readline(CHUNK_BYTES), b""):
        text += line
        if len(text) >= CHUNK_BYTES:
            end = len(text)
            if not text.endswith(b"\n"):
                starts = (i for i in range(end - 1, 0, -1) if text[i] & 0xC0 != 0x80)  # of characters in UTF-8
                end = text.rfind(b" ") + 1 or next(starts, end)
            yield f"{name}#{count:08d}", text[:end]
            text, count = text[end:], count + 1
    if text:
        yield f"{name}#{count:08d}", text

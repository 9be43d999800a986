"""Documents: the texts of a source, in order."""

import codecs
import io
import json
import lzma
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow
import pyarrow.json
from fsspec.spec import AbstractBufferedFile

from configs.retry import StorageLost, passes, patiently
from configs.schema import UserError
from data.conversation import document_of, texts_of
from data.prepare.chat_stdlib import conversations_of
from data.prepare.source_files import (
    LINE_SUFFIXES,
    TABLE_SUFFIXES,
    SourceFile,
    chunks,
    lines,
    rows,
    separated,
    values,
)
from data.store import read_range

BUFFER_BYTES = 2**22  # of a request to a server
CUT_BYTES = 2**20  # bytes of a text; a longer one is cut into documents
UNREADABLE = (OSError, EOFError, lzma.LZMAError, pyarrow.ArrowException)  # errors of a damaged file
LONG = 2**24  # bytes of a document; a longer one is not kept as characters, which take 4 bytes each with one emoji


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
    """The hub's revision, or a digest of names, sizes and times of change. It changes with any file."""
    text_column: str = "text"
    on_error: Literal["stop", "skip"] = "stop"
    separator: str = ""
    """The separator of documents in a text."""
    left_out: str = ""
    """Files of other kinds, by extension, and advice about them."""
    is_minor: bool = False
    """True if those have more bytes than the files."""
    conversations: bool = False
    """True if the documents are conversations: their texts are from `document_of`."""
    unread: tuple[str, ...] = ()
    """For each file or folder that cannot be read, the reason."""

    def documents(self, file: SourceFile) -> Iterator[Document]:
        """Yield the file's documents, one by one. An empty or unreadable one raises UserError, or, with
        `on_error="skip"`, is a document with a problem. Raise UserError if the file is damaged."""
        for number, text, problem in self.read(file):
            if text or problem:
                yield Document(self.name(file, number), text if isinstance(text, str) else text.decode(), problem)

    def read(self, file: SourceFile, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, str | bytes, str]]:
        """Yield the number, text (a long one in UTF-8) and problem of each document in a span of the file. An empty
        line has neither. Raise as `documents` does."""
        try:
            for number, content in self.contents(file, start, stop):
                if not content and self.is_lines(file):
                    yield number, "", ""
                    continue
                text, problem = _text_of(file, content, self.text_column, self.conversations)
                if problem and self.on_error == "stop":
                    first = self.numbers_before(file, start)
                    raise UserError(
                        f"{self.source}: {self.name(file, first + number)}: {problem}; correct it, or count and skip "
                        "such: --on_error=skip"
                    )
                yield number, text, re.sub(r"^message \d+ ", "a message ", problem)  # problems are counted by kind
        except UNREADABLE as error:
            # pyarrow's errors of damaged content have no number.
            lost = isinstance(error, OSError) and error.errno is not None and passes(error)
            raise (StorageLost if lost else UserError)(f"{file.url}: cannot be read to its end: {error}") from error

    def texts(self, document: str) -> list[str]:
        """Return the texts in a document: of a conversation, the texts of its messages."""
        return texts_of(document) if self.conversations else [document]

    def name(self, file: SourceFile, number: int) -> str:
        """Return the name of the document of this number, from 1, of a file."""
        if self._is_code(file):
            return f"{file.name} conversation {number}"
        if not (file.name.endswith(TABLE_SUFFIXES) or self._is_cut(file)):
            return file.name
        if self._is_cut(file):
            return f"{file.name}#{number - 1:08d}"
        return f"{file.name} {'line' if self.is_lines(file) else 'row'} {number}"

    def numbers_before(self, file: SourceFile, start: int) -> int:
        """Return the offset of document numbers in a span that begins at `start`."""
        is_separated = bool(self.separator) and self._is_cut(file)
        if not start or not (is_separated or file.name.endswith(".jsonl")):
            return 0
        with open_source(file) as opened:
            separator = self.separator.encode()
            read = separated(opened, separator, 0, start) if is_separated else lines(file, opened, 0, start)
            return sum(1 for _ in read)

    def is_lines(self, file: SourceFile) -> bool:
        """Return whether each line is a record of JSON."""
        return file.name.endswith(LINE_SUFFIXES)

    def is_divisible(self, file: SourceFile) -> bool:
        """Return whether a span of the file can be read without the text before it."""
        overlaps = any(self.separator.startswith(self.separator[i:]) for i in range(1, len(self.separator)))
        is_cut = self._is_cut(file) and "://" not in file.url and not overlaps
        return file.name.endswith((".jsonl", ".parquet")) or is_cut

    def _is_code(self, file: SourceFile) -> bool:
        """Return whether conversations are made of the file."""
        return self.conversations and file.name.endswith(".py")

    def _is_cut(self, file: SourceFile) -> bool:
        is_text = not (file.name.endswith(TABLE_SUFFIXES) or self.conversations)
        return is_text and (bool(self.separator) or len(self.files) == 1 or file.size > CUT_BYTES)

    def contents(self, file: SourceFile, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the raw content of each document."""
        with open_source(file) as opened:
            if file.name.endswith(".parquet"):
                yield from rows(file, opened, self.text_column, start, stop, self.conversations)
            elif self.is_lines(file):
                yield from lines(file, opened, start, stop)
            elif file.name.endswith(TABLE_SUFFIXES):
                yield from values(file, opened, self.text_column, self.conversations)
            elif self._is_code(file):
                module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                made = conversations_of(opened.read().decode(errors="replace"), module)
                yield from enumerate((json.dumps(conversation).encode() for conversation in made), 1)
            elif self.separator:
                yield from separated(opened, self.separator.encode(), start, stop)
            elif self._is_cut(file):
                yield from chunks(opened, start, stop)
            else:
                yield 1, opened.read()


def open_source(file: SourceFile) -> io.BufferedReader:
    """Open a local file, a URL, or a file of the hub, whose interrupted download is resumed."""
    if "://" in file.url:
        path = str(file.filesystem._strip_protocol(file.url))
        size = patiently(file.url, lambda: file.filesystem.size(path))
        if size is None:
            raise OSError("its server does not report its length")
        return io.BufferedReader(_RemoteFile(file.filesystem, path, size=size, cache_type="none"), BUFFER_BYTES)
    return open(_downloaded(file.url) if file.url.startswith("hf:") else file.url, "rb")


class _RemoteFile(AbstractBufferedFile):
    """A file read by requests for ranges, each repeated until it is answered. Raises StorageLost if its server fails
    for long."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return patiently(self.full_name, lambda: read_range(self.fs, self.path, start, end))


def _downloaded(url: str) -> str:
    from huggingface_hub import hf_hub_download

    repository, _, rest = url.removeprefix("hf:").partition("@")
    revision, _, name = rest.partition(":")
    return ask(
        url,
        lambda: hf_hub_download(repository, name, repo_type="dataset", revision=revision),
        lambda error: f"{name} of {repository} was not downloaded ({error}); the same command continues",
    )


def ask(what: str, ask: Callable[[], Any], refusal: Callable[[Exception], str]) -> Any:
    """Return a server's answer. Raise StorageLost if it does not answer, and UserError with `refusal` if it refuses."""
    try:
        return patiently(what, ask)
    except StorageLost:
        raise
    except Exception as error:
        raise UserError(refusal(error)) from error


def _text_of(file: SourceFile, content: bytes, column: str, conversations: bool) -> tuple[str | bytes, str]:
    """Return a document's text (a long one in UTF-8), and why there is none."""
    is_line = file.name.endswith(LINE_SUFFIXES)
    if len(content) > LONG and not conversations:
        text = _value(content, column) if is_line else content
        if text is not None and is_utf8(text):
            return (text, "") if text else ("", f"no text under {column!r}")
    try:
        if not (is_line or conversations):
            text = content.decode()
        else:
            record = json.loads(content, parse_int=float)  # Python would refuse an int of more than 4,300 digits
            text = record.get(column) if isinstance(record, dict) else record if conversations else None
            if conversations:
                text = document_of(text)
            elif not isinstance(text, str):
                is_chat = isinstance(record, dict) and "messages" in record
                return "", f"no text under {column!r}" + "; conversations need data.prepare's --conversations" * is_chat
            text.encode()
    except UnicodeDecodeError:
        return "", "not UTF-8"
    except UnicodeEncodeError:
        return "", "invalid Unicode (a lone surrogate)"
    except json.JSONDecodeError:
        return "", "not JSON"
    except RecursionError:
        return "", "nested too deeply"
    except ValueError as error:  # from `document_of`
        return "", str(error)
    return text, "" if text else "empty"


def _value(line: bytes, column: str) -> bytes | None:
    """Return a column of a long line of JSON, in UTF-8, or empty if it is missing. Return None to let `json` find the
    error; `json` would keep the characters of line and value."""
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


def is_utf8(content: bytes) -> bool:
    """Return whether bytes are UTF-8, without a copy of them."""
    pieces = (content[start : start + BUFFER_BYTES] for start in range(0, len(content), BUFFER_BYTES))
    try:
        return all(True for _ in codecs.iterdecode(pieces, "utf-8"))
    except UnicodeDecodeError:
        return False

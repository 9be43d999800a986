"""Documents: the texts of a source, in order."""

import codecs
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow

from data.conversation import document_of, texts_of
from data.prepare.chat_formats import OTHERWISE, as_messages, format_of, messages_in, parsed
from data.prepare.chat_stdlib import conversations_of
from data.prepare.source_files import (
    CSV_SUFFIXES,
    LINE_SUFFIXES,
    TABLE_SUFFIXES,
    UTF_16,
    SourceFile,
    array,
    chunks,
    csv_rows,
    lines,
    problem_of_nuls,
    rows,
)
from system.errors import StorageLost, UserError
from system.files import is_transient, with_retries

CUT_BYTES = 2**20  # bytes of a text; a longer one is cut into documents
UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError, pyarrow.ArrowException)  # errors of a damaged file
EMPTY = "empty"  # the only problem that never stops a preparation
GREETING = "with an answer before the first question, which alone is left out"


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
    """The hub's revision, or a digest of the files (`listing._version`). It changes with any of them."""
    text_column: str = "text"
    on_error: Literal["stop", "skip"] = "stop"
    left_out: str = ""
    """Files of other kinds, by extension."""
    conversations: bool = False
    """True if the documents are conversations: their texts are from `document_of`."""

    def documents(self, file: SourceFile) -> Iterator[Document]:
        """Yield the file's documents, one by one. An empty one is a document with a problem. An unreadable one raises
        UserError, or, with `on_error="skip"`, is a document with a problem. Raise UserError if the file is damaged."""
        for number, text, problem in self.read(file):
            if text or problem:
                yield Document(self.name(file, number), text, "" if text else problem)

    def read(self, file: SourceFile, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, str, str]]:
        """Yield the number, text and problem of each document in a span of the file. An empty line has neither. One
        with both lost only a part. Raise as `documents` does."""
        try:
            for number, content in self._contents(file, start, stop):
                text, problem = self._text_of(file, content)
                if problem and not text and problem != EMPTY:
                    self.report(file, start, number, f"{problem}; correct it")
                yield number, text, re.sub(r"^message \d+ ", "a message ", problem)  # problems are counted by kind
        except UNREADABLE as error:
            raise unreadable(file, error) from error

    def chat_format(self) -> str:
        """Return the format of the first conversation; "" if it is a list of messages, or cannot be read."""
        try:
            _, content = next(self._contents(self.files[0], 0, None))
            record = json.loads(content) if isinstance(content, bytes) else None
        except (*UNREADABLE, ValueError, RecursionError, StopIteration):
            return ""  # the preparation reports it at its place
        return format_of(record) if isinstance(record, dict) and self.text_column not in record else ""

    def texts(self, document: str) -> list[str]:
        """Return the texts in a document: of a conversation, the texts of its messages."""
        return texts_of(document) if self.conversations else [document]

    def name(self, file: SourceFile, number: int) -> str:
        """Return the name of the document of this number, from 1, of a file."""
        if self._is_cut(file):
            return f"{file.name}#{number - 1:08d}"
        if not (self.conversations or file.ends_with(*TABLE_SUFFIXES)):
            return file.name
        return f"{file.name} {'line' if file.ends_with(*LINE_SUFFIXES, *CSV_SUFFIXES) else 'row'} {number}"

    def report(self, file: SourceFile, start: int, number: int, problem: str) -> None:
        """Raise UserError about a document of this number, from 1, of a span that begins at `start`, unless such are
        skipped."""
        if self.on_error == "stop":
            name = self.name_in(file, start, number)
            raise UserError(f"{self.source}: {name}: {problem}, or count and skip such: --on_error=skip")

    def name_in(self, file: SourceFile, start: int, number: int) -> str:
        """Return a document's name by its number, from 1, in a span that begins at `start`."""
        return self.name(file, self.numbers_before(file, start) + number)

    def numbers_before(self, file: SourceFile, start: int) -> int:
        """Return the offset of document numbers in a span that begins at `start`."""
        if not start or not file.ends_with(".jsonl"):
            return 0
        with open_source(file) as opened:
            return sum(1 for _ in lines(file, opened, 0, start))

    def is_divisible(self, file: SourceFile) -> bool:
        """Return whether a span of the file can be read without the text before it."""
        return file.ends_with(".jsonl", ".parquet") or self._is_cut(file)

    def _is_cut(self, file: SourceFile) -> bool:
        is_text = not (file.ends_with(*TABLE_SUFFIXES) or self.conversations)
        return is_text and (len(self.files) == 1 or file.size > CUT_BYTES)

    def _contents(self, file: SourceFile, start: int, stop: int | None) -> Iterator[tuple[int, bytes | ValueError]]:
        """Yield the number and the raw content of each document, or why it has none."""
        with open_source(file) as opened:
            if file.ends_with(".parquet"):
                yield from rows(file, opened, self.text_column, start, stop, self.conversations)
            elif file.ends_with(*CSV_SUFFIXES):
                yield from csv_rows(file, opened, self.text_column, self.conversations)
            elif file.ends_with(*LINE_SUFFIXES):
                yield from lines(file, opened, start, stop)
            elif self.conversations and file.ends_with(".py"):
                module = file.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                made = conversations_of(opened.read().decode(errors="replace"), module)
                yield from enumerate((json.dumps(conversation).encode() for conversation in made), 1)
            elif self.conversations:
                yield from array(file, opened)
            elif self._is_cut(file):
                yield from chunks(opened, start, stop)
            else:
                yield 1, opened.read()

    def _text_of(self, file: SourceFile, content: bytes | ValueError) -> tuple[str, str]:
        """Return a document's text, without a byte-order mark, and why there is none, or not all of it."""
        if isinstance(content, ValueError):
            return "", str(content)
        if not content and file.ends_with(*LINE_SUFFIXES):
            return "", ""
        try:
            text = content.decode("utf-8-sig")
            if problem := problem_of_nuls(text):
                return "", problem
            if self.conversations:
                text, problem = self._conversation_of(text)
            elif file.ends_with(*LINE_SUFFIXES, *CSV_SUFFIXES):
                record = json.loads(text)
                text = record.get(self.text_column) if isinstance(record, dict) else None
                if not isinstance(text, str):
                    return "", f"no text under {self.text_column!r}; {OTHERWISE}"
            text = text.removeprefix("\ufeff")
            text.encode()
        except UnicodeDecodeError:
            return "", UTF_16 if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "not UTF-8"
        except UnicodeEncodeError:
            return "", "invalid Unicode (a lone surrogate)"
        except (json.JSONDecodeError, RecursionError):  # the latter for deep nesting
            return "", "not JSON"
        except ValueError as error:
            return "", str(error)
        return text, problem if text else EMPTY

    def _conversation_of(self, content: str) -> tuple[str, str]:
        """Return the conversation of a record of JSON, and what was left out of it. Raise ValueError, with what is
        wrong."""
        record = json.loads(content)
        if isinstance(record, dict):
            record = record[self.text_column] if self.text_column in record else messages_in(record)
        record = parsed(record)
        if not isinstance(record, list):
            raise ValueError("no list of messages")
        messages = as_messages(record)
        of_system = lambda message: isinstance(message, dict) and message.get("role") in ("system", "developer")
        at = next((i for i, message in enumerate(messages) if not of_system(message)), 0)
        is_greeted = bool(messages) and isinstance(messages[at], dict) and messages[at].get("role") == "assistant"
        return document_of(messages[:at] + messages[at + 1 :] if is_greeted else messages), GREETING * is_greeted


def unreadable(file: SourceFile, error: Exception) -> UserError | StorageLost:
    """Return the error to raise for a file that cannot be read: StorageLost if a disk fails, otherwise UserError."""
    # pyarrow's errors of damaged content have no number.
    is_lost = isinstance(error, OSError) and error.errno is not None and is_transient(error)
    return (StorageLost if is_lost else UserError)(f"{file.url}: cannot be read to its end: {error}")


def open_source(file: SourceFile) -> io.BufferedReader:
    """Open a local file, or one of the hub, whose interrupted download is resumed."""
    if not file.url.startswith("hf:"):
        return open(file.url, "rb")
    from huggingface_hub import hf_hub_download  # half a second to import

    repository, _, rest = file.url.removeprefix("hf:").partition("@")
    revision, _, name = rest.partition(":")
    path = ask(file.url, lambda: hf_hub_download(repository, name, repo_type="dataset", revision=revision))
    return open(path, "rb")


def ask(what: str, ask: Callable[[], Any]) -> Any:
    """Return the hub's answer. Raise StorageLost if it does not answer, and UserError if it refuses."""
    try:
        return with_retries(what, ask)
    except StorageLost:
        raise
    except Exception as error:
        raise UserError(f"{what}: the hub refuses this: {error}") from error

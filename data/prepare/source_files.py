"""Reading a file of text: its documents' contents in order, from the complete file or from a span of its bytes.

Adjacent spans give each document once: the span in which it starts, or in which its group of rows of a .parquet starts.
A document has a number in its file. In a span of a .jsonl the numbers count the span's lines from 1, and the lines
before it are counted only for a message.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import PurePath
from typing import Any

import pyarrow
import pyarrow.parquet

from configs.schema import UserError

TEXT_SUFFIXES = (".txt", ".md", ".py")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# Lines of JSON, as in C4 and Dolma. A .json has lines only if it is compressed.
LINE_SUFFIXES = (".jsonl", *(f"{kind}{suffix}" for kind in (".jsonl", ".json") for suffix in COMPRESSIONS))
TABLE_SUFFIXES = (*LINE_SUFFIXES, ".parquet")
TEXTS = (
    *(pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()),
    *(pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view()),
)
CHUNK_BYTES = 16_384
BATCH_ROWS = 64  # rows of a table in memory at a time


@dataclass(frozen=True)
class SourceFile:
    """A file of documents."""

    name: str
    """Its path below the source, the same on every machine."""
    url: str
    """Location: a local path, or for `hf:` a path of the hub's client."""
    size: int
    """Size in bytes as stored, compressed or not."""
    held_out: bool = False
    """True if all of its documents are held out."""
    changed: float = 0.0
    """Time of its last change, of a local file."""

    def ends_with(self, *suffixes: str) -> bool:
        """Return whether the name ends with one of the suffixes, in upper or lower case."""
        return self.name.lower().endswith(suffixes)


def lines(file: SourceFile, opened: Any, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that start in the span, empty ones without content; all lines of a compressed file."""
    stream, at = opened, start
    if packed := COMPRESSIONS.get(PurePath(file.name.lower()).suffix):
        if not opened.read(1):
            raise EOFError("no byte is there")  # pyarrow would read it as a complete text without a line
        opened.seek(0)
        stream = io.BufferedReader(pyarrow.CompressedInputStream(opened, packed), 2**20)
    if start:
        stream.seek(start - 1)
        at += len(stream.readline()) - 1  # the end of a line that starts earlier
    for number, line in enumerate(stream, 1):
        if stop is not None and not packed and at >= stop:
            return
        at += len(line)
        yield number, b"" if line.isspace() else line


def rows(
    file: SourceFile, opened: Any, column: str, start: int, stop: int | None, nested: bool
) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a .parquet's groups that start in the span. A `nested` column gives JSON."""
    try:
        table = pyarrow.parquet.ParquetFile(opened, page_checksum_verification=True, buffer_size=2**20)
        schema = table.schema_arrow
        _require_text(file, column, schema, nested)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last, of a column's name
        raise UserError(f"{file.url}: not a parquet file, or incomplete: {error}") from error
    before = 0
    for i in range(table.num_row_groups):
        group, read = table.metadata.row_group(i), 0
        place = min(max(group.column(0).data_page_offset, 0), file.size - 1)  # a damaged file may have a wrong offset
        if start <= place and (stop is None or place < stop):
            for batch in table.iter_batches(BATCH_ROWS, [i], columns=[column]):
                yield from enumerate(_contents(batch.column(0)), before + read + 1)
                read += batch.num_rows
            if read != group.num_rows:
                raise UserError(f"{file.url} is damaged: {read} rows, but its metadata has {group.num_rows}")
        before += group.num_rows


def _contents(column: pyarrow.Array) -> Iterator[bytes]:
    """Yield a column's rows: its text, or its value as JSON."""
    if _is_text(column.type):
        return (value.as_py() or b"" for value in column.cast(pyarrow.large_binary()))
    return (json.dumps(value.as_py(), default=lambda _: None).encode() for value in column)  # messages contain no times


def _require_text(file: SourceFile, column: str, schema: pyarrow.Schema, nested: bool) -> None:
    texts = [name for name, kind in zip(schema.names, schema.types) if _is_text(kind, nested)]
    if column not in texts:
        what = "conversations" if nested else "text"
        is_chat = "; conversations need data.prepare's --conversations" * ("messages" in schema.names and not nested)
        found = f"give --text_column, one of: {', '.join(texts)}" if texts else "nor another"
        raise UserError(f"{file.url} has no column {column!r} with {what}; {found}{is_chat}")


def _is_text(kind: pyarrow.DataType, nested: bool = False) -> bool:
    """Return whether a column of this type contains text, or, with `nested`, lists."""
    if nested and (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)):
        return True
    return (kind.value_type if isinstance(kind, pyarrow.DictionaryType) else kind) in TEXTS


def chunks(opened: Any, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield a single text, cut into documents every `CHUNK_BYTES` bytes, or at the next place that `_cut` allows."""
    for i in count(-(-start // CHUNK_BYTES)):
        opened.seek(i * CHUNK_BYTES)
        content = opened.read(2 * CHUNK_BYTES)
        if not content or (stop is not None and i * CHUNK_BYTES >= stop):
            return
        begin, end = _cut(content[:CHUNK_BYTES]) if i else 0, CHUNK_BYTES + _cut(content[CHUNK_BYTES:])
        if text := content[begin:end]:
            yield i + 1, text


def _cut(content: bytes) -> int:
    """Return a position to cut a text: after the first line's end, otherwise after the first space, otherwise between
    two characters."""
    characters = (i for i, byte in enumerate(content) if byte & 0xC0 != 0x80)  # in UTF-8
    return content.find(b"\n") + 1 or content.find(b" ") + 1 or next(characters, 0)

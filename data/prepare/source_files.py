"""Reading a file of text: its documents' contents in order, from the complete file or from a span of its bytes.

Adjacent spans give each document once: the span in which it starts, or in which its group of rows of a .parquet starts.
A document has a number in its file. In a span of a .jsonl the numbers count the span's lines from 1, and the lines
before it are counted only for a message.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import PurePath
from typing import Any

import pyarrow
import pyarrow.parquet

from configs.schema import UserError
from data.prepare.chat_formats import ALSO, FORMATS, OTHERWISE, format_of, unknown

TEXT_SUFFIXES = (".txt", ".md", ".py")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# Lines of JSON, as in C4 and Dolma. A .json has lines only if it is compressed.
LINE_SUFFIXES = (".jsonl", *(f"{kind}{suffix}" for kind in (".jsonl", ".json") for suffix in COMPRESSIONS))
TABLE_SUFFIXES = (*LINE_SUFFIXES, ".parquet")
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
        if not file.size:
            raise EOFError("no byte is there")  # pyarrow would read it as a complete text without a line
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
    """Yield the rows of a .parquet's groups that start in the span; those of conversations (`nested`) as JSON."""
    table = pyarrow.parquet.ParquetFile(opened, page_checksum_verification=True, buffer_size=2**20)
    columns = _columns(file, column, table.schema_arrow.names, nested)
    before = 0
    for i in range(table.num_row_groups):
        group = table.metadata.row_group(i)
        place = min(group.column(0).data_page_offset, file.size - 1)  # a damaged file may have a wrong offset
        if start <= max(place, 0) and (stop is None or place < stop):
            contents = (_contents(batch, nested) for batch in table.iter_batches(BATCH_ROWS, [i], columns=columns))
            yield from enumerate(chain.from_iterable(contents), before + 1)
        before += group.num_rows


def _contents(batch: pyarrow.RecordBatch, nested: bool) -> Iterator[bytes]:
    """Yield the rows: their text, or, with `nested`, their columns as JSON."""
    if nested:
        # messages contain no times
        return (json.dumps(row, default=lambda _: None).encode() for row in batch.to_pylist())
    return (value.as_py() or b"" for value in batch.column(0).cast(pyarrow.large_binary()))


def _columns(file: SourceFile, column: str, names: list[str], nested: bool) -> list[str]:
    """Return the columns to read. Raise UserError if there is no such text, or, with `nested`, no conversation."""
    if column in names:
        return [column]
    if not nested:
        raise UserError(f"{file.url} has no column {column!r}, but {', '.join(names)}; {OTHERWISE}")
    if name := format_of(names):
        return [*FORMATS[name][0], *(one for one in ALSO if one in names)]
    raise UserError(f"{file.url}: {unknown(names)}")


def array(file: SourceFile, opened: Any) -> Iterator[tuple[int, bytes]]:
    """Yield the elements of a .json that is one array, as JSON."""
    try:
        elements = json.loads(opened.read().decode("utf-8-sig"))
    except (ValueError, RecursionError):
        elements = None
    if not isinstance(elements, list):
        raise UserError(f"{file.url} is no array of conversations; with one on each line, call it .jsonl")
    yield from enumerate((json.dumps(element).encode() for element in elements), 1)


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

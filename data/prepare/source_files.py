"""Reading a file of text: its documents' contents in order, from the complete file or from a span of its bytes.

Adjacent spans give each document once: the span in which it starts, or in which its group of rows of a .parquet starts.
A document has a number in its file: that of its line or row. In a span of a .jsonl the numbers count the span's lines
from 1, and the lines before it are counted only for a message.
"""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import pyarrow
import pyarrow.parquet

from data.prepare.chat_formats import ALSO, FORMATS, OTHERWISE, format_of, unknown
from system.errors import UserError

TEXT_SUFFIXES = (".txt", ".md", ".py")
COMPRESSIONS = (".gz", ".zst")
# Lines of JSON, as in C4 and Dolma. A .json has lines only if it is compressed.
LINE_SUFFIXES = (".jsonl", *(f"{kind}{suffix}" for kind in (".jsonl", ".json") for suffix in COMPRESSIONS))
TSV_SUFFIXES = (".tsv", ".tsv.gz", ".tsv.zst")
CSV_SUFFIXES = (".csv", ".csv.gz", ".csv.zst", *TSV_SUFFIXES)
ROWS_SUFFIXES = (*LINE_SUFFIXES, ".parquet")
TABLE_SUFFIXES = (*ROWS_SUFFIXES, *CSV_SUFFIXES)
CHUNK_BYTES = 16_384
BATCH_ROWS = 64  # rows of a table in memory at a time
LONGEST_VALUE = 2**28  # characters of a value in a .csv: a quote that is never closed ends there
UTF_16 = "UTF-16, not UTF-8; convert it: iconv -f utf-16 -t utf-8"
NULS = "NUL bytes in place of text: the file was damaged, as by a full disk or a power cut"
UNEQUAL = "not as many values as the header has names; a value with a separator or a line's end needs quotes"


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
    stream, at = _decompressed(file, opened), start
    if start:
        stream.seek(start - 1)
        at += len(stream.readline()) - 1  # the end of a line that starts earlier
    for number, line in enumerate(stream, 1):
        if stop is not None and stream is opened and at >= stop:
            return
        at += len(line)
        yield number, b"" if line.isspace() else line


def _decompressed(file: SourceFile, opened: Any) -> Any:
    """Return the stream of the file's content. Raise EOFError for a compressed file without a byte."""
    if not file.ends_with(*COMPRESSIONS):
        return opened
    if not file.size:
        raise EOFError("no byte is there")  # otherwise it would be a complete text without a line
    # Python's gzip ignores zeros behind the content, as gzip itself does; pyarrow's does not.
    stream = gzip.GzipFile(fileobj=opened) if file.ends_with(".gz") else pyarrow.CompressedInputStream(opened, "zstd")
    return io.BufferedReader(stream, 2**20)


def csv_rows(file: SourceFile, opened: Any, column: str, nested: bool) -> Iterator[tuple[int, bytes | ValueError]]:
    """Yield the rows of a .csv or .tsv as JSON, each with the number of its first line, and for a row that does not fit
    the header a ValueError that says so. Raise UserError if the column is missing, or if quotes do not match.

    This is Python's reader: pyarrow's takes rows up to 1 MB, and loses a byte if a line's end within quotes is at the
    end of its block (apache/arrow#51368).
    """
    csv.field_size_limit(LONGEST_VALUE)
    # Bytes that are not UTF-8 are kept, so that only their row has that problem.
    text = io.TextIOWrapper(_decompressed(file, opened), "utf-8-sig", "surrogateescape", newline="")
    reader = csv.reader(text, delimiter="\t" if file.ends_with(*TSV_SUFFIXES) else ",", strict=True)
    line = 1
    try:
        names = next(reader, [])
        if problem := problem_of_nuls("".join(names)):
            raise UserError(f"{file.url}: {problem}")
        columns = _columns(file, column, names, nested)
        if twice := [name for name in columns if names.count(name) > 1]:
            raise UserError(f"{file.url} has several columns {twice[0]!r}; give each a name of its own")
        line = reader.line_num + 1
        for values in reader:
            if problem_of_nuls("".join(values)):  # the header was no UTF-16
                yield line, ValueError(NULS)
            elif len(values) == len(names):
                row = {name: value for name, value in zip(names, values) if name in columns}
                yield line, json.dumps(row, ensure_ascii=False).encode(errors="surrogateescape")
            elif values:  # the line is not empty
                yield line, ValueError(UNEQUAL)
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{file.url}: the row that begins at line {line} cannot be read: {error}") from error


def rows(
    file: SourceFile, opened: Any, column: str, start: int, stop: int | None, nested: bool
) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a .parquet's groups that start in the span; those of conversations (`nested`) as JSON."""
    table = pyarrow.parquet.ParquetFile(opened, page_checksum_verification=True, buffer_size=2**20)
    columns = _columns(file, column, table.schema_arrow.names, nested)
    if not nested:
        _require_text(file, column, table.schema_arrow.field(column).type)
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
    if nested and (name := format_of(names)):
        return [*FORMATS[name][0], *(one for one in ALSO if one in names)]
    names = [name[:40] for name in names]  # a text, if a .csv has no header
    problem = unknown(names) if nested else f"no column {column!r}, but {', '.join(names) or 'none'}; {OTHERWISE}"
    if file.ends_with(*CSV_SUFFIXES):
        separators = "tabs" if file.ends_with(*TSV_SUFFIXES) else "commas"
        problem += f"; the file's first line names its columns, with {separators} between them"
    raise UserError(f"{file.url} has {problem}")


def _require_text(file: SourceFile, column: str, kind: pyarrow.DataType) -> None:
    """Raise UserError if a column of this type is no text."""
    try:
        pyarrow.nulls(0, kind).cast(pyarrow.large_binary())
    except pyarrow.ArrowNotImplementedError as error:
        raise UserError(f"{file.url}: the column {column!r} is {kind}, not text; {OTHERWISE}") from error


def problem_of_nuls(text: str) -> str:
    """Return why a text is none that is more than a quarter NUL characters; "" for another text. ASCII in UTF-16 has
    NULs between its characters, and is also UTF-8. It has no three in a row."""
    if 4 * text.count("\0") <= len(text):
        return ""
    return NULS if "\0\0\0" in text else UTF_16


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

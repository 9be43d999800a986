"""The parts of a dataset in the making: what the documents of a task are encoded to.

A task is some spans of the source's files, chosen from their sizes alone. Its part is one file of the folder `parts`,
under a digest of all that it is made from, and is there whole or not at all:

    8 bytes    how long the header is
    header     JSON: documents of each span, problems by document, how many tokens there are
    int64      each document's number of tokens (0: it has a problem) and bytes of text
    16 bytes   of each document's SHA-256
    tokens     a BOS before each document

`parts/DIGEST.at` says which document is being encoded, until the part is there.
"""

import hashlib
import json
import mmap
import struct
import tempfile
from array import array
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np

from configs.files import write_whole
from data.corpus import Corpus
from data.encoding import Encoder
from data.exclusion import load_exclusion
from data.records import SourceFile
from data.shards import token_type
from data.tokenizer import load_tokenizer

TASK_BYTES = 2_000_000, 64_000_000  # a task is a 256th of the source, but no smaller and no larger than these


class Span(NamedTuple):
    """Bytes of a file; to its end where `stop` is None."""

    file: int
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class Task:
    """Spans of the source, one after the other, and what encodes them."""

    corpus: Corpus
    spans: tuple[Span, ...]
    folder: Path
    """The dataset's."""
    tokenizer_sha256: str
    excluded: Path | None = None
    """Says what is left out (data/exclusion.py)."""

    @cached_property
    def part(self) -> Path:
        """Where its part lies. What cannot change a part is not in its name."""
        corpus = self.corpus
        made_from = [corpus.version, corpus.source, corpus.text_column, corpus.separator, self.tokenizer_sha256]
        made_from += [self.excluded and self.excluded.name, self.spans]
        names = [corpus.files[span.file].name for span in self.spans]
        return self.folder / "parts" / hashlib.sha256(json.dumps([made_from, names]).encode()).hexdigest()[:32]

    @property
    def note(self) -> Path:
        """Where it says which document it is at, until it has ended."""
        return self.part.with_suffix(".at")

    @property
    def done(self) -> Path:
        """What is left of its part when all of its documents are in shards: documents of each span."""
        return self.part.with_suffix(".done")

    def run(self) -> None:
        """Makes the part. UserError as `Corpus.read` raises it; OSError where it cannot be written."""
        if not self.part.exists():
            encode(self)

    def at(self) -> bytes | None:
        return self.note.read_bytes() if self.note.exists() else None

    @property
    def size(self) -> int:
        """Bytes of the source."""
        files = self.corpus.files
        return sum((files[s.file].size if s.stop is None else s.stop) - s.start for s in self.spans)

    def place(self) -> str:
        """The document that it was at, by name."""
        try:
            span, number = struct.unpack("<qq", self.note.read_bytes())
        except (OSError, struct.error):
            span, number = 0, 0
        _, start, _ = self.spans[span]
        file = self.corpus.files[self.spans[span].file]
        return self.corpus.name(file, self.corpus.numbers_before(file, start) + number) if number else file.name


def make_tasks(corpus: Corpus, files: list[SourceFile], folder: Path, sha256: str, excluded: Path | None) -> list[Task]:
    """What is to be encoded: large files in several tasks, small ones several to a task."""
    least, most = TASK_BYTES
    size = min(max(sum(file.size for file in files) // 256, least), most)
    spans: list[list[Span]] = [[]]
    filled = 0
    for number, file in enumerate(files):
        cuts = [*range(0, file.size, size)] if corpus.is_divisible(file) and not file.problem else []
        for start, stop in zip(cuts or [0], [*cuts[1:], None]):
            if filled >= size or (len(cuts) > 1 and spans[-1]):
                spans.append([])
                filled = 0
            spans[-1].append(Span(number, start, stop))
            filled += (file.size if stop is None else stop) - start
    return [Task(corpus, tuple(one), folder, sha256, excluded) for one in spans if one]


@cache
def _encoder(folder: Path, sha256: str) -> Encoder:
    return Encoder(load_tokenizer(folder))


def encode(task: Task) -> None:
    exclusion = task.excluded and load_exclusion(task.excluded)
    encoder = _encoder(task.folder / "tokenizer", task.tokenizer_sha256)
    dtype = token_type(encoder.tokenizer.vocab_size)
    bos = np.array([encoder.tokenizer.bos], dtype).tobytes()
    lengths, sizes, hashes, problems, spans = array("q"), array("q"), bytearray(), [], []
    with open(task.note, "w+b") as at, tempfile.TemporaryFile(dir=task.part.parent, buffering=2**20) as tokens:
        at.write(bytes(16))
        at.flush()
        place = mmap.mmap(at.fileno(), 16)  # survives the process, at no call to the system a document
        for i, span in enumerate(task.spans):
            before, place[:] = len(lengths), struct.pack("<qq", i, 1)
            file = task.corpus.files[span.file]
            for number, text, problem in task.corpus.read(file, span.start, span.stop):
                place[:] = struct.pack("<qq", i, number)
                if not (text or problem):
                    continue
                if exclusion and not problem and not file.held_out:
                    problem = exclusion.problem(text)
                    text = "" if problem else text
                length, size, digest = 0, 0, hashlib.sha256()
                if problem:
                    problems.append([len(lengths), problem])
                else:
                    length += 1
                    tokens.write(bos)
                for window in encoder.windows(text) if text else ():
                    ids = encoder.encode(window).astype(dtype)
                    tokens.write(ids.data)
                    content = window.encode()
                    length, size = length + len(ids), size + len(content)
                    digest.update(content)
                lengths.append(length)
                sizes.append(size)
                hashes += digest.digest()[:16]
                place[8:] = struct.pack("<q", number + 1)  # which is read now
            spans.append(len(lengths) - before)
        tokens.flush()
        header = json.dumps({"spans": spans, "problems": problems, "tokens": sum(lengths)}).encode()
        mapped = mmap.mmap(tokens.fileno(), 0, access=mmap.ACCESS_READ) if sum(lengths) else b""
        own = task.part.with_name(f"{task.part.name}.{uuid4().hex}")  # a worker whose command died may write it, too
        columns = (column.tobytes() for column in (lengths, sizes))
        write_whole(own, struct.pack("<q", len(header)), header, *columns, bytes(hashes), memoryview(mapped))
        own.replace(task.part)
    task.note.unlink(missing_ok=True)


class Part:
    """A part, read."""

    def __init__(self, path: Path, dtype: np.dtype):
        with path.open("rb") as file:
            (length,) = struct.unpack("<q", file.read(8))
            header = json.loads(file.read(length))
        self.spans: list[int] = header["spans"]
        """Documents of each span."""
        self.problems: dict[int, str] = dict(header["problems"])
        count, at = sum(self.spans), 8 + length
        columns = np.fromfile(path, "<i8", 2 * count, offset=at).reshape(2, count)
        self.lengths, self.sizes = columns
        at += columns.nbytes
        self.hashes = np.fromfile(path, "S16", count, offset=at)
        self.shares = self.hashes.view(">u8")[::2] / 2**64
        """Each document's `hash_share`."""
        at += self.hashes.nbytes
        self.tokens = np.memmap(path, dtype, "r", at) if header["tokens"] else np.zeros(0, dtype)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.firsts = np.cumsum([0, *self.spans])
        """Index of each span's first document."""

"""The parts of a dataset during preparation: the encoded documents of each task.

A task is some spans of the source's files, chosen by size alone. Its part is one file of the folder `parts`, named by a
digest of everything it is made from, and written atomically:

    8 bytes    how long the header is
    header     JSON: the number of documents with text, and the number of others by problem
    int64      start of each document among the tokens, and end of the last
    int64      bytes of each document's text
    uint8      1 for each held-out document
    tokens     a BOS before each document

With deduplication, 20 bytes per document come before the tokens, ordered by hash: the first and the second eight bytes
of the text's SHA-256, and the document's number. With a seed the documents are in an order drawn from it.

`parts/DIGEST.at` has the number of the document that is being encoded, until the part is complete.
"""

import hashlib
import json
import mmap
import struct
import tempfile
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np
from jaxtyping import Bool, Int, Shaped

from configs.files import write_whole
from data.prepare.corpus import Corpus
from data.prepare.encoding import ConversationEncoder, Encoder
from data.prepare.exclusion import load_exclusion
from data.prepare.source_files import SourceFile
from data.shards import token_type
from data.tokenizer import load_tokenizer

TASK_BYTES = 2_000_000, 256_000_000  # a task is a 256th of the source, but no smaller and no larger than these


class Span(NamedTuple):
    """Bytes of a file; to its end where `stop` is None."""

    file: SourceFile
    start: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        return (self.file.size if self.stop is None else self.stop) - self.start


@dataclass(frozen=True)
class Recipe:
    """The recipe for the parts and shards of a dataset."""

    folder: Path
    """The dataset's."""
    sha256: str
    """Fingerprint of the tokenizer in the folder."""
    vocab_size: int
    threshold: float
    """Documents whose text's hash is below this are held out, as are those of held-out files."""
    excluded: Path | None
    """The file of texts to exclude (data/prepare/exclusion.py)."""
    deduplicate: bool
    seed: int | None
    """Seed of the documents' order; None: the source's order."""
    shard_tokens: int

    @property
    def dtype(self) -> np.dtype:
        return token_type(self.vocab_size)

    def order(self, level: int, number: int, documents: int) -> Int[np.ndarray, "documents"]:
        """Return an order of `documents` documents. The raw stream of PCG64 is the same in every numpy."""
        if self.seed is None:
            return np.arange(documents)
        return np.argsort(np.random.PCG64([self.seed, level, number]).random_raw(documents), kind="stable")


@dataclass(frozen=True)
class Task:
    """Encode spans of the source, in order, into a part."""

    recipe: Recipe
    corpus: Corpus
    """The corpus without the source's files: a task is sent only with its own."""
    number: int
    spans: tuple[Span, ...]
    end: tuple[int, ...]
    """Start of the next task: the file's number, and the byte in it."""

    @property
    def out(self) -> Path:
        """Return the path of the task's part. Its name depends only on what can change the part."""
        corpus = replace(self.corpus, files=[], on_error="stop", left_out="")
        recipe = replace(self.recipe, folder=Path(), excluded=None)
        excluded = self.recipe.excluded and self.recipe.excluded.name
        number = None if self.recipe.seed is None else self.number
        spans = [(file.name, file.held_out, start, stop) for file, start, stop in self.spans]
        made_from = repr((corpus, recipe, excluded, number, spans)).encode(errors="surrogateescape")
        return self.recipe.folder / "parts" / hashlib.sha256(made_from).hexdigest()[:32]

    @property
    def size(self) -> int:
        """Return the task's bytes of the source."""
        return sum(span.size for span in self.spans)

    def run(self) -> None:
        """Make the part. Raise UserError as `Corpus.read`, and OSError if it cannot be written."""
        if not self.out.exists():
            _encode(self)

    @property
    def _note(self) -> Path:
        return self.out.with_suffix(".at")

    def at(self) -> bytes | None:
        return self._note.read_bytes() if self._note.exists() else None

    def place(self) -> str:
        """Return the name of the current document."""
        try:
            span, number = struct.unpack("<qq", self._note.read_bytes())
        except (OSError, struct.error):
            span, number = 0, 0
        file, start, _ = self.spans[span]
        return self.corpus.name(file, self.corpus.numbers_before(file, start) + number) if number else file.name


def make_tasks(
    recipe: Recipe, corpus: Corpus, files: Sequence[SourceFile], first: tuple[int, int] = (0, 0)
) -> list[Task]:
    """Return the tasks for the corpus's first files, from file and byte `first` on. Large files make several tasks;
    small ones share a task."""
    least, most = TASK_BYTES
    size = min(max(sum(file.size for file in corpus.files) // 256, least), most)
    spans: list[Span] = []
    tasks: list[Task] = []
    filled = 0
    bare = replace(corpus, files=corpus.files if len(corpus.files) == 1 else [])  # only a single file is cut

    def close(*end: int) -> None:
        nonlocal filled
        if spans:
            tasks.append(Task(recipe, bare, len(tasks), tuple(spans), end))
            spans.clear()
            filled = 0

    for number, file in enumerate(files[first[0] :], first[0]):
        begin = first[1] if number == first[0] else 0
        cuts = [*range(begin, file.size, size)] if corpus.is_divisible(file) and not file.problem else []
        if len(cuts) > 1:
            close(number, 0)
        for start, stop in zip(cuts or [0], [*cuts[1:], None]):
            spans.append(Span(file, start, stop))
            filled += spans[-1].size
            if stop or filled >= size:
                close(number + (stop is None), stop or 0)
    close(len(files), 0)
    return tasks


@cache
def _encoder(folder: Path, sha256: str, conversations: bool) -> Encoder:
    return (ConversationEncoder if conversations else Encoder)(load_tokenizer(folder))


def _encode(task: Task) -> None:
    recipe = task.recipe
    encoder = _encoder(recipe.folder / "tokenizer", recipe.sha256, task.corpus.conversations)
    exclusion = recipe.excluded and load_exclusion(recipe.excluded)
    bos = np.array([encoder.tokenizer.bos], recipe.dtype).tobytes()
    starts, sizes, hashes, held_out, problems = array("q", [0]), array("q"), array("Q"), bytearray(), Counter()
    with open(task._note, "w+b") as at, tempfile.TemporaryFile(dir=task.out.parent, buffering=2**20) as tokens:
        at.write(bytes(16))
        at.flush()
        place = mmap.mmap(at.fileno(), 16)  # survives the process, without a system call per document
        for i, span in enumerate(task.spans):
            place[:] = struct.pack("<qq", i, 1)
            for number, text, problem in task.corpus.read(*span):
                place[:] = struct.pack("<qq", i, number)
                if exclusion and text and not span.file.held_out:
                    decoded = text if isinstance(text, str) else text.decode()
                    problem = exclusion.problem(decoded, task.corpus.texts(decoded))
                problems[problem] += bool(problem)
                if problem or not text:
                    continue
                length, size, digest = 1, 0, hashlib.sha256()
                tokens.write(bos)
                for window in encoder.windows(text):
                    ids = encoder.encode(window).astype(recipe.dtype)
                    tokens.write(ids.data)
                    content = window.encode()
                    length, size = length + len(ids), size + len(content)
                    digest.update(content)
                starts.append(starts[-1] + length)
                sizes.append(size)
                hashes.extend(struct.unpack(">QQ", digest.digest()[:16]))
                held_out.append(span.file.held_out or hashes[-2] / 2**64 < recipe.threshold)
                place[8:] = struct.pack("<q", number + 1)  # the document being read
        tokens.flush()
        encoded = memoryview(mmap.mmap(tokens.fileno(), 0, access=mmap.ACCESS_READ) if sizes else b"")
        columns = (
            np.array(starts, np.int64),
            np.array(sizes, np.int64),
            np.frombuffer(held_out, bool),
            np.array(hashes, np.uint64).reshape(-1, 2),
        )
        write_part(task, +problems, *columns, encoded)
    task._note.unlink(missing_ok=True)


def write_part(
    task: Task,
    problems: Counter,
    starts: Int[np.ndarray, "documents_and_1"],
    sizes: Int[np.ndarray, "documents"],
    held_out: Bool[np.ndarray, "documents"],
    hashes: Shaped[np.ndarray, "documents 2"],
    tokens: memoryview | None,
) -> None:
    """Write the part of a task atomically, with its documents in the order of the seed."""
    recipe, count = task.recipe, len(sizes)
    header = json.dumps({"documents": count, "problems": problems}).encode()
    order, width = recipe.order(0, task.number, count), recipe.dtype.itemsize
    places = np.append(0, np.cumsum(np.diff(starts)[order]))
    columns = [places, sizes[order], held_out[order]]
    if recipe.deduplicate:
        by_hash = np.argsort(hashes[order, 0], kind="stable")
        columns += [hashes[order[by_hash], 0], hashes[order[by_hash], 1], by_hash.astype("<i4")]
    pieces = [tokens or b""]
    if tokens and recipe.seed is not None:
        pieces = [tokens[starts[i] * width : starts[i + 1] * width] for i in order]
    own = task.out.with_name(f"{task.out.name}.{uuid4().hex}")  # a worker of a dead command may write it, too
    write_whole(own, struct.pack("<q", len(header)), header, *(column.tobytes() for column in columns), *pieces)
    own.replace(task.out)


class Part:
    """A part, read on demand."""

    def __init__(self, recipe: Recipe, path: Path):
        with path.open("rb") as file:
            (length,) = struct.unpack("<q", file.read(8))
            header = json.loads(file.read(length))
        self.path, self.documents, self.problems = path, header["documents"], header["problems"]
        kinds = {"starts": "<i8", "sizes": "<i8", "held_out": "?"}
        if recipe.deduplicate:
            kinds |= {"hashes": "<u8", "hashes_2": "<u8", "of_hashes": "<i4"}
        self.columns, at = {}, 8 + length
        for name, kind in [*kinds.items(), ("tokens", recipe.dtype)]:
            self.columns[name] = np.dtype(kind), at
            at += np.dtype(kind).itemsize * (self.documents + (name == "starts"))

    def read(self, column: str, start: int, stop: int) -> Shaped[np.ndarray, "items"]:
        """Return items `start` to `stop` of a column."""
        dtype, at = self.columns[column]
        return np.fromfile(self.path, dtype, max(stop - start, 0), offset=at + start * dtype.itemsize)

    def mapped(self, column: str) -> Shaped[np.ndarray, "documents"]:
        """Return a column with an item for each document, for searches."""
        dtype, at = self.columns[column]
        return np.memmap(self.path, dtype, "r", at, self.documents) if self.documents else np.zeros(0, dtype)

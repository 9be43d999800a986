"""The parts of a dataset during preparation: the encoded documents of each task.

A task is some spans of the source's files, chosen by size alone. Its part is a folder below `parts`, named by a digest
of everything it is made from, and renamed to that when it is complete:

    facts.json       the number of documents with text, and the number of others by problem
    starts           start of each document among the tokens, and end of the last
    sizes            bytes of each document's text
    held_out         true for each held-out document
    tokens           a BOS before each document

With deduplication `hashes` and `hashes_2` have the first and the second eight bytes of each text's SHA-256, in
the order of the first, and `of_hashes` the documents' numbers.
"""

import hashlib
import io
import json
import mmap
import shutil
import struct
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from data.prepare.selection import load_shares
from data.prepare.source_files import SourceFile
from data.record import hash_share
from data.shards import token_type
from data.tokenizer import load_tokenizer

COLUMNS = {"starts": "<i8", "sizes": "<i8", "held_out": "?", "hashes": "<u8", "hashes_2": "<u8", "of_hashes": "<i4"}
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
    """The file of the held-out texts' hashes (data/prepare/selection.py); None: none is in a file of its own."""
    deduplicate: bool
    shard_tokens: int

    @property
    def dtype(self) -> np.dtype:
        return token_type(self.vocab_size)


@dataclass(frozen=True)
class Task:
    """Encode spans of the source, in order, into a part."""

    recipe: Recipe
    corpus: Corpus
    """The corpus without the source's files: a task is sent only with its own."""
    spans: tuple[Span, ...]
    end: tuple[int, ...]
    """Start of the next task: the file's number, and the byte in it."""

    @property
    def out(self) -> Path:
        """Return the path of the task's part. Its name depends only on what can change the part."""
        corpus = replace(self.corpus, files=[], on_error="stop", left_out="", unread=())
        recipe = replace(self.recipe, folder=Path(), excluded=None)
        excluded = self.recipe.excluded and self.recipe.excluded.name
        spans = [(file.name, file.held_out, start, stop) for file, start, stop in self.spans]
        made_from = repr((corpus, recipe, excluded, spans)).encode(errors="surrogateescape")
        return self.recipe.folder / "parts" / hashlib.sha256(made_from).hexdigest()[:32]

    @property
    def size(self) -> int:
        """Return the task's bytes of the source."""
        return sum(span.size for span in self.spans)

    def run(self) -> None:
        """Make the part. Raise UserError as `Corpus.read`, and OSError if it cannot be written."""
        if not self.out.exists():
            _encode(self)


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
            tasks.append(Task(recipe, bare, tuple(spans), end))
            spans.clear()
            filled = 0

    for number, file in enumerate(files[first[0] :], first[0]):
        begin = first[1] if number == first[0] else 0
        cuts = [*range(begin, file.size, size)] if corpus.is_divisible(file) else []
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
    excluded = load_shares(recipe.excluded) if recipe.excluded else frozenset()
    bos = np.array([encoder.tokenizer.bos], recipe.dtype).tobytes()
    starts, sizes, hashes, held_out, problems = array("q", [0]), array("q"), array("Q"), bytearray(), Counter()
    with tempfile.TemporaryFile(dir=task.out.parent, buffering=2**20) as tokens:
        for span in task.spans:
            for _, text, problem in task.corpus.read(*span):
                if text and not span.file.held_out and excluded and hash_share(text) in excluded:
                    problem = "the text of a held-out document"
                problems[problem] += bool(problem)
                if problem or not text:
                    continue
                length, content = 1, text.encode()
                tokens.write(bos)
                for window in encoder.windows(text):
                    ids = encoder.encode(window).astype(recipe.dtype)
                    tokens.write(ids.data)
                    length += len(ids)
                starts.append(starts[-1] + length)
                sizes.append(len(content))
                hashes.extend(struct.unpack(">QQ", hashlib.sha256(content).digest()[:16]))
                held_out.append(span.file.held_out or hashes[-2] / 2**64 < recipe.threshold)
        tokens.flush()
        encoded = memoryview(mmap.mmap(tokens.fileno(), 0, access=mmap.ACCESS_READ) if sizes else b"")
        numbers = np.array(starts, np.int64), np.array(sizes, np.int64), np.frombuffer(held_out, bool)
        write_part(task, +problems, *numbers, np.array(hashes, np.uint64).reshape(-1, 2), encoded)


def write_part(
    task: Task,
    problems: Counter,
    starts: Int[np.ndarray, "documents_and_1"],
    sizes: Int[np.ndarray, "documents"],
    held_out: Bool[np.ndarray, "documents"],
    hashes: Shaped[np.ndarray, "documents 2"],
    tokens: memoryview,
) -> None:
    """Write the part of a task atomically."""
    columns = {"starts": starts, "sizes": sizes, "held_out": held_out}
    if task.recipe.deduplicate:
        by_hash = np.argsort(hashes[:, 0], kind="stable")
        first, second = hashes[by_hash].T
        columns |= {"hashes": first, "hashes_2": second, "of_hashes": by_hash}
    with complete_folder(task.out) as folder:
        for name, column in columns.items():
            write_whole(folder / name, np.ascontiguousarray(column, COLUMNS[name]).data)
        write_whole(folder / "tokens", tokens)
        write_whole(folder / "facts.json", json.dumps([len(sizes), problems]))


@contextmanager
def complete_folder(path: Path) -> Iterator[Path]:
    """Give a folder that gets its name when it is complete. A worker of a dead command may make it, too."""
    own = path.with_name(f"{path.name}.{uuid4().hex}")
    own.mkdir()
    try:
        yield own
        try:
            own.rename(path)
        except OSError:
            if not path.exists():  # otherwise another worker was first
                raise
    finally:
        shutil.rmtree(own, ignore_errors=True)


def write_array(path: Path, array: Shaped[np.ndarray, "items"]) -> None:
    """Write an array atomically, as numpy does."""
    content = io.BytesIO()
    np.save(content, array)
    write_whole(path, content.getvalue())  # a view of it crashes Python 3.12 if the write fails


class Part:
    """A part, read on demand."""

    def __init__(self, path: Path):
        self.path = path
        self.documents, self.problems = json.loads((path / "facts.json").read_bytes())

    def mapped(self, column: str) -> Shaped[np.ndarray, "items"]:
        """Map a column into memory. This keeps a file open."""
        path, kind = self.path / column, np.dtype(COLUMNS[column])
        return np.memmap(path, kind, "r") if path.stat().st_size else np.zeros(0, kind)

    def read(self, column: str, start: int, stop: int) -> Shaped[np.ndarray, "items"]:
        return np.array(self.mapped(column)[start:stop])

    def tokens(self, start: int, stop: int, dtype: np.dtype) -> Shaped[np.ndarray, "tokens"]:
        return np.fromfile(self.path / "tokens", dtype, stop - start, offset=start * dtype.itemsize)

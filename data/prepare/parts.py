"""The tasks of a preparation: each reads some spans of the source's files, and makes shards of their documents. Tasks
run in processes, in any order. The dataset takes their shards in the source's order.

Spans are chosen by size alone, so the shards do not depend on the processes that make them.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from data.prepare.corpus import Corpus
from data.prepare.encoding import Encoder
from data.prepare.record import write_dataset_json
from data.prepare.selection import hash_share
from data.prepare.shard_writer import token_type, write_shard
from data.prepare.source_files import SourceFile
from data.tokenizer import load_tokenizer
from system.errors import UserError
from system.files import write_whole
from system.progress import progress

MISCOUNTED = "whose tokens count other bytes than the text has"
HASH_BYTES = 16  # of a text's SHA-256, to find duplicates
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
    """The recipe for the shards of a dataset."""

    folder: Path
    """The dataset's, with its tokenizer."""
    parts: Path
    """An empty folder for what tasks make."""
    sha256: str
    """The tokenizer's fingerprint."""
    threshold: float
    """Documents whose text's hash is below this are held out, as are those of held-out files."""
    shard_tokens: int
    deduplicate: bool


@dataclass(frozen=True)
class Task:
    """Some spans of the source, in order."""

    recipe: Recipe
    corpus: Corpus
    """The corpus without the source's files: a task is sent only with its own."""
    spans: tuple[Span, ...]
    end: tuple[int, int]
    """Start of the next task: the file's number, and the byte in it."""
    duplicates: Bool[np.ndarray, "documents"] | None = None
    """True for each document whose text an earlier one has; None without deduplication."""

    @property
    def size(self) -> int:
        """Return the task's bytes of the source."""
        return sum(span.size for span in self.spans)

    def documents(self) -> Iterator[tuple[Span, int, str, str]]:
        """Yield each document: its span, its number in it, its text, and why it has none or lost a part. Raise
        UserError as `Corpus.read`."""
        for span in self.spans:
            for number, text, problem in self.corpus.read(*span):
                yield span, number, text, problem


def make_shards(recipe: Recipe, corpus: Corpus, files: list[SourceFile], facts: dict, workers: int) -> None:
    """Make the missing shards of a dataset with `workers` processes. `facts` is the record: shards are added to it in
    order. Raise the first failure, in the source's order, when everything before it is complete."""
    shards = facts["shards"]
    while shards and "until" not in shards[-1]:
        shards.pop()  # from a task that lost a shard
    start = tuple(shards[-1]["until"]) if shards else (0, 0)
    if recipe.deduplicate:  # a shard depends on the documents of all tasks
        tasks = _with_duplicates(make_tasks(recipe, corpus, files), workers)[start[0] :]
    else:
        tasks = make_tasks(recipe, corpus, files, start)
    _work(encode_texts, tasks, workers, lambda made: _take(made, recipe.folder, facts))


def _with_duplicates(tasks: list[Task], workers: int) -> list[Task]:
    """Return the tasks, each with the duplicates among its documents: those whose hash an earlier document has. A task
    ends at its number, not at a file. This takes about 80 bytes for each document."""
    hashes: list[np.ndarray] = []
    _work(hash_texts, tasks, workers, lambda made: hashes.append(np.fromfile(made, (np.uint64, HASH_BYTES // 8))))
    every, ends = np.concatenate(hashes), np.cumsum([len(one) for one in hashes])
    order = np.lexsort(every.T)  # stable: equal hashes stay in order
    again = np.zeros(len(every), bool)
    again[order[1:]] = (every[order[1:]] == every[order[:-1]]).all(axis=1)
    parts = np.split(again, ends[:-1])
    return [replace(task, end=(i, 0), duplicates=one) for i, (task, one) in enumerate(zip(tasks, parts), 1)]


def _take(made: Path, folder: Path, facts: dict) -> None:
    """Take a task's shards into the dataset's folder."""
    shards = facts["shards"]
    for entry in json.loads((made / "entries.json").read_bytes()):
        sides = entry.keys() & {"train", "val"}
        if shards and not sides:  # it has no document
            skipped = Counter(shards[-1]["skipped"]) + Counter(entry["skipped"])
            shards[-1] |= entry | {"skipped": skipped, "first": entry["first"] | shards[-1].get("first", {})}
            continue
        for side in sides:
            file = made / entry[side]["file"]
            entry[side]["file"] = f"{side}_{len(shards):06d}.bin"
            for suffix in (".starts.npy", ".blocks", ".bin"):
                file.with_suffix(suffix).rename((folder / entry[side]["file"]).with_suffix(suffix))
        shards.append(entry)
    write_dataset_json(folder, facts)
    shutil.rmtree(made)


def _work(
    make: Callable[[Task, Path], None], tasks: Sequence[Task], workers: int, take: Callable[[Path], None]
) -> None:
    """Call `make` for each task in up to `workers` processes, or in this one, and take what it makes in order. Raise
    the first failure, once the outputs before it are taken."""
    paths = [task.recipe.parts / f"{make.__name__}-{number}" for number, task in enumerate(tasks)]
    count = min(workers, len(tasks))
    context = multiprocessing.get_context("spawn")  # JAX and its threads may be in this process
    pool = ProcessPoolExecutor(count, context, _start_worker, (os.getpid(),)) if count > 1 else None
    try:
        with progress(total=sum(task.size for task in tasks), unit="B", unit_scale=True, desc="preparing") as bar:
            for task, path, _ in zip(tasks, paths, (pool.map if pool else map)(make, tasks, paths)):
                take(path)
                bar.update(task.size)
    except BrokenProcessPool as error:
        raise UserError(
            "a worker was killed, as for want of memory, or crashed; the same command continues: with fewer "
            "--workers it needs less memory"
        ) from error
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)


def _start_worker(parent: int) -> None:
    """Ignore Ctrl-C in a worker, and end it with the command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with(parent)


def end_with(parent: int) -> None:
    """End this process within a second after its parent: an orphan would keep the dataset's lock."""

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


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

    def close(file: int, byte: int) -> None:
        nonlocal filled
        if spans:
            tasks.append(Task(recipe, bare, tuple(spans), (file, byte)))
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


def hash_texts(task: Task, out: Path) -> None:
    """Write the hashes of the task's texts. Raise UserError as `Corpus.read`, and OSError if that is impossible."""
    digests = (hashlib.sha256(text.encode()).digest() for _, _, text, _ in task.documents() if text)
    out.write_bytes(b"".join(digest[:HASH_BYTES] for digest in digests))


def encode_texts(task: Task, out: Path) -> None:
    """Make a folder with the task's shards, and `entries.json`: their entries for dataset.json. Raise as
    `hash_texts`."""
    recipe, problems = task.recipe, Counter()
    first_of: dict[str, tuple[str, int, int]] = {}  # by problem
    encoder = _encoder(recipe.folder / "tokenizer", recipe.sha256, task.corpus.conversations)
    dtype = token_type(encoder.tokenizer.vocab_size)
    bos = np.array([encoder.tokenizer.bos], dtype).tobytes()
    starts, sizes, held_out, kept = array("q", [0]), array("q"), bytearray(), bytearray()
    out.mkdir()
    with tempfile.TemporaryFile(dir=out.parent, buffering=2**20) as tokens:
        for span, number, text, problem in task.documents():
            if problem:
                problems[problem] += 1
                first_of.setdefault(problem, (span.file.name, span.start, number))
            if not text:
                continue
            encoded = encoder.encode(text)
            wrong = encoder.miscounted(text, encoded)
            kept.append(not wrong)
            if wrong:
                advice = f"{wrong}, so bits per byte would be wrong; give another --tokenizer"
                task.corpus.report(span.file, span.start, number, advice)
                problems[MISCOUNTED] += 1
                first_of.setdefault(MISCOUNTED, (span.file.name, span.start, number))
                continue
            ids = encoded.astype(dtype)
            tokens.write(bos)
            tokens.write(ids.data)
            starts.append(starts[-1] + 1 + len(ids))
            sizes.append(len(text.encode()))
            held_out.append(span.file.held_out or hash_share(text) < recipe.threshold)
        is_val = np.frombuffer(held_out, bool)
        again = np.zeros(len(sizes), bool)
        if task.duplicates is not None:
            again = task.duplicates[np.frombuffer(kept, bool)]
            problems["a duplicate"] = int(again.sum())
        places, entries = np.array(starts, np.int64), []
        lengths = np.diff(places)
        for number, (first, last) in enumerate(_bounds(places, recipe.shard_tokens)):
            tokens.seek(int(places[first]) * dtype.itemsize)
            joined = np.fromfile(tokens, dtype, int(places[last] - places[first]))
            entry: dict = {"skipped": {}, "first": {}}
            for side, wanted in (("train", ~is_val & ~again), ("val", is_val & ~again)):
                wanted = wanted[first:last]
                if wanted.any():
                    path = out / f"{side}_{number:06d}.bin"
                    laid_out = joined[np.repeat(wanted, lengths[first:last])]
                    of_side = lengths[first:last][wanted]
                    entry[side] = {
                        **{"file": path.name, "documents": len(of_side), "tokens": len(laid_out)},
                        "sha256": write_shard(path, laid_out, of_side, encoder.tokenizer.vocab_size),
                        "bytes": int(np.array(sizes[first:last])[wanted].sum()),
                    }
            entries.append(entry)
    entries[-1] |= {"skipped": problems, "first": first_of, "until": task.end}
    write_whole(out / "entries.json", json.dumps(entries))


@cache
def _encoder(folder: Path, sha256: str, conversations: bool) -> Encoder:
    return Encoder(load_tokenizer(folder), conversations)


def _bounds(starts: Int[np.ndarray, "documents_and_1"], shard_tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the first document of each shard, and the one after its last."""
    tokens = int(starts[-1])
    count = max(round(tokens / shard_tokens), 1)
    inner = np.searchsorted(starts, [tokens * i // count for i in range(1, count)]).tolist()
    return pairwise([0, *inner, len(starts) - 1])

"""Making a dataset's shards from parts. Processes lay them out, each independently and in any order. The dataset takes
them in the source's order."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import accumulate, pairwise
from multiprocessing.connection import wait as wait_for
from pathlib import Path

import numpy as np

from configs.files import write_whole
from configs.messages import progress
from configs.schema import UserError
from data.prepare.corpus import Corpus
from data.prepare.parts import Part, Recipe, Task, complete_folder, make_tasks, write_array
from data.prepare.source_files import SourceFile
from data.shards import write_blocks, write_shard

COMPARED = 2**22  # documents with hashes in memory at a time
AGAIN = "again"  # in the folder `parts`: for each document, whether an earlier one has its text


@dataclass(frozen=True)
class Layout:
    """Lay out the shards of one task's part."""

    recipe: Recipe
    task: Task | None
    """The task to encode first, whose part is not kept; None: the part is there."""
    part: str
    """The part's name in the folder `parts`."""
    before: int
    """Documents in the parts before this one; counted only with deduplication."""
    end: tuple[int, ...]
    """Start of the remaining work: the number of a file and a byte in it, or of a layout."""

    @property
    def out(self) -> Path:
        """Return the folder for the shards, and for `entries.json`: their entries for dataset.json."""
        return self.recipe.folder / "parts" / f"{self.part}.shards"

    @property
    def size(self) -> int:
        """Return the bytes of the source to encode."""
        return self.task.size if self.task else 0

    def run(self) -> None:
        """Make the folder. Raise UserError as `Corpus.read`, and OSError if it cannot be written."""
        if self.out.exists():
            return
        if self.task:
            self.task.run()
        with complete_folder(self.out) as folder:
            self._write_shards(Part(self.recipe.folder / "parts" / self.part), folder)
        if self.task:
            shutil.rmtree(self.task.out, ignore_errors=True)

    def _write_shards(self, part: Part, folder: Path) -> None:
        starts, skipped = part.mapped("starts"), Counter(part.problems)
        tokens = int(starts[-1])
        count = max(round(tokens / self.recipe.shard_tokens), 1)
        inner = np.searchsorted(starts, [tokens * i // count for i in range(1, count)]).tolist()
        bounds = pairwise([0, *inner, part.documents])
        entries = [self._write_shard(part, folder, *shard, skipped) for shard in enumerate(bounds)]
        entries[-1] |= {"skipped": skipped, "until": self.end}
        write_whole(folder / "entries.json", json.dumps(entries))

    def _write_shard(self, part: Part, folder: Path, number: int, bounds: tuple[int, int], skipped: Counter) -> dict:
        """Write the files of a shard: of the part's documents between `bounds`. Count its duplicates in `skipped`, and
        return its entry for dataset.json."""
        recipe, (first, last) = self.recipe, bounds
        starts, again = part.read("starts", first, last + 1), np.zeros(last - first, bool)
        if recipe.deduplicate:
            again = np.fromfile(recipe.folder / "parts" / AGAIN, bool, last - first, offset=self.before + first)
            skipped["a duplicate"] += int(again.sum())
        lengths, sizes, held_out = np.diff(starts), part.read("sizes", first, last), part.read("held_out", first, last)
        joined, begins = part.tokens(int(starts[0]), int(starts[-1]), recipe.dtype), starts[:-1] - starts[0]
        entry: dict = {"skipped": {}}
        for side, wanted in (("train", ~held_out & ~again), ("val", held_out & ~again)):
            if not wanted.any():
                continue
            places = np.cumsum(lengths[wanted]) - lengths[wanted]
            laid_out = np.empty(int(lengths[wanted].sum()), joined.dtype)
            for begin, length, place in zip(begins[wanted].tolist(), lengths[wanted].tolist(), places.tolist()):
                laid_out[place : place + length] = joined[begin : begin + length]
            path = folder / f"{side}_{number:06d}.bin"
            write_array(path.with_suffix(".starts.npy"), places)
            write_shard(path, laid_out, recipe.vocab_size)
            entry[side] = {
                "file": path.name,
                "documents": int(wanted.sum()),
                "tokens": len(laid_out),
                "bytes": int(sizes[wanted].sum()),
                "sha256": write_blocks(path),
            }
        return entry


def _find_duplicates(recipe: Recipe, parts: Sequence[Part]) -> None:
    """Write `AGAIN`. It compares a range of hashes at a time, a stretch of each part."""
    firsts = np.cumsum([0, *(part.documents for part in parts)])
    again, rounds = np.zeros(firsts[-1], bool), int(firsts[-1]) // COMPARED + 1
    bounds = [(2**64 * i // rounds) for i in range(rounds)]
    for low, high in zip(bounds, [*bounds[1:], None]):
        stretches = []
        for part, first in zip(parts, firsts):
            hashes = part.mapped("hashes")
            start = int(np.searchsorted(hashes, np.uint64(low)))
            stop = part.documents if high is None else int(np.searchsorted(hashes, np.uint64(high)))
            hashes_2, numbers = (part.read(name, start, stop) for name in ("hashes_2", "of_hashes"))
            stretches.append((np.array(hashes[start:stop]), hashes_2, first + numbers))
        hashes, hashes_2, documents = (np.concatenate(column) for column in zip(*stretches))
        order = np.lexsort((documents, hashes_2, hashes))
        hashes, hashes_2 = hashes[order], hashes_2[order]
        same = (hashes[1:] == hashes[:-1]) & (hashes_2[1:] == hashes_2[:-1])
        again[documents[order[1:][same]]] = True
    write_whole(recipe.folder / "parts" / AGAIN, again.data)


def write_record(folder: Path, facts: dict) -> None:
    """Write a dataset's record atomically."""
    write_whole(folder / "dataset.json", json.dumps(facts, indent=1))


def make_shards(recipe: Recipe, corpus: Corpus, files: list[SourceFile], facts: dict, workers: int) -> None:
    """Make the missing parts of a dataset with `workers` processes. `facts` is the record: shards are added to it in
    order. Raise the first failure, in the source's order, when everything before it is complete."""
    shards = facts["shards"]
    while shards and "until" not in shards[-1]:
        shards.pop()  # from a task that lost a shard
    start = tuple(shards[-1]["until"]) if shards else (0, 0)
    tasks = make_tasks(recipe, corpus, files, (0, 0) if recipe.deduplicate else start)
    parts = recipe.folder / "parts"
    parts.mkdir(exist_ok=True)
    for left in parts.iterdir():  # by processes that were killed
        if re.fullmatch(r".*\.[0-9a-f]{32}", left.name):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    if recipe.deduplicate:  # a shard depends on the documents of all tasks
        _work(tasks, workers, lambda task: None)
        made = [Part(task.out) for task in tasks]
        _find_duplicates(recipe, made)
        befores = accumulate((part.documents for part in made), initial=0)
        layouts = [Layout(recipe, None, task.out.name, n, (i, 0)) for i, (task, n) in enumerate(zip(tasks, befores), 1)]
        layouts = layouts[start[0] :]
    else:
        layouts = [Layout(recipe, task, task.out.name, 0, task.end) for task in tasks]
    _work(layouts, workers, lambda layout: _take(layout, facts))


def _take(layout: Layout, facts: dict) -> None:
    """Take the shards of a layout into the dataset, or complete an earlier attempt."""
    folder, shards = layout.recipe.folder, facts["shards"]
    for entry in json.loads((layout.out / "entries.json").read_bytes()):
        sides = entry.keys() & {"train", "val"}
        if shards and not sides:  # it has no document
            shards[-1] |= entry | {"skipped": Counter(shards[-1]["skipped"]) + Counter(entry["skipped"])}
            continue
        for side in sides:
            made = layout.out / entry[side]["file"]
            entry[side]["file"] = f"{side}_{len(shards):06d}.bin"
            for suffix in (".starts.npy", ".blocks", ".bin"):
                if made.with_suffix(suffix).exists():
                    made.with_suffix(suffix).rename((folder / entry[side]["file"]).with_suffix(suffix))
        shards.append(entry)
    write_record(folder, facts)
    shutil.rmtree(layout.out)


def _work(jobs: Sequence[Layout] | Sequence[Task], workers: int, take: Callable) -> None:
    """Run the jobs in up to `workers` processes, or in this one, and take their outputs in order. Raise the first
    failure, once the outputs before it are taken."""
    bar = progress(total=sum(job.size for job in jobs), unit="B", unit_scale=True, desc="encoding")
    missing = sum(not job.out.exists() for job in jobs)
    with bar:
        if min(workers, missing) < 2:
            for job in jobs:
                job.run()
                take(job)
                bar.update(job.size)
            return
        context = multiprocessing.get_context("spawn")  # JAX and its threads may be in this process
        pool = ProcessPoolExecutor(min(workers, missing), context, _start_worker)
        try:
            for job, result in [(job, pool.submit(job.run)) for job in jobs]:
                result.result()
                take(job)
                bar.update(job.size)
        except BrokenProcessPool as error:
            raise UserError(
                "a worker was killed, as for want of memory, or crashed; the same command continues: with fewer "
                "--workers it needs less memory"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Ignore Ctrl-C in a worker, and end it with the command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent

    def follow() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()

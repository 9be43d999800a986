"""Making a dataset's shards from parts. Jobs lay them out, each independently and in any order. The dataset takes them
in the source's order."""

import json
import re
import shutil
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from configs.files import write_whole
from configs.messages import progress
from data.prepare.corpus import Corpus
from data.prepare.engines import Engine, Job
from data.prepare.parts import Part, Recipe, Task, complete_folder, make_tasks, write_array
from data.prepare.source_files import SourceFile
from data.shards import write_blocks, write_shard

COMPARED = 2**22  # documents with hashes in memory at a time
AGAIN = "again"  # in the folder `parts`: for each document, whether an earlier one has its text
Slice = tuple[Part, int, int, int]  # a part, its first and last document, and the number of documents in earlier parts


@dataclass(frozen=True)
class Layout:
    """Lay out the shards of one task; with a seed, one shard of a slice of every part."""

    recipe: Recipe
    task: Task | None
    """The task to encode first, whose part is not kept."""
    parts: Sequence[str]
    """The parts' names in the folder `parts`."""
    before: int
    """Documents in the parts before these."""
    number: int
    """Number of the slice."""
    slices: int
    end: tuple[int, ...]
    """Start of the remaining work: the number of a file and a byte in it, or of a layout."""

    @property
    def out(self) -> Path:
        """Return the folder for the shards, and for `entries.json`: their entries for dataset.json."""
        return self.recipe.folder / "parts" / f"{self.parts[0]}.{self.number}-{self.slices}"

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
            _lay_out(self, folder)
        if self.task:
            shutil.rmtree(self.task.out, ignore_errors=True)

    def at(self) -> bytes | None:
        """Return the position in the task. An encoded task is at its end until the shards are there."""
        if self.task is None or self.task.out.exists():
            return b""
        return self.task.at()

    def place(self) -> str:
        return self.task.place() if self.task else f"slice {self.number} of the shards"


def _lay_out(layout: Layout, folder: Path) -> None:
    recipe, skipped, before = layout.recipe, Counter(), layout.before
    slices: list[Slice] = []
    for name in layout.parts:
        part = Part(recipe.folder / "parts" / name)
        first, last = (part.documents * i // layout.slices for i in (layout.number, layout.number + 1))
        slices.append((part, first, last, before))
        before += part.documents
        skipped.update(part.problems if layout.number == 0 else {})
    shards = [slices]
    if recipe.seed is None:
        ((part, first, last, before),) = slices
        starts = part.mapped("starts")
        tokens = int(starts[last])
        count = max(round(tokens / recipe.shard_tokens), 1)
        bounds = [first, *np.searchsorted(starts, [tokens * i // count for i in range(1, count)]).tolist(), last]
        shards = [[(part, start, stop, before)] for start, stop in pairwise(bounds)]
    entries = [_write_shard(layout, folder, number, each, skipped) for number, each in enumerate(shards)]
    entries[-1] |= {"skipped": skipped, "until": layout.end}
    write_whole(folder / "entries.json", json.dumps(entries))


def _write_shard(layout: Layout, folder: Path, number: int, slices: list[Slice], skipped: Counter) -> dict:
    """Write the files of a shard. Count its duplicates in `skipped`, and return its entry for dataset.json."""
    recipe, columns, tokens = layout.recipe, [], []
    for part, start, stop, before in slices:
        starts, again = part.read("starts", start, stop + 1), np.zeros(stop - start, bool)
        if recipe.deduplicate:
            again = np.fromfile(recipe.folder / "parts" / AGAIN, bool, stop - start, offset=before + start)
        columns.append((np.diff(starts), part.read("sizes", start, stop), part.read("held_out", start, stop), again))
        tokens.append(part.tokens(int(starts[0]), int(starts[-1]), recipe.dtype))
    lengths, sizes, held_out, again = (np.concatenate(column) for column in zip(*columns))
    joined, begins = np.concatenate(tokens), np.cumsum(lengths) - lengths
    del tokens
    if again.any():
        skipped["a duplicate"] += int(again.sum())
    order, entry = recipe.order(1, layout.number, len(lengths)), {"skipped": {}}
    for side, wanted in (("train", ~held_out & ~again), ("val", held_out & ~again)):
        chosen = order[wanted[order]]
        if not len(chosen):
            continue
        places = np.cumsum(lengths[chosen]) - lengths[chosen]
        laid_out = np.empty(int(lengths[chosen].sum()), joined.dtype)
        for begin, length, place in zip(begins[chosen].tolist(), lengths[chosen].tolist(), places.tolist()):
            laid_out[place : place + length] = joined[begin : begin + length]
        path = folder / f"{side}_{number:06d}.bin"
        write_array(path.with_suffix(".starts.npy"), places)
        write_shard(path, laid_out, recipe.vocab_size)
        entry[side] = {
            "file": path.name,
            "documents": len(chosen),
            "tokens": len(laid_out),
            "bytes": int(sizes[chosen].sum()),
            "sha256": write_blocks(path),
        }
    return entry


def layouts_of(recipe: Recipe, tasks: Sequence[Task]) -> list[Layout]:
    """Return the layouts for the parts of all tasks."""
    names, parts = [task.out.name for task in tasks], [Part(task.out) for task in tasks]
    if recipe.deduplicate:
        _find_duplicates(recipe, parts)
    if recipe.seed is not None:
        count = -(-sum(int(part.mapped("starts")[-1]) for part in parts) // recipe.shard_tokens)
        return [Layout(recipe, None, names, 0, i, count, (i + 1, 0)) for i in range(count)]
    befores = accumulate((part.documents for part in parts), initial=0)
    return [
        Layout(recipe, None, [name], before, 0, 1, (i, 0)) for i, (name, before) in enumerate(zip(names, befores), 1)
    ]


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


def make_shards(recipe: Recipe, corpus: Corpus, files: list[SourceFile], facts: dict, engine: Engine) -> None:
    """Make the missing parts of a dataset. `facts` is the record: shards are added to it in order. Raise the first
    failure, in the source's order, when everything before it is complete."""
    shards = facts["shards"]
    while shards and "until" not in shards[-1]:
        shards.pop()  # from a task that lost a shard
    start = tuple(shards[-1]["until"]) if shards else (0, 0)
    at_once = recipe.seed is None and not recipe.deduplicate  # a shard depends on no document of another task
    tasks = make_tasks(recipe, corpus, files, start if at_once else (0, 0))
    parts = recipe.folder / "parts"
    parts.mkdir(exist_ok=True)
    for left in parts.iterdir():  # by processes that were killed
        if re.fullmatch(r".*\.([0-9a-f]{32}|at)", left.name):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    if at_once:
        layouts = [Layout(recipe, task, [task.out.name], 0, 0, 1, task.end) for task in tasks]
    else:
        _work(engine, tasks, lambda task: None)
        layouts = layouts_of(recipe, tasks)[start[0] :]
    _work(engine, layouts, lambda layout: _take(layout, facts))


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


def _work(engine: Engine, jobs: Sequence[Layout] | Sequence[Task], take: Callable) -> None:
    """Run the jobs whose output is missing, and take their outputs in order. Raise the first failure."""
    numbers, failed, done = {id(job): i for i, job in enumerate(jobs)}, {}, 0
    complete = {i for i, job in enumerate(jobs) if job.out.exists()}
    waiting: deque[Job] = deque(job for i, job in enumerate(jobs) if i not in complete)
    bar = progress(total=sum(job.size for job in jobs), unit="B", unit_scale=True, desc="encoding")
    with bar, closing(engine.run(waiting)) as ended:
        while True:
            while done in complete:
                take(jobs[done])
                bar.update(jobs[done].size)
                done += 1
            job, failure = next(ended, (None, None))
            if job is None:
                break
            if isinstance(failure, OSError):
                raise failure
            if failure:
                failed[numbers[id(job)]] = failure
                first = min(failed)
                earlier = [job for job in waiting if numbers[id(job)] < first]
                waiting.clear()
                waiting.extend(earlier)
            else:
                complete.add(numbers[id(job)])
    if failed:
        raise failed[min(failed)]

"""Shards laid out of parts, each by itself: a job reads of each part the documents of its own shards."""

import io
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from uuid import uuid4

import numpy as np

from configs.files import write_whole
from data.blocks import write_blocks
from data.prepare.parts import Part, Recipe, Task
from data.shards import write_shard

COMPARED = 2**22  # documents whose hashes are in memory at a time
AGAIN = "again"  # in the folder `parts`: for each document, whether its text is one before's


@dataclass(frozen=True)
class Layout:
    """Lay out the shards of one task; with a seed, one shard of a slice of every part."""

    recipe: Recipe
    task: Task | None
    """What is to be encoded first, and not kept."""
    parts: Sequence[str]
    """The parts' names in the folder `parts`."""
    before: int
    """Documents in the parts before these."""
    number: int
    """Of the slice."""
    slices: int
    end: tuple[int, ...]
    """What is left to do begins there: the number of a file and a byte in it, or of a layout."""

    @property
    def out(self) -> Path:
        """A folder with the shards, and `entries.json`: what dataset.json is to say of them."""
        return self.recipe.folder / "parts" / f"{self.parts[0]}.{self.number}-{self.slices}"

    @property
    def size(self) -> int:
        """Bytes of the source that are encoded."""
        return self.task.size if self.task else 0

    def run(self) -> None:
        """Make the folder. UserError as `Corpus.read` raises it; OSError if it cannot be written."""
        if self.out.exists():
            return
        if self.task:
            self.task.run()
        made = self.out.with_name(f"{self.out.name}.{uuid4().hex}")
        made.mkdir()
        _lay_out(self, made)
        with suppress(FileExistsError):
            made.rename(self.out)
        if self.task:
            self.task.out.unlink(missing_ok=True)

    def at(self) -> bytes | None:
        """Return where it is in its task; a task that is encoded is at its end until the shards are there."""
        if self.task is None or self.task.out.exists():
            return b""
        return self.task.at()

    def place(self) -> str:
        return self.task.place() if self.task else f"slice {self.number} of the shards"


def _lay_out(layout: Layout, folder: Path) -> None:
    recipe, entries, skipped, before = layout.recipe, [], {}, layout.before
    slices: list[tuple[Part, int, int, int]] = []  # with how many documents are in the parts before
    for name in layout.parts:
        part = Part(recipe, recipe.folder / "parts" / name)
        bounds = [part.documents * i // layout.slices for i in (layout.number, layout.number + 1)]
        slices.append((part, *bounds, before))
        before += part.documents
        for problem, count in part.problems.items() if layout.number == 0 else ():
            skipped[problem] = skipped.get(problem, 0) + count
    shards = [slices]
    if recipe.seed is None:
        ((part, first, last, before),) = slices
        starts = part.mapped("starts")
        tokens = int(part.read("starts", last, last + 1)[0])
        count = max(round(tokens / recipe.shard_tokens), 1)
        bounds = [first, *np.searchsorted(starts, [tokens * i // count for i in range(1, count)]).tolist(), last]
        shards = [[(part, start, stop, before)] for start, stop in pairwise(bounds)]
    for number, each in enumerate(shards):
        entry, again = _write_shard(layout, folder, number, each)
        entries.append(entry)
        if again:
            skipped["a duplicate"] = skipped.get("a duplicate", 0) + again
    entries[-1] |= {"skipped": skipped, "until": layout.end}
    write_whole(folder / "entries.json", json.dumps([{"skipped": {}} | entry for entry in entries]))


def _write_shard(
    layout: Layout, folder: Path, number: int, slices: list[tuple[Part, int, int, int]]
) -> tuple[dict, int]:
    """Write the files of a shard. Return what dataset.json is to say of it, and how many documents are duplicates."""
    recipe, columns, tokens = layout.recipe, [], []
    for part, start, stop, before in slices:
        starts = part.read("starts", start, stop + 1)
        again = np.zeros(stop - start, bool)
        if recipe.deduplicate:
            again = np.fromfile(recipe.folder / "parts" / AGAIN, bool, stop - start, offset=before + start)
        columns.append((np.diff(starts), part.read("sizes", start, stop), part.read("held", start, stop), again))
        tokens.append(part.read("tokens", int(starts[0]), int(starts[-1])))
    lengths, sizes, held, again = (np.concatenate(column) for column in zip(*columns))
    joined, begins = np.concatenate(tokens), np.cumsum(lengths) - lengths
    del tokens
    order, made = recipe.order(1, layout.number, len(lengths)), {}
    for side, wanted in (("train", ~held & ~again), ("val", held & ~again)):
        chosen = order[wanted[order]]
        if not len(chosen):
            continue
        places = np.cumsum(lengths[chosen]) - lengths[chosen]
        laid_out = np.empty(int(lengths[chosen].sum()), joined.dtype)
        for begin, length, place in zip(begins[chosen].tolist(), lengths[chosen].tolist(), places.tolist()):
            laid_out[place : place + length] = joined[begin : begin + length]
        path, index = folder / f"{side}_{number:06d}.bin", io.BytesIO()
        np.save(index, places)
        write_whole(path.with_suffix(".starts.npy"), index.getvalue())
        write_shard(path, laid_out, recipe.vocab_size)
        made[side] = {
            "file": path.name,
            "documents": len(chosen),
            "tokens": len(laid_out),
            "bytes": int(sizes[chosen].sum()),
            "sha256": write_blocks(path),
        }
    return made, int(again.sum())


def layouts_of(recipe: Recipe, tasks: Sequence[Task]) -> list[Layout]:
    """Return what is to be laid out when the parts of all tasks are there."""
    names, parts = [task.out.name for task in tasks], [Part(recipe, task.out) for task in tasks]
    if recipe.deduplicate:
        _find_duplicates(recipe, parts)
    if recipe.seed is not None:
        tokens = sum(int(part.read("starts", part.documents, part.documents + 1)[0]) for part in parts)
        count = -(-tokens // recipe.shard_tokens)
        return [Layout(recipe, None, names, 0, i, count, (i + 1, 0)) for i in range(count)]
    befores = accumulate((part.documents for part in parts), initial=0)
    return [
        Layout(recipe, None, [name], before, 0, 1, (i, 0)) for i, (name, before) in enumerate(zip(names, befores), 1)
    ]


def _find_duplicates(recipe: Recipe, parts: Sequence[Part]) -> None:
    """Write `AGAIN`. A share of all hashes is compared at a time, of which each part gives a stretch."""
    firsts = np.cumsum([0, *(part.documents for part in parts)])
    again, rounds = np.zeros(firsts[-1], bool), int(firsts[-1]) // COMPARED + 1
    bounds = [(2**64 * i // rounds) for i in range(rounds)]
    for low, high in zip(bounds, [*bounds[1:], None]):
        found = []
        for part, first in zip(parts, firsts):
            hashes = part.mapped("hashes")
            start = int(np.searchsorted(hashes, np.uint64(low)))
            stop = part.documents if high is None else int(np.searchsorted(hashes, np.uint64(high)))
            of_hashes = part.read("of_hashes", start, stop)
            found.append((part.read("hashes", start, stop), part.read("hashes_2", start, stop), first + of_hashes))
        hashes, hashes_2, documents = (np.concatenate(column) for column in zip(*found))
        order = np.lexsort((documents, hashes_2, hashes))
        hashes, hashes_2 = hashes[order], hashes_2[order]
        same = (hashes[1:] == hashes[:-1]) & (hashes_2[1:] == hashes_2[:-1])
        again[documents[order[1:][same]]] = True
    write_whole(recipe.folder / "parts" / AGAIN, again.data)

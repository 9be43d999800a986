"""Laying out shards from parts, each independently: a job reads its own shards' documents from each part."""

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
from data.prepare.parts import Part, Recipe, Task
from data.shards import write_blocks, write_shard

COMPARED = 2**22  # documents with hashes in memory at a time
AGAIN = "again"  # in the folder `parts`: for each document, whether an earlier one has its text


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
        made = self.out.with_name(f"{self.out.name}.{uuid4().hex}")
        made.mkdir()
        _lay_out(self, made)
        with suppress(FileExistsError):
            made.rename(self.out)
        if self.task:
            self.task.out.unlink(missing_ok=True)

    def at(self) -> bytes | None:
        """Return the position in the task. An encoded task is at its end until the shards are there."""
        if self.task is None or self.task.out.exists():
            return b""
        return self.task.at()

    def place(self) -> str:
        return self.task.place() if self.task else f"slice {self.number} of the shards"


def _lay_out(layout: Layout, folder: Path) -> None:
    recipe, entries, skipped, before = layout.recipe, [], {}, layout.before
    slices: list[tuple[Part, int, int, int]] = []  # the number of documents in earlier parts
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
    """Write the files of a shard. Return its entry for dataset.json, and the number of duplicates."""
    recipe, columns, tokens = layout.recipe, [], []
    for part, start, stop, before in slices:
        starts = part.read("starts", start, stop + 1)
        again = np.zeros(stop - start, bool)
        if recipe.deduplicate:
            again = np.fromfile(recipe.folder / "parts" / AGAIN, bool, stop - start, offset=before + start)
        columns.append((np.diff(starts), part.read("sizes", start, stop), part.read("held_out", start, stop), again))
        tokens.append(part.read("tokens", int(starts[0]), int(starts[-1])))
    lengths, sizes, held_out, again = (np.concatenate(column) for column in zip(*columns))
    joined, begins = np.concatenate(tokens), np.cumsum(lengths) - lengths
    del tokens
    order, made = recipe.order(1, layout.number, len(lengths)), {}
    for side, wanted in (("train", ~held_out & ~again), ("val", held_out & ~again)):
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
    """Return the layouts for the parts of all tasks."""
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
            of_hashes = part.read("of_hashes", start, stop)
            stretches.append((part.read("hashes", start, stop), part.read("hashes_2", start, stop), first + of_hashes))
        hashes, hashes_2, documents = (np.concatenate(column) for column in zip(*stretches))
        order = np.lexsort((documents, hashes_2, hashes))
        hashes, hashes_2 = hashes[order], hashes_2[order]
        same = (hashes[1:] == hashes[:-1]) & (hashes_2[1:] == hashes_2[:-1])
        again[documents[order[1:][same]]] = True
    write_whole(recipe.folder / "parts" / AGAIN, again.data)

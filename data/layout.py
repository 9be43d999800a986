"""Shards laid out of parts: where each ends follows from the documents' lengths, and each is then made by itself."""

import io
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np
from jaxtyping import Int

from configs.files import write_whole
from data.blocks import write_blocks
from data.corpus import Corpus
from data.parts import Part
from data.shards import token_type, write_shard


class Position(NamedTuple):
    """How far a preparation has come: before document `document` of file `file`."""

    file: int
    document: int


@dataclass(frozen=True)
class Placed:
    """A part, and where it stands in the source."""

    path: Path
    files: list[int]
    """Of each span."""
    documents: list[int]
    """Documents of the file before each span."""


@dataclass(frozen=True)
class Shard:
    """A shard to be laid out."""

    number: int
    end: Position
    """The position after it."""
    skipped: dict[str, int]
    """Documents left out before it was full, by problem."""
    which: Int[np.ndarray, "documents"]
    """The part that each document is of, in the shard's order."""
    index: Int[np.ndarray, "documents"]
    """The number of each document within its part."""
    parts: dict[int, Placed]


@dataclass(frozen=True)
class Frame:
    """What holds for all shards of a dataset."""

    corpus: Corpus
    folder: Path
    vocab_size: int
    threshold: float
    """Documents whose hash falls below are held out."""

    def part(self, path: Path) -> Part:
        return Part(path, token_type(self.vocab_size))


@dataclass(frozen=True)
class Layout:
    """The task of laying out a shard."""

    frame: Frame
    shard: Shard

    def run(self) -> tuple[Path, dict]:
        """As `lay_out`."""
        return lay_out(self.frame, self.shard)

    def at(self) -> bytes:
        """It has one step."""
        return b""

    def place(self) -> str:
        return f"shard {self.shard.number}"


def lay_out(frame: Frame, shard: Shard) -> tuple[Path, dict]:
    """Writes a shard's files into a folder of its own, and says what dataset.json is to say of them."""
    folder = frame.folder / "parts" / f"shard.{uuid4().hex}"
    folder.mkdir()
    sides = {"train": _Side(), "val": _Side()}
    corpus, parts = frame.corpus, {number: frame.part(placed.path) for number, placed in shard.parts.items()}
    for number, i in zip(shard.which.tolist(), shard.index.tolist()):
        part, placed = parts[number], shard.parts[number]
        file = corpus.files[placed.files[int(np.searchsorted(part.firsts, i, "right")) - 1]]
        side = sides["val" if file.held_out or part.shares[i] < frame.threshold else "train"]
        side.add(number, int(part.starts[i]), int(part.lengths[i]), int(part.sizes[i]))
    made: dict = {"skipped": shard.skipped, "end": shard.end}
    for name, side in sides.items():
        if side.starts:
            tokens = np.concatenate([parts[number].tokens[start:stop] for number, start, stop in side.runs])
            made[name] = _write(folder / f"{name}_{shard.number:06d}.bin", tokens, side, frame.vocab_size)
    return folder, {key: made[key] for key in ("train", "val", "skipped", "end") if key in made}


class _Side:
    """The documents of a shard that are trained on, or those that are held out."""

    def __init__(self):
        self.starts: list[int] = []
        self.runs: list[list[int]] = []  # part, start and stop of documents side by side
        self.tokens, self.text_bytes = 0, 0

    def add(self, part: int, start: int, length: int, size: int) -> None:
        self.starts.append(self.tokens)
        self.tokens, self.text_bytes = self.tokens + length, self.text_bytes + size
        if self.runs and self.runs[-1][0] == part and self.runs[-1][2] == start:
            self.runs[-1][2] += length
        else:
            self.runs.append([part, start, start + length])


def _write(path: Path, tokens: np.ndarray, side: _Side, vocab_size: int) -> dict:
    """Writes the shard and its index, and returns what dataset.json says of them."""
    starts = io.BytesIO()
    np.save(starts, np.array(side.starts))
    write_whole(path.with_suffix(".starts.npy"), starts.getvalue())
    write_shard(path, tokens, vocab_size)
    return {
        "file": path.name,
        "documents": len(side.starts),
        "tokens": side.tokens,
        "bytes": side.text_bytes,
        "sha256": write_blocks(path),
    }


class Cutter:
    """Cuts the documents of one part after the other into shards of `limit` tokens: a shard ends with the document that
    brings it to so many."""

    def __init__(self, limit: int, first: int):
        self.limit, self.number = limit, first
        self.parts: dict[int, Placed] = {}
        self.held: list[tuple[np.ndarray, np.ndarray]] = []  # which and index, of the shard that is not full
        self.tokens, self.skipped, self.end = 0, Counter(), Position(0, 0)

    def add(
        self,
        which: Int[np.ndarray, "documents"],
        index: Int[np.ndarray, "documents"],
        lengths: Int[np.ndarray, "documents"],
        problems: dict[int, str],
        end_after: Callable[[int], Position],
    ) -> Iterator[Shard]:
        """Documents in order, and the shards that they fill. A document with a problem has length 0; `problems` are by
        place in `which`, `end_after(place)` is the position after a document."""
        totals, start, before = np.cumsum(lengths), 0, 0
        places = sorted(problems)
        while start < len(which):
            stop = min(int(np.searchsorted(totals, before + self.limit - self.tokens)) + 1, len(which))
            full = bool(totals[stop - 1] - before + self.tokens >= self.limit)
            real = np.flatnonzero(lengths[start:stop]) + start
            self.held.append((which[real], index[real]))
            while places and places[0] < stop:
                self.skipped[problems[places.pop(0)]] += 1
            self.tokens += int(totals[stop - 1]) - before
            self.end, before, start = end_after(stop - 1), int(totals[stop - 1]), stop
            if full:
                yield self.close()

    def close(self) -> Shard:
        """The shard as it is."""
        which, index = (np.concatenate(arrays) for arrays in zip(*self.held))
        parts = {number: self.parts[number] for number in np.unique(which).tolist()}
        shard = Shard(self.number, self.end, dict(self.skipped), which, index, parts)
        self.number, self.held, self.tokens, self.skipped = self.number + 1, [], 0, Counter()
        return shard

    @property
    def is_empty(self) -> bool:
        return not (self.tokens or self.skipped)

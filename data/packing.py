"""Packing a stream of tokens into rows: inputs and targets of equal length."""

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict
from uuid import uuid4

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from data.shards import TokenStream
from data.tokenizer import CHAT_TOKENS
from system.errors import UserError


class Row(TypedDict):
    """One row: position i predicts `targets[i]` after `inputs[:i + 1]`, with weight `weights[i]`."""

    inputs: Int[np.ndarray, "T"]
    targets: Int[np.ndarray, "T"]
    weights: Float[np.ndarray, "T"]


@dataclass
class StreamRows:
    """The stream cut every T tokens: row i has inputs `[iT, iT + T)` and targets one later. Every token but the
    stream's first, and fewer than T at its end, is a target of exactly one row."""

    tokens: TokenStream
    length: int
    chat_tokens: None = None  # it cuts documents, and conversations must not be cut

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.length

    def __getitem__(self, index: int) -> Row:
        window = self.tokens.read(index * self.length, (index + 1) * self.length + 1).astype(np.int32)
        return Row(inputs=window[:-1], targets=window[1:], weights=np.ones(self.length, np.float32))


class Plan(NamedTuple):
    """The plan of rows: the pieces of the stream in each row."""

    rows: Int[np.ndarray, "rows_and_1"]
    """Row i has the pieces `rows[i]` to `rows[i + 1]`."""
    starts: Int[np.ndarray, "pieces"]
    """Start of each piece in the stream."""
    lengths: Int[np.ndarray, "pieces"]
    """Tokens of the stream that each piece has as inputs."""


@dataclass
class PlannedRows:
    """Complete documents that share rows, by a plan.

    A row and each of its documents start with a BOS. With `best_fit`, documents longer than a row are cut into pieces
    that fill rows. A piece from inside a document gets a BOS before it, whose target does not count, since it counted
    in the piece before. So every token counts exactly once as a target: a BOS as the end of the document before it, any
    other after its predecessors. Positions after a row's last document have weight 0.

    With `chat_tokens` (the ids of `CHAT_TOKENS`) documents are conversations: only what an assistant writes counts.
    """

    tokens: TokenStream
    plan: Plan
    bos: int
    length: int
    chat_tokens: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.plan.rows) - 1

    def __getitem__(self, index: int) -> Row:
        first, last = self.plan.rows[index : index + 2].tolist()
        starts, lengths = self.plan.starts[first:last].tolist(), self.plan.lengths[first:last].tolist()
        inputs, targets = np.full((2, self.length), self.bos, np.int32)
        weights = np.zeros(self.length, np.float32)
        at = 0
        for start, length in zip(starts, lengths):
            piece = self.tokens.read(start, start + length + 1)  # one more, for the last target
            if piece[0] != self.bos:
                targets[at] = piece[0]
                at += 1
            inputs[at : at + length] = piece[:length]
            targets[at : at + len(piece) - 1] = piece[1:]  # the stream's last target stays the initial BOS
            weights[at : at + length] = 1
            at += length
        if self.chat_tokens:
            weights = learned(np.append(inputs, targets[-1]), self.chat_tokens)[1:].astype(np.float32)
        return Row(inputs=inputs, targets=targets, weights=weights)


def learned(tokens: Integer[np.ndarray, "tokens"], special: dict[str, int]) -> Bool[np.ndarray, "tokens"]:
    """Return which tokens an assistant writes. The tokens begin outside its turns. `special`: the tokenizer's ids
    of `CHAT_TOKENS`."""
    _, _, start, end, _, _, output_start, output_end = (tokens == special[name] for name in CHAT_TOKENS)
    in_answer = np.cumsum(start) - start > np.cumsum(end) - end
    in_output = np.cumsum(output_start) > np.cumsum(output_end) - output_end
    return in_answer & ~in_output


Rows = StreamRows | PlannedRows
"""Random access to a dataset's rows."""


def most_tokens(length: int) -> int:
    """Return the most tokens of a document that a row of `length` inputs holds: the last is only a target."""
    return length + 1


def plan_rows(
    packing: str,
    starts: Integer[np.ndarray, "documents"],
    tokens: int,
    length: int,
    drop: bool = False,
) -> Plan:
    """Return the plan for documents that start at `starts` in a stream of `tokens`, each with a BOS. `packing`:
    `best_fit`, or `whole`, which with `drop` leaves out a document of more than `most_tokens(length)`."""
    sizes = np.diff(starts, append=tokens)
    # A document's first piece takes up to `length` of its tokens; the others one less, after their own BOS.
    if packing == "whole":
        pieces = np.where(drop & (sizes > most_tokens(length)), 0, 1)
    else:
        pieces = 1 + -(-np.maximum(sizes - length, 0) // (length - 1))
    document = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts_at = np.where(number == 0, 0, length + (number - 1) * (length - 1))
    lengths = np.minimum(np.where(number == 0, length, length - 1), sizes[document] - starts_at)
    rows = _best_fit(lengths + (number > 0), length)
    order = np.lexsort((starts_at + starts[document], rows))
    bounds = np.searchsorted(rows[order], np.arange(rows.max(initial=-1) + 2))
    return Plan(bounds, (starts[document] + starts_at)[order], lengths[order].astype(np.int32))


def join_plans(plans: Iterable[tuple[int, Plan]]) -> Iterator[Plan]:
    """Yield one plan in pieces, from pairs of a position in a stream and the plan of what begins there."""
    pieces, first = 0, True
    for begin, plan in plans:
        rows = plan.rows if first else plan.rows[1:]
        yield Plan(rows + pieces, plan.starts + begin, plan.lengths)
        pieces, first = pieces + len(plan.starts), False


def _best_fit(widths: Integer[np.ndarray, "pieces"], length: int) -> Int[np.ndarray, "pieces"]:
    """Return the row of each piece. Pieces are taken by falling length, and each goes into the fullest row with room
    for it (Johnson, 1973). The rows with room are the bits of one integer, so a piece costs a few operations on
    `length` bits."""
    order = np.argsort(-widths, kind="stable")
    rows = np.empty(len(widths), np.int64)
    full = int(np.count_nonzero(widths == length))
    rows[order[:full]] = np.arange(full)
    count, room = full, 0  # bit r of `room`: a row has r positions left
    left: list[list[int]] = [[] for _ in range(length)]
    chosen = []
    for width in widths[order[full:]].tolist():
        enough = room >> width
        if enough:
            space = width + (enough & -enough).bit_length() - 1
            row = left[space].pop()
            if not left[space]:
                room ^= 1 << space
        else:
            space, row, count = length, count, count + 1
        chosen.append(row)
        if space > width:
            left[space - width].append(row)
            room |= 1 << (space - width)
    rows[order[full:]] = chosen
    return rows


PLAN_TYPES = {"rows": "<i8", "starts": "<i8", "lengths": "<i4"}


def save_plan(stretches: Iterable[Plan], folder: Path) -> None:
    """Write a plan from its stretches atomically, one file per array. Raise OSError if it cannot be written, and leave
    nothing then."""
    partial = folder.with_name(f"{folder.name}.{uuid4().hex}")  # several processes may make one plan
    try:
        partial.mkdir(parents=True)
        for stretch in stretches:
            for name, dtype in PLAN_TYPES.items():
                with (partial / name).open("ab") as file:
                    file.write(getattr(stretch, name).astype(dtype).data)
                    file.flush()
                    os.fsync(file.fileno())
        partial.rename(folder)
    except OSError:
        if not folder.exists():  # otherwise another process was first, with the same plan
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_plan(folder: Path) -> Plan:
    """Map a plan into memory. Raise UserError if it is damaged, and PermissionError if only another user may read
    it."""
    try:
        is_empty = not (folder / "starts").stat().st_size  # an empty file cannot be mapped
        load = np.fromfile if is_empty else partial(np.memmap, mode="r")
        plan = Plan(*(load(folder / name, dtype) for name, dtype in PLAN_TYPES.items()))
        if not plan.rows[-1] == len(plan.starts) == len(plan.lengths):
            raise ValueError("its arrays do not fit each other")
        return plan
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is damaged ({error}); delete it, and it is made again") from error

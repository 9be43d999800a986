"""Tokens on disk, in the .bin format of llm.c and modded-nanogpt.

A header of 256 little-endian int32 (magic, version, count of tokens), then the tokens: uint16 under magic 20240520,
version 1; uint32, for vocabularies of more than 65,536, under llm.c's magic for Llama 3, 20240801, version 7.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer

from configs.files import write_whole
from configs.schema import UserError

TOKEN_TYPES = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
HEADER_BYTES = 1024


def token_type(vocab_size: int) -> np.dtype:
    """Return the type of tokens for this vocabulary size."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def write_shard(path: Path, tokens: Integer[np.ndarray, "tokens"], vocab_size: int) -> None:
    """Write one shard atomically."""
    kind = next(kind for kind, dtype in TOKEN_TYPES.items() if dtype == token_type(vocab_size))
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = *kind, len(tokens)
    write_whole(path, header.tobytes(), tokens.astype(token_type(vocab_size)).data)


class ShardType(NamedTuple):
    """A shard's header."""

    dtype: np.dtype
    tokens: int

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.tokens * self.dtype.itemsize


def shard_type(name: str, start: bytes) -> ShardType:
    """Return the header of the shard `name` from its first 12 bytes. Raise UserError if it is not a shard."""
    header = np.frombuffer(start[: len(start) // 4 * 4], "<i4")[:3]
    dtype = TOKEN_TYPES.get(tuple(header[:2].tolist())) if len(header) == 3 else None
    if dtype is None:
        swapped = tuple(header[:2].byteswap().tolist()) in TOKEN_TYPES
        raise UserError(
            f"{name} is not a token shard of a known version: its header starts with {header.tolist()}, not with one "
            f"of {[list(kind) for kind in TOKEN_TYPES]} and the count of tokens"
            + ("; it was written in the other byte order: write it little-endian" if swapped else "")
        )
    return ShardType(dtype, int(header[2]))


def require_whole(name: str, kind: ShardType, size: int) -> None:
    """Raise UserError if a shard's file has another length than its header requires."""
    if size != kind.file_bytes:
        raise UserError(f"{name} is damaged: {size} bytes, but its {kind.tokens} tokens need {kind.file_bytes}")


def require_shard(path: Path) -> ShardType:
    """Return the header of the shard at `path`. Raise UserError if it is not a shard, or incomplete."""
    try:
        with path.open("rb") as file:
            kind = shard_type(str(path), file.read(12))
            require_whole(str(path), kind, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return kind


class TokenStream:
    """Shards read as one long array of tokens."""

    def __init__(self, shards: Sequence[Any], together: Callable = map):
        """Take `shards`: arrays, or `data.store.Shard`. `together(read, spans)` reads many spans, concurrently from a
        store, whose answers are slow."""
        self.shards = shards
        self.together = together
        self.is_stored = together is not map
        self.starts = [*accumulate(map(len, shards), initial=0)]

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, stop: int) -> Integer[np.ndarray, "tokens"]:
        """Return tokens `start` to `stop`, across shards; fewer at the end of the stream."""
        parts, i = [], bisect_right(self.starts, start) - 1
        while i < len(self.shards) and self.starts[i] < stop:
            parts.append(self.shards[i][max(start - self.starts[i], 0) : stop - self.starts[i]])
            i += 1
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, np.int32)])

    def read_many(self, spans: Iterable[tuple[int, int]]) -> list[Integer[np.ndarray, "_"]]:
        """Return the tokens of each (start, stop)."""
        return list(self.together(lambda span: self.read(*span), spans))

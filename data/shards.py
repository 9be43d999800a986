"""Tokens on disk: shards in the .bin format of llm.c, each with an index of its documents and a sidecar of hashes.

A shard has a header of 256 little-endian int32 (magic, version, count of tokens), then the tokens: uint16 under magic
20240520, version 1; uint32, for vocabularies of more than 65,536, under llm.c's magic for Llama 3, 20240801, version 7.

A run's rows are permuted over all shards. Hashing each shard before its first row is read would hash all of them. With
the sidecar NAME.blocks a start reads no shard: the fingerprint comes from the recorded hashes, and each block is
checked when it is read.

    32 bytes   SHA-256 of all that follows
    32 bytes   SHA-256 of the shard's file
    32 bytes   SHA-256 of NAME.starts.npy
    12 bytes   the shard's first 12: type and count of its tokens
    20 bytes   for each 64 KiB of the shard's file: the first 16 bytes of their SHA-256, and the largest token, uint32
"""

import hashlib
import os
import resource
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Integer, Shaped

from system.errors import UserError
from system.files import is_transient, with_retries

T = TypeVar("T")
TOKEN_TYPES = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
HEADER_BYTES = 1024
BLOCK_BYTES = 65_536  # not much more than the rows that are read of it, a few KB each
ENTRY = np.dtype([("sha256", "V16"), ("largest", "<u4")])
OPEN = 256  # shards that are open at a time, at most


class Blocks(NamedTuple):
    """A shard's sidecar."""

    sha256: str
    """SHA-256 of the shard's file."""
    index_sha256: bytes
    """SHA-256 of its index of documents."""
    header: bytes
    """The first 12 bytes of the shard."""
    entries: Shaped[np.ndarray, "blocks"]
    """An array of type `ENTRY`."""


def read_blocks(path: Path) -> Blocks:
    """Return the sidecar of the shard at `path`. Raise UserError if it is missing or damaged, OSError if its disk
    fails."""
    sidecar = path.with_suffix(".blocks")
    try:
        content = sidecar.read_bytes()
        digest, rest = content[:32], content[32:]
        if hashlib.sha256(rest).digest() != digest:
            raise ValueError("its SHA-256 differs")
        return Blocks(rest[:32].hex(), rest[32:64], rest[64:76], np.frombuffer(rest[76:], ENTRY))
    except (OSError, ValueError) as error:
        if is_transient(error):
            raise
        raise UserError(f"{sidecar} cannot be read ({error}); bring it back, or prepare the dataset again") from error


class Shard:
    """A shard's tokens, by slices. A block is hashed when it is first read; UserError if it differs from its record.
    Nothing is mapped into memory: an error of a mapped file's disk ends the process by a signal."""

    def __init__(self, path: Path):
        """Raise UserError if it is incomplete, or has no sound sidecar."""
        self.path = path
        self.blocks, size = from_disk(path, lambda: (read_blocks(path), path.stat().st_size))
        magic, version, self.tokens = np.frombuffer(self.blocks.header, "<i4").tolist()
        if (magic, version) not in TOKEN_TYPES:
            raise UserError(f"{path} is not a token shard: its header starts with {magic}, {version}")
        self.dtype = TOKEN_TYPES[magic, version]
        needed = HEADER_BYTES + self.tokens * self.dtype.itemsize
        if size != needed:
            raise UserError(f"{path} is damaged: {size} bytes, but its {self.tokens} tokens need {needed}")
        self.checked = bytearray(len(self.blocks.entries))  # for one or two items, faster to search than a numpy array

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, span: slice) -> Integer[np.ndarray, "tokens"]:
        start, stop, _ = span.indices(self.tokens)
        begin, end = (HEADER_BYTES + token * self.dtype.itemsize for token in (start, stop))
        first, last = begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        while (block := self.checked.find(0, first, last)) >= 0:
            content = self._read(block * BLOCK_BYTES, BLOCK_BYTES)
            if hashlib.sha256(content).digest()[:16] != self.blocks.entries["sha256"][block].tobytes():
                raise self._changed(block)
            self.checked[block] = True
        tokens = np.frombuffer(self._read(begin, end - begin), self.dtype)
        if len(tokens) < stop - start:  # the file became shorter
            raise self._changed(first)
        return tokens

    def _read(self, at: int, size: int) -> bytearray:
        """Return the bytes from `at` on: `size`, or as many as the file has."""

        def read() -> bytearray:
            content = bytearray()
            file = _open_files()(self)  # if another thread drops it from the cache, it stays open here
            while len(content) < size and (part := os.pread(file.fileno(), size - len(content), at + len(content))):
                content += part
            return content

        return from_disk(self.path, read)

    def _changed(self, block: int) -> UserError:
        """Return the error about a block that differs from its record."""
        return UserError(
            f"{self.path} is damaged, or changed after it was recorded: the SHA-256 of the bytes from "
            f"{block * BLOCK_BYTES:,} on differs from {self.path.stem}.blocks; bring the shard back, or delete it and "
            "prepare it again"
        )


@cache
def _open_files() -> Callable[[Shard], BinaryIO]:
    """Return a function that opens a shard's file. The last ones stay open: `OPEN`, or a quarter of the files that the
    system lets this process open (`ulimit -n`)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN if limit == resource.RLIM_INFINITY else min(OPEN, limit // 4)

    @lru_cache(most)
    def opened(shard: Shard) -> BinaryIO:
        return shard.path.open("rb", buffering=0)

    return opened


def from_disk(path: Path, read: Callable[[], T]) -> T:
    """Return the result of `read`, which reads the file. Raise StorageLost if its disk fails for long, and UserError
    for an error that persists."""
    try:
        return with_retries(str(path), read)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


class TokenStream:
    """Shards read as one long array of tokens."""

    def __init__(self, shards: Sequence[Any]):
        """Take `shards`: arrays, or `Shard`."""
        self.shards = shards
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

"""A shard's sidecar, NAME.blocks next to NAME.bin: a hash and the largest token of each block.

A run's rows are permuted over all shards. Hashing each shard before its first row is read would hash all of them. With
this file a start reads no shard: the fingerprint comes from the recorded hashes, and each block is checked when it is
read.

    32 bytes   SHA-256 of all that follows
    32 bytes   SHA-256 of the shard's file
    32 bytes   SHA-256 of NAME.starts.npy; zeros without one
    12 bytes   the shard's first 12: type and count of its tokens
    20 bytes   for each 64 KiB of the shard's file: the first 16 bytes of their SHA-256, and the largest token, uint32
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer, Shaped

from configs.files import write_whole
from configs.schema import UserError
from data.shards import HEADER_BYTES, ShardType, require_shard, shard_type

BLOCK_BYTES = 65_536  # small relative to a step's rows (a few KB each); large relative to a store's cost per request
ENTRY = np.dtype([("sha256", "V16"), ("largest", "<u4")])
NO_INDEX = bytes(32)
MAPPED = 256  # local shards that are open at a time


class Blocks(NamedTuple):
    """A shard's sidecar."""

    sha256: str
    """SHA-256 of the shard's file."""
    index_sha256: bytes
    """SHA-256 of its index of documents; `NO_INDEX` without one."""
    header: bytes
    """The first 12 bytes of the shard."""
    entries: Shaped[np.ndarray, "blocks"]
    """An array of type `ENTRY`."""

    @property
    def largest(self) -> int:
        """Return the shard's largest token."""
        return int(self.entries["largest"].max(initial=0))

    def type_of(self, name: str) -> ShardType:
        """Return the type and count of the tokens in shard `name`. Raise UserError if this is not its sidecar."""
        kind = shard_type(name, self.header)
        if len(self.entries) != -(-kind.file_bytes // BLOCK_BYTES):
            raise UserError(f"{_sidecar(name)} is not of {name}; delete it, and the start reads the complete shard")
        return kind

    def wrong(self, first: int, content: bytes | memoryview) -> int | None:
        """Return the first block of `content`, the shard's bytes from block `first` on, that differs from its
        record."""
        for number, at in enumerate(range(0, len(content), BLOCK_BYTES), first):
            block = memoryview(content)[at : at + BLOCK_BYTES]
            if hashlib.sha256(block).digest()[:16] != self.entries["sha256"][number].tobytes():
                return number
        return None

    def to_bytes(self) -> bytes:
        content = bytes.fromhex(self.sha256) + self.index_sha256 + self.header + self.entries.tobytes()
        return hashlib.sha256(content).digest() + content

    @staticmethod
    def from_bytes(content: bytes) -> "Blocks":
        """Parse a sidecar. Raise ValueError if it is damaged."""
        digest, rest = content[:32], content[32:]
        if hashlib.sha256(rest).digest() != digest:
            raise ValueError("its SHA-256 differs")
        return Blocks(rest[:32].hex(), rest[32:64], rest[64:76], np.frombuffer(rest[76:], ENTRY))


def write_blocks(shard: Path) -> str:
    """Read a shard after its index of documents is written, and write its sidecar atomically. Return the SHA-256 of the
    shard's file."""
    index = shard.with_suffix(".starts.npy")
    index_sha256 = hashlib.sha256(index.read_bytes()).digest() if index.exists() else NO_INDEX
    blocks = blocks_of(_file_blocks(shard), str(shard), index_sha256)
    write_whole(shard.with_suffix(".blocks"), blocks.to_bytes())
    return blocks.sha256


def blocks_of(content: Iterable[bytes], name: str, index_sha256: bytes = NO_INDEX) -> Blocks:
    """Return the sidecar of a shard, from its blocks in order."""
    whole, header, entries = hashlib.sha256(), b"", []
    dtype = np.dtype("<u2")
    for block in content:
        whole.update(block)
        if not entries:
            header, dtype = block[:12], shard_type(name, block[:12]).dtype
        tokens = np.frombuffer(block, dtype, offset=0 if entries else HEADER_BYTES)
        entries.append((hashlib.sha256(block).digest()[:16], tokens.max(initial=0)))
    return Blocks(whole.hexdigest(), index_sha256, header, np.array(entries, ENTRY))


def _file_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(lambda: file.read(BLOCK_BYTES), b"")


def read_blocks(path: Path) -> Blocks | None:
    """Return the sidecar of the shard at `path`; None if it has none. Raise UserError if it is damaged."""
    sidecar = path.with_suffix(".blocks")
    try:
        return Blocks.from_bytes(sidecar.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{sidecar} cannot be read ({why}); delete it, and the start reads the complete shard"
        ) from error


def remember(memory: Path, make: Callable[[], Blocks]) -> Blocks:
    """Return the sidecar in `memory`, otherwise the result of `make`, which is written there if possible."""
    with suppress(OSError, ValueError):  # missing or incomplete
        return Blocks.from_bytes(memory.read_bytes())
    blocks = make()
    partial = memory.with_name(f"{memory.name}.{os.getpid()}")  # several processes may examine one shard
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(blocks.to_bytes())
        partial.replace(memory)
    return blocks


def examine(path: Path, remembered: Path) -> Blocks:
    """Return the sidecar of a shard on this machine. If it has none, as in other programs' shards, read the shard once
    per machine. The folder `remembered` keeps the result until the file's size or time of change differs."""
    if (blocks := read_blocks(path)) is not None:
        return blocks
    require_shard(path)
    status = path.stat()
    key = hashlib.sha256(repr((str(path.resolve()), status.st_size, status.st_mtime_ns)).encode()).hexdigest()
    try:
        return remember(remembered / key[:32], lambda: blocks_of(_file_blocks(path), str(path)))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


class MappedShard:
    """A shard on this machine, mapped into memory. A block is hashed when it is first read."""

    def __init__(self, path: Path, remembered: Path):
        """Raise UserError if it is not a shard, or incomplete."""
        self.path, self.kind, self.blocks = path, require_shard(path), examine(path, remembered)
        if self.blocks.type_of(str(path)) != self.kind:
            raise UserError(changed(str(path), 0))
        self.checked = bytearray(len(self.blocks.entries))  # for one or two items, faster to search than a numpy array

    def __len__(self) -> int:
        return self.kind.tokens

    def __getitem__(self, span: slice) -> Integer[np.ndarray, "tokens"]:
        start, stop, _ = span.indices(len(self))
        first, last = blocks_with(start, stop, self.kind.dtype.itemsize)
        content, tokens = _mapped(self)
        while (block := self.checked.find(0, first, last)) >= 0:
            at = block * BLOCK_BYTES
            if self.blocks.wrong(block, content[at : at + BLOCK_BYTES].data) is not None:
                raise UserError(changed(str(self.path), block))
            self.checked[block] = True
        return tokens[start:stop]


@lru_cache(MAPPED)
def _mapped(shard: MappedShard) -> tuple[Integer[np.ndarray, "bytes"], Integer[np.ndarray, "tokens"]]:
    """Map a shard's file, and return its bytes and tokens. The last `MAPPED` stay open, since a map keeps a
    descriptor."""
    try:
        content = np.asarray(np.memmap(shard.path, np.uint8, "r"))
    except OSError as error:
        raise UserError(f"{shard.path} cannot be read: {error.strerror}") from error
    return content, content[HEADER_BYTES:].view(shard.kind.dtype)


def blocks_with(start: int, stop: int, itemsize: int) -> tuple[int, int]:
    """Return the range of blocks with tokens `start` to `stop`: the first, and the one after the last."""
    if stop <= start:
        return 0, 0
    first, last = HEADER_BYTES + start * itemsize, HEADER_BYTES + stop * itemsize - 1
    return first // BLOCK_BYTES, last // BLOCK_BYTES + 1


def changed(name: str, block: int) -> str:
    """Return the message about a block that differs from its record."""
    return (
        f"{name} is damaged, or changed after it was recorded: the SHA-256 of the bytes from "
        f"{block * BLOCK_BYTES:,} on differs from {_sidecar(name)}'s, or from an earlier start's; bring the shard "
        "back, or delete it and prepare it again"
    )


def _sidecar(name: str) -> str:
    return name.removesuffix(".bin") + ".blocks"

"""Tokens on disk, in the .bin format of llm.c and modded-nanogpt.

A header of 256 little-endian int32 (magic, version, count of tokens), then the tokens: uint16 under magic 20240520,
version 1; uint32, for vocabularies of more than 65,536, under llm.c's magic for Llama 3, 20240801, version 7.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from configs.files import write_whole
from configs.schema import UserError

TOKEN_TYPES = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
HEADER_BYTES = 1024


def token_type(vocab_size: int) -> np.dtype:
    """What a token of so many is kept as."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def write_shard(path: Path, tokens: Integer[np.ndarray, "tokens"], vocab_size: int) -> None:
    """Writes one shard, whole or not at all."""
    kind = next(kind for kind, dtype in TOKEN_TYPES.items() if dtype == token_type(vocab_size))
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = *kind, len(tokens)
    write_whole(path, header.tobytes(), tokens.astype(token_type(vocab_size)).data)


def read_shard(path: Path) -> Integer[np.ndarray, "tokens"]:
    """Maps one shard's tokens into memory. UserError where it is no shard, or not whole."""
    try:
        size, header = path.stat().st_size, np.fromfile(path, "<i4", count=3)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    dtype = TOKEN_TYPES.get(tuple(header[:2].tolist())) if len(header) == 3 else None
    if dtype is None:
        swapped = tuple(header[:2].byteswap().tolist()) in TOKEN_TYPES
        raise UserError(
            f"{path} is not a token shard of a known version: its header starts with {header.tolist()}, not with one "
            f"of {[list(kind) for kind in TOKEN_TYPES]} and the count of tokens"
            + ("; it was written on a machine of the other byte order: write it little-endian" if swapped else "")
        )
    expected = HEADER_BYTES + int(header[2]) * dtype.itemsize
    if size != expected:
        raise UserError(f"{path} is damaged: {size} bytes, where its {header[2]} tokens need {expected}")
    return np.asarray(np.memmap(path, dtype, "r", offset=HEADER_BYTES)) if header[2] else np.zeros(0, dtype)


def examine(path: Path, remembered: Path) -> tuple[str, int]:
    """SHA-256 of a shard's file, and its largest token: read once on a machine, and remembered in the folder
    `remembered` for as long as the file's size and time of change stay what they are."""
    tokens, status = read_shard(path), path.stat()
    key = hashlib.sha256(repr((str(path.resolve()), status.st_size, status.st_mtime_ns)).encode()).hexdigest()
    memory = remembered / key[:32]
    try:
        digest, largest = json.loads(memory.read_bytes())
        return digest, largest
    except (OSError, ValueError, TypeError):  # never remembered, or half written
        pass
    try:
        with path.open("rb") as file:
            digest, largest = hashlib.file_digest(file, "sha256").hexdigest(), int(tokens.max(initial=0))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    partial = memory.with_name(f"{memory.name}.{os.getpid()}")  # several processes may examine one shard
    with suppress(OSError):  # where nothing can be remembered, the shard is read again
        remembered.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps([digest, largest]))
        partial.replace(memory)
    return digest, largest


class TokenStream:
    """Shards read as one long array of tokens."""

    def __init__(self, shards: Sequence[Integer[np.ndarray, "_"]]):
        self.shards = shards
        self.starts = np.cumsum([0, *map(len, shards)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> Integer[np.ndarray, "tokens"]:
        """Tokens `start` to `stop`, across shards; fewer where the stream ends."""
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        parts = []
        for shard, begins in zip(self.shards[first:], self.starts[first:].tolist()):
            if begins >= stop:
                break
            parts.append(shard[max(start - begins, 0) : stop - begins])
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.zeros(0, np.int32)])

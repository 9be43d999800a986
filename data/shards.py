"""Tokens on disk, in the .bin format of llm.c and modded-nanogpt.

A header of 256 little-endian int32 (magic, version, count of tokens), then the tokens: uint16 in version 1. Version 2,
ours, has uint32 tokens for vocabularies of more than 65,536.
"""

import os
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from configs.schema import UserError

MAGIC = 20240520
TOKEN_TYPES = {1: np.dtype("<u2"), 2: np.dtype("<u4")}
HEADER_BYTES = 1024


def write_shard(path: Path, tokens: Integer[np.ndarray, "tokens"], vocab_size: int) -> None:
    """Writes and syncs one shard."""
    version = 1 if vocab_size <= 2**16 else 2
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = MAGIC, version, len(tokens)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype(TOKEN_TYPES[version]).tobytes())
        file.flush()
        os.fsync(file.fileno())


def read_shard(path: Path) -> Integer[np.ndarray, "tokens"]:
    """Maps one shard's tokens into memory. UserError where it is no shard, or not whole."""
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", count=3)
    if len(header) < 3 or header[0] != MAGIC or header[1] not in TOKEN_TYPES:
        raise UserError(f"{path} is not a token shard: its header is {header.tolist()}, not [{MAGIC}, 1 or 2, tokens]")
    token_type = TOKEN_TYPES[int(header[1])]
    expected = HEADER_BYTES + int(header[2]) * token_type.itemsize
    if size != expected:
        raise UserError(f"{path} is damaged: {size} bytes, where its {header[2]} tokens need {expected}; delete it")
    return np.memmap(path, token_type, "r", offset=HEADER_BYTES)

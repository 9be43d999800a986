"""Writing the shards that data/shards.py reads, each with its index and its sidecar of hashes."""

import hashlib
import io
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from data.shards import BLOCK_BYTES, ENTRY, HEADER_BYTES, TOKEN_TYPES
from system.files import write_whole


def token_type(vocab_size: int) -> np.dtype:
    """Return the type of tokens for this vocabulary size."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def write_shard(
    path: Path,
    tokens: Integer[np.ndarray, "tokens"],
    lengths: Integer[np.ndarray, "documents"],
    vocab_size: int,
) -> str:
    """Write a shard of documents of these `lengths`, its index, and its sidecar, each atomically. Return the SHA-256 of
    the shard's file."""
    index = io.BytesIO()
    np.save(index, np.cumsum(lengths) - lengths)
    # A view of the index crashes Python 3.12 if the write fails.
    write_whole(path.with_suffix(".starts.npy"), index.getvalue())
    kind = next(kind for kind, dtype in TOKEN_TYPES.items() if dtype == token_type(vocab_size))
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = *kind, len(tokens)
    write_whole(path, header.tobytes(), tokens.astype(token_type(vocab_size)).data)
    return _write_sidecar(path, token_type(vocab_size), hashlib.sha256(index.getvalue()).digest())


def _write_sidecar(shard: Path, dtype: np.dtype, index_sha256: bytes) -> str:
    """Write the sidecar of a complete shard. Return the SHA-256 of the shard's file."""
    file, header, entries = hashlib.sha256(), b"", []
    with shard.open("rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            file.update(block)
            header = header or block[:12]
            tokens = np.frombuffer(block, dtype, offset=0 if entries else HEADER_BYTES)
            entries.append((hashlib.sha256(block).digest()[:16], tokens.max(initial=0)))
    content = file.digest() + index_sha256 + header + np.array(entries, ENTRY).tobytes()
    write_whole(shard.with_suffix(".blocks"), hashlib.sha256(content).digest() + content)
    return file.hexdigest()

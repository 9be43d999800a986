import struct

import numpy as np
import pytest

from configs.schema import UserError
from data.shards import read_shard, write_shard


def llm_c_bytes(tokens: list[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    """A shard as llm.c's dev/data/data_common.py describes it: 256 int32, then uint16, all little-endian."""
    header = [magic, version, len(tokens) if count is None else count] + [0] * 253
    return struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}H", *tokens)


def test_reads_what_llm_c_writes(tmp_path):
    tokens = [50256, 0, 1, 65535, 258]
    (tmp_path / "x.bin").write_bytes(llm_c_bytes(tokens))
    assert read_shard(tmp_path / "x.bin").tolist() == tokens


def test_writes_what_llm_c_reads(tmp_path):
    write_shard(tmp_path / "x.bin", np.array([3, 0, 65535]), vocab_size=2**16)
    assert (tmp_path / "x.bin").read_bytes() == llm_c_bytes([3, 0, 65535])


@pytest.mark.parametrize(("vocab_size", "bytes_a_token"), [(258, 2), (2**16, 2), (2**16 + 1, 4), (200_000, 4)])
def test_tokens_of_any_vocabulary_read_back(tmp_path, vocab_size, bytes_a_token):
    tokens = np.array([0, 1, vocab_size - 1, 257])
    write_shard(tmp_path / "x.bin", tokens, vocab_size)
    read = read_shard(tmp_path / "x.bin")
    assert read.tolist() == tokens.tolist()
    assert read.dtype.itemsize == bytes_a_token


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (llm_c_bytes([1, 2, 3])[:-1], "damaged"),
        (llm_c_bytes([1, 2, 3])[:-2], "damaged"),
        (llm_c_bytes([1, 2, 3]) + b"\0\0", "damaged"),
        (llm_c_bytes([1, 2, 3])[:600], "damaged"),
        (llm_c_bytes([1, 2, 3], count=-3), "damaged"),
        (llm_c_bytes([1, 2, 3], magic=20240521), "not a token shard"),
        (llm_c_bytes([1, 2, 3], version=3), "not a token shard"),
        (b"", "not a token shard"),
        (b"plain text", "not a token shard"),
    ],
)
def test_what_is_no_whole_shard_is_refused_and_named(tmp_path, content, told):
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=told) as error:
        read_shard(path)
    assert str(path) in str(error.value)

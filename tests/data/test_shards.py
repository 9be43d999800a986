import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import UserError
from data.shards import TokenStream, write_shard
from tests.data.preparations import read_shard


def llm_c_bytes(tokens: list[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    """Return a shard as llm.c's dev/data/data_common.py defines it: 256 int32, then uint16 (for GPT-2) or uint32 (for
    Llama 3), all little-endian."""
    header = [magic, version, len(tokens) if count is None else count] + [0] * 253
    kind = "I" if magic == 20240801 else "H"
    return struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}{kind}", *tokens)


@pytest.mark.parametrize("magic_version", [(20240520, 1), (20240801, 7)])
def test_reads_what_llm_c_writes(tmp_path, magic_version):
    tokens = [50256, 0, 1, 65535, 258] + ([128_000] if magic_version[1] == 7 else [])
    (tmp_path / "x.bin").write_bytes(llm_c_bytes(tokens, *magic_version))
    assert read_shard(tmp_path / "x.bin").tolist() == tokens


@pytest.mark.parametrize(("vocab_size", "kind"), [(2**16, (20240520, 1)), (2**16 + 1, (20240801, 7))])
def test_writes_what_llm_c_reads_and_leaves_nothing_else(tmp_path, vocab_size, kind):
    write_shard(tmp_path / "x.bin", np.array([3, 0, 65535]), vocab_size)
    assert (tmp_path / "x.bin").read_bytes() == llm_c_bytes([3, 0, 65535], *kind)
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (llm_c_bytes([1, 2, 3])[:-1], "damaged"),
        (llm_c_bytes([1, 2, 3])[:-2], "damaged"),
        (llm_c_bytes([1, 2, 3]) + b"\0\0", "damaged"),
        (llm_c_bytes([1, 2, 3])[:600], "damaged"),
        (llm_c_bytes([1, 2, 3], count=-3), "damaged"),
        (llm_c_bytes([1, 2, 3], magic=20240521), "not a token shard"),
        (llm_c_bytes([1, 2, 3], version=3), r"not a token shard of a known version.*\[20240520, 3, 3\]"),
        (np.frombuffer(llm_c_bytes([1, 2, 3])[:1024], "<i4").astype(">i4").tobytes(), "other byte order"),
        (b"", "not a token shard"),
        (b"plain text", "not a token shard"),
        (None, "cannot be read: No such file"),
    ],
)
def test_an_incomplete_shard_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "x.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_shard(path)
    assert str(path) in str(error.value)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 30), st.integers(0, 12))
def test_a_stream_reads_as_its_shards_joined(sizes, start, count):
    whole = np.arange(sum(sizes))
    stream = TokenStream(np.split(whole, np.cumsum(sizes)[:-1]))
    assert len(stream) == len(whole)
    assert stream.read(start, start + count).tolist() == whole[start : start + count].tolist()

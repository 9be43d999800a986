import errno
import hashlib
import os
import resource
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import data.shards as module
from data.prepare.shard_writer import write_shard
from data.shards import BLOCK_BYTES, HEADER_BYTES, Shard, read_blocks
from system.errors import StorageLost, UserError

TOKENS = np.random.default_rng(0).integers(0, 60_000, 100_000)  # four blocks; the last is not full


def llm_c_bytes(tokens: list[int], magic: int, version: int) -> bytes:
    """Return a shard as llm.c's dev/data/data_common.py defines it: 256 int32, then uint16 (for GPT-2) or uint32 (for
    Llama 3), all little-endian."""
    header = [magic, version, len(tokens)] + [0] * 253
    kind = "I" if magic == 20240801 else "H"
    return struct.pack("<256i", *header) + struct.pack(f"<{len(tokens)}{kind}", *tokens)


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """Write a shard with its sidecar."""
    write_shard(tmp_path / "x.bin", TOKENS, np.array([60_000, 40_000]), 60_000)
    return tmp_path / "x.bin"


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("vocab_size", "kind"), [(2**16, (20240520, 1)), (2**16 + 1, (20240801, 7))])
def test_a_shard_is_llm_c_s_and_reads_back(tmp_path, vocab_size, kind):
    tokens = [50256, 0, 1, 65535, 258, *([128_000] if kind[1] == 7 else [])]
    write_shard(tmp_path / "x.bin", np.array(tokens), np.array([3, len(tokens) - 3]), vocab_size)
    assert (tmp_path / "x.bin").read_bytes() == llm_c_bytes(tokens, *kind)
    assert {path.name for path in tmp_path.iterdir()} == {"x.bin", "x.starts.npy", "x.blocks"}
    assert Shard(tmp_path / "x.bin")[:].tolist() == tokens
    assert np.load(tmp_path / "x.starts.npy").tolist() == [0, 3]


@pytest.mark.parametrize(
    ("suffix", "size", "message"),
    [
        (".bin", -1, "is damaged: "),
        (".bin", None, "cannot be read: No such file"),
        *((".blocks", size, "cannot be read .*; bring it back") for size in (31, -1, None)),
    ],
)
def test_an_incomplete_shard_or_sidecar_is_refused_by_name(shard, suffix, size, message):
    path = shard.with_suffix(suffix)
    content = path.read_bytes()
    path.unlink()
    if size:
        path.write_bytes(content[:size])
    with pytest.raises(UserError, match=f"{path} {message}"):
        Shard(shard)


def test_a_start_reads_a_shard_s_sidecar_and_then_the_blocks_it_needs(shard, monkeypatch):
    content, blocks = shard.read_bytes(), read_blocks(shard)
    parts = [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
    assert blocks.sha256 == hashlib.sha256(content).hexdigest() and max(blocks.entries["largest"]) == TOKENS.max()
    assert [one.tobytes() for one in blocks.entries["sha256"]] == [hashlib.sha256(p).digest()[:16] for p in parts]
    local = Shard(shard)
    assert len(local) == len(TOKENS) and not any(local.checked)
    assert (local[40_000:40_010] == TOKENS[40_000:40_010]).all() and sum(local.checked) == 1
    assert (local[:] == TOKENS).all() and all(local.checked)
    os.truncate(shard, HEADER_BYTES + 100)
    assert len(local[:10]) == 10
    with pytest.raises(UserError, match="damaged, or changed"):
        _ = local[:1000]


@pytest.mark.parametrize("place", [9, HEADER_BYTES, BLOCK_BYTES - 1, BLOCK_BYTES, -1])
def test_a_flipped_byte_is_detected_only_if_its_block_is_read(shard, place):
    flip(shard, place)
    block = range(shard.stat().st_size)[place] // BLOCK_BYTES
    says = rf"{shard} is damaged, or changed .* the bytes from {block * BLOCK_BYTES:,} on"
    with pytest.raises(UserError, match=says):
        _ = Shard(shard)[:]
    sound = slice(0, 10) if block else slice(50_000, 60_000)
    assert (Shard(shard)[sound] == TOKENS[sound]).all()


@pytest.mark.parametrize("name", ["read_blocks", "os.pread"])
def test_a_disk_that_fails_for_a_while_is_no_mistake(shard, monkeypatch, name):
    read, errors = eval(name, vars(module)), [OSError(errno.ESTALE, "Stale file handle")]

    def failing(*arguments):
        if errors:
            raise errors.pop()
        return read(*arguments)

    monkeypatch.setattr(f"data.shards.{name}", failing)
    assert (Shard(shard)[:] == TOKENS).all() and not errors
    errors += [OSError(errno.EIO, "Input/output error")] * 9
    monkeypatch.setattr("system.files.RETRY_SECONDS", 0)
    with pytest.raises(StorageLost, match=r"x\.bin: .*Input/output error"):
        _ = Shard(shard)[:]


def test_threads_read_their_own_shards_while_files_open_and_close(tmp_path, monkeypatch):
    """A cache of two open files makes nearly every read open one and close another's."""
    monkeypatch.setattr(module, "OPEN", 2)
    module._open_files.cache_clear()
    shards = []
    for i in range(8):
        write_shard(tmp_path / f"{i}.bin", np.full(2000, i), np.array([2000]), 300)
        shards.append(Shard(tmp_path / f"{i}.bin"))
    numbers = np.random.default_rng(0).integers(0, len(shards), 1_000).tolist()
    read = lambda i: bool((shards[i][100:150] == np.full(50, i)).all())
    with ThreadPoolExecutor(20) as threads:
        assert all(threads.map(read, numbers))
    module._open_files.cache_clear()


@pytest.fixture
def few_files():
    """Let this process open 80 files more than it has open. Return its limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + 80
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    module._open_files.cache_clear()
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    module._open_files.cache_clear()


def test_more_shards_are_read_than_files_may_be_open(tmp_path, monkeypatch, few_files):
    monkeypatch.setattr("system.files.RETRY_SECONDS", 0)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    shards = []
    for i in range(few_files):
        write_shard(tmp_path / f"{i}.bin", np.full(20, i), np.array([20]), 300)
        shards.append(Shard(tmp_path / f"{i}.bin"))
    assert [shard[3:4].tolist() for shard in shards] == [[i % 2**16] for i in range(few_files)]

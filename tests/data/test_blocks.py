import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import data.blocks as module
from configs.schema import UserError
from data.blocks import BLOCK_BYTES, MappedShard, examine, read_blocks, write_blocks
from data.shards import HEADER_BYTES, write_shard

TOKENS = np.random.default_rng(0).integers(0, 60_000, 100_000)  # four blocks; the last is not full


@pytest.fixture(params=[60_000, 70_000])
def shard(request, tmp_path):
    """Write a shard with its sidecar, of uint16 or uint32."""
    path = tmp_path / "x.bin"
    write_shard(path, TOKENS, request.param)
    write_blocks(path)
    return path


def flip(path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_sidecar_describes_its_shard(shard):
    blocks = read_blocks(shard)
    content = shard.read_bytes()
    parts = [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
    assert blocks.sha256 == hashlib.sha256(content).hexdigest()
    assert [one.tobytes() for one in blocks.entries["sha256"]] == [hashlib.sha256(p).digest()[:16] for p in parts]
    assert blocks.largest == TOKENS.max() and blocks.type_of("x").tokens == len(TOKENS)
    per_block = np.split(TOKENS, range((BLOCK_BYTES - HEADER_BYTES) // 2, len(TOKENS), BLOCK_BYTES // 2))
    if blocks.type_of("x").dtype.itemsize == 2:
        assert blocks.entries["largest"].tolist() == [part.max() for part in per_block]


def test_a_start_reads_no_shard_that_has_a_sidecar(shard, tmp_path, monkeypatch):
    expected = examine(shard, tmp_path / "memory").sha256
    monkeypatch.setattr(module, "_file_blocks", None)
    mapped = MappedShard(shard, tmp_path / "memory")
    assert mapped.blocks.sha256 == expected and not any(mapped.checked) and not (tmp_path / "memory").exists()
    assert (mapped[40_000:40_010] == TOKENS[40_000:40_010]).all() and sum(mapped.checked) == 1
    assert (mapped[:] == TOKENS).all() and all(mapped.checked)


@pytest.mark.parametrize("place", [9, HEADER_BYTES, BLOCK_BYTES - 1, BLOCK_BYTES, -1])
def test_a_flipped_byte_is_detected_only_if_its_block_is_read(shard, tmp_path, place):
    flip(shard, place)
    block = range(shard.stat().st_size)[place] // BLOCK_BYTES
    with pytest.raises(UserError, match=rf"{shard} is damaged") as error:
        MappedShard(shard, tmp_path / "memory")[:]
    if place != 9:  # the count of tokens
        assert f"bytes from {block * BLOCK_BYTES:,} on" in str(error.value)
        sound = slice(0, 10) if block else slice(50_000, 60_000)
        assert (MappedShard(shard, tmp_path / "memory")[sound] == TOKENS[sound]).all()


@pytest.mark.parametrize("cut", [0, 20, 31, 76, 96, -1])
def test_a_damaged_sidecar_is_named(shard, tmp_path, cut):
    sidecar = shard.with_suffix(".blocks")
    sidecar.write_bytes(sidecar.read_bytes()[:cut])
    with pytest.raises(UserError, match=rf"{sidecar} cannot be read .*; delete it"):
        examine(shard, tmp_path / "memory")
    sidecar.unlink()
    assert examine(shard, tmp_path / "memory").largest == TOKENS.max()


def test_a_sidecar_of_another_shard_is_named(shard, tmp_path):
    write_shard(tmp_path / "y.bin", TOKENS[:10], 300)
    os.rename(tmp_path / "x.blocks", tmp_path / "y.blocks")
    with pytest.raises(UserError, match=r"y\.bin is damaged, or changed"):
        MappedShard(tmp_path / "y.bin", tmp_path / "memory")


def test_an_examination_is_stored_until_the_file_changes(tmp_path, monkeypatch):
    path, memory = tmp_path / "x.bin", tmp_path / "memory"
    write_shard(path, np.array([3, 77, 5]), 300)
    blocks = examine(path, memory)
    assert blocks.largest == 77 and blocks.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(module, "_file_blocks", None)  # it must not be called
        assert examine(path, memory).sha256 == blocks.sha256
    flip(path, -1)
    os.utime(path, ns=(1, 1))
    assert examine(path, memory).sha256 == examine(path, tmp_path / "elsewhere").sha256 != blocks.sha256


def test_more_shards_than_files_may_be_open_are_read(shard, tmp_path):
    for i in range(350):
        for suffix in (".bin", ".blocks"):
            shutil.copy(shard.with_suffix(suffix), tmp_path / f"{i}{suffix}")
    program = """
import resource, sys
from pathlib import Path
from data.blocks import MappedShard
resource.setrlimit(resource.RLIMIT_NOFILE, (320, 320))
shards = [MappedShard(path, Path("unused")) for path in Path(sys.argv[1]).glob("[0-9]*.bin")]
print(sum(int(shard[i].sum()) for i in (slice(0, 1), slice(-1, None)) for shard in shards))
"""
    words = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout == f"{350 * (TOKENS[0] + TOKENS[-1])}\n", done.stderr

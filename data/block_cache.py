"""A local cache of blocks of shards in a store."""

import os
import sys
import threading
from pathlib import Path

from data.blocks import BLOCK_BYTES, Blocks


class BlockCache:
    """Blocks read before, in one file with a size limit. Block n has the place n modulo the number of places, and is
    present if its hash matches. So the file needs no index, survives kills and full disks, and processes can share
    it."""

    def __init__(self, path: Path, gigabytes: float):
        self.path, self.places, self.lock, self.file = path, int(gigabytes * 1e9) // BLOCK_BYTES, threading.Lock(), -1
        self.is_used = self.places > 0  # places and file stay: other threads may use them
        if not self.is_used:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = os.open(path, os.O_RDWR | os.O_CREAT)
            if os.fstat(self.file).st_size > self.places * BLOCK_BYTES:
                os.truncate(self.file, self.places * BLOCK_BYTES)
        except OSError as error:
            self._give_up(error, "written")

    def read(self, place: int, block: int, blocks: Blocks) -> bytes | None:
        """Return block `block` of a shard with these `blocks`, if it is at this place."""
        if not self.is_used:
            return None
        try:
            content = os.pread(self.file, BLOCK_BYTES, place % self.places * BLOCK_BYTES)
        except OSError as error:
            return self._give_up(error, "read")
        if block == len(blocks.entries) - 1:
            content = content[: blocks.type_of("").file_bytes - block * BLOCK_BYTES]
        return content if blocks.wrong(block, content) is None and content else None

    def write(self, place: int, content: bytes) -> None:
        if not self.is_used:
            return
        try:
            os.pwrite(self.file, content, place % self.places * BLOCK_BYTES)
        except OSError as error:
            self._give_up(error, "written")

    def _give_up(self, error: OSError, wanted: str) -> None:
        with self.lock:
            if self.is_used:
                print(
                    f"{self.path} cannot be {wanted} ({error.strerror}): rows are read from the store each time; "
                    "make room",
                    file=sys.stderr,
                )
            self.is_used = False

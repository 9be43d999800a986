"""A dataset in a bucket, or anywhere that fsspec reaches: rows are read from there.

Small files (dataset.json, the tokenizer, the shards' sidecars) are copied to this machine at the start. Blocks of
shards are read when rows need them, many at a time, and checked. A file on this machine caches them. A failed request
is repeated until it is answered: an outage costs only time.
"""

import fcntl
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from fsspec.asyn import sync
from jaxtyping import Integer

from configs.files import write_whole
from configs.retry import CLIENTS, first_line, is_transient, status_of
from configs.schema import UserError
from data.shards import BLOCK_BYTES, HEADER_BYTES, Blocks, LocalShard, blocks_of, changed, read_blocks, remember

READERS = 64  # requests at a time: at 50 ms each, 1,280 a second
CHUNK_BLOCKS = 128  # blocks of one request: 8 MiB of a file that is read completely
SECONDS = 60  # seconds for a request before it is repeated
LONGEST = 5  # seconds between two requests
READ_AGAIN = 3  # reads of a wrong content: the transfer may have damaged it
PAGES = (json.JSONDecodeError, UnicodeDecodeError, KeyError)  # a client's errors for a proxy's page


@cache
def readers() -> ThreadPoolExecutor:
    """Return the threads that wait for stores."""
    return ThreadPoolExecutor(READERS, "reader")


class Outage:
    """An outage of the stores that this process reads. It is reported while it lasts. The watchdog reads it, since the
    wait is no hang."""

    def __init__(self):
        self.lock = threading.Lock()
        self.since: float | None = None
        """Time of the first failed request since the last answer."""
        self.reported = 0.0
        """Length of the outage at its last report."""

    def failed(self, name: str, error: Exception) -> None:
        """Note that a request failed, and will be repeated."""
        with self.lock:
            self.since = self.since or time.monotonic()
            if self.seconds >= self.reported + 30:
                self.reported = self.seconds
                why = f"no answer for {self.reported:.0f} s ({first_line(error)}); trying again"
                print(f"{name}: {why}", file=sys.stderr, flush=True)

    def answered(self) -> None:
        """Note that a request was answered, which ends an outage."""
        if self.since is None:
            return
        with self.lock:
            if self.reported:
                print(f"the store answers again, after {self.seconds:.0f} s", file=sys.stderr, flush=True)
            self.since, self.reported = None, 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds for which requests have failed and none was answered."""
        return 0.0 if self.since is None else time.monotonic() - self.since


OUTAGE = Outage()


def read_range(filesystem: Any, path: str, start: int, stop: int) -> bytes:
    """Return bytes `start` to `stop` of an fsspec file, by one request."""
    if filesystem.async_impl:
        ask = filesystem._cat_file
        return sync(filesystem.loop, ask, path, start=start, end=stop, timeout=SECONDS) or b""
    with filesystem.open(path, "rb", cache_type="none") as file:
        file.seek(start)
        return file.read(stop - start)


class Store:
    """A folder of files at a URL."""

    def __init__(self, url: str):
        """Raise UserError if the URL leads nowhere, or may not be read."""
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # this module reports failures, without tracebacks
        self.url = url.rstrip("/")
        self.filesystem, self.root = self._persist(lambda: fsspec.core.url_to_fs(self.url), "")
        self.facts = {path.removeprefix(self.root).lstrip("/"): facts for path, facts in sorted(self._listed().items())}
        """Facts of the store on each file below the URL, such as its `size`."""
        if not self.facts:
            raise UserError(f"--data.source={url}: nothing is there, or the bucket does not exist")

    def _listed(self) -> dict[str, dict]:
        self.filesystem.invalidate_cache()  # of what was listed before
        return self._persist(lambda: self.filesystem.find(self.root, detail=True), "")

    def version(self, name: str) -> str:
        """Return a text that changes with a file: its size, time of change, generation and the like in the store."""
        return repr((self.url, sorted((key, str(fact)) for key, fact in self.facts[name].items())))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return a file's bytes, and repeat failed requests. Raise UserError if it is gone, may not be read, or is
        shorter than before."""
        if stop <= start:
            return b""
        for _ in range(READ_AGAIN):
            content = self._persist(lambda: read_range(self.filesystem, f"{self.root}/{name}", start, stop), name)
            if len(content) == stop - start:
                return content
            self._listed()  # fails for a proxy's page: the store itself must answer
        raise UserError(f"{self.url}/{name} changed while it was read: it ends before its byte {stop:,}")

    def _persist(self, ask: Callable[[], Any], name: str) -> Any:
        """Return the result of `ask`, after any outage. Raise UserError if the store refuses."""
        where = f"{self.url}/{name}".rstrip("/")
        for attempt in count():
            readers().submit(int)  # raises when this process ends, since an endless retry would delay that
            try:
                answer = ask()
            except Exception as error:
                if _is_transient(error):
                    OUTAGE.failed(where, error)
                    time.sleep(random.uniform(0, min(0.1 * 2 ** min(attempt, 9), LONGEST)))
                elif _is_answer(error):
                    line = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                    why = "it is shorter than before: it changed (416)" if status_of(error) == 416 else line
                    raise UserError(f"--data.source={where}: cannot be read: {why}") from error
                else:
                    raise
            else:
                OUTAGE.answered()
                return answer

    def blocks(self, name: str, first: int, last: int, record: Blocks | None = None) -> bytes:
        """Return blocks `first` to before `last` of a file. Raise UserError if they differ from `record`."""
        start, stop = first * BLOCK_BYTES, min(last * BLOCK_BYTES, self.facts[name]["size"])
        for _ in range(READ_AGAIN):
            content = self.read(name, start, stop)
            if record is None or (wrong := record.wrong(first, content)) is None:
                return content
        raise UserError(changed(f"{self.url}/{name}", wrong))

    def examine(self, name: str) -> Blocks:
        """Return the sidecar of a shard that has none, after reading the complete shard."""
        size = self.facts[name]["size"]
        chunks = (self.blocks(name, at, at + CHUNK_BLOCKS) for at in range(0, -(-size // BLOCK_BYTES), CHUNK_BLOCKS))
        parts = (content[at : at + BLOCK_BYTES] for content in chunks for at in range(0, len(content), BLOCK_BYTES))
        return blocks_of(parts, f"{self.url}/{name}", size)

    def copy(self, names: Sequence[str], folder: Path) -> None:
        """Copy the small files that a folder lacks into it, several at a time."""
        if all((folder / name).exists() for name in names):
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # wait for another process of this machine that copies
                copied = readers().map(lambda name: self._copy_file(name, folder), names)
                list(copied)  # wait for all, and raise what one of them raised
        except OSError as error:
            raise UserError(f"{self.url} cannot be copied to {folder}: {error}; the same command continues") from error

    def _copy_file(self, name: str, folder: Path) -> None:
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, self.read(name, 0, self.facts[name]["size"]))


class BlockCache:
    """Blocks read before, in one file with a size limit. Block n has the place n modulo the number of places, and is
    present if its hash matches. So the file needs no index, survives kills and full disks, and processes can share
    it."""

    def __init__(self, path: Path, gigabytes: float):
        self.path, self.places = path, int(gigabytes * 1e9) // BLOCK_BYTES
        self.is_used, self.lock = True, threading.Lock()
        with self._or_without("opened"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = os.open(path, os.O_RDWR | os.O_CREAT)

    def read(self, place: int, size: int) -> bytes:
        """Return what is in this place: a block of `size` bytes, or anything else."""
        with self._or_without("read"):
            return os.pread(self.file, size, place % self.places * BLOCK_BYTES) if self.is_used else b""
        return b""

    def write(self, place: int, content: bytes) -> None:
        """Put a block into this place."""
        with self._or_without("written"):
            if self.is_used:
                os.pwrite(self.file, content, place % self.places * BLOCK_BYTES)

    @contextmanager
    def _or_without(self, verb: str) -> Iterator[None]:
        """Report the first error of the cache's file, and then do without the cache."""
        try:
            yield
        except OSError as error:
            why = f"cannot be {verb} ({error.strerror}): rows are read from the store each time; make room"
            with self.lock:
                if self.is_used:
                    print(f"{self.path} {why}", file=sys.stderr)
                self.is_used = False


class StoredShard:
    """A shard in a store, read in blocks. Each read, from the store or from the cache, is checked."""

    def __init__(self, store: Store, path: Path, kept: BlockCache, remembered: Path):
        """Take `path`: the shard's local path, next to its sidecar. Without a sidecar the complete shard is read once,
        and the result kept in the folder `remembered`. Raise UserError if it is not a shard, or incomplete."""
        self.store, self.path, self.name, self.kept = store, path, path.name, kept
        url = f"{store.url}/{self.name}"
        if self.name not in store.facts:
            raise UserError(f"{url} is missing, although dataset.json lists it; bring it there")
        examine = lambda: store.examine(self.name)
        self.blocks = read_blocks(path) or remember(remembered, store.version(self.name), examine)
        self.kind = self.blocks.type_of(url, store.facts[self.name]["size"])
        self.before = 0
        """Blocks of the dataset's earlier shards: the start of its own in the cache."""

    def __len__(self) -> int:
        return self.kind.tokens

    def __getitem__(self, span: slice) -> Integer[np.ndarray, "tokens"]:
        start, stop, _ = span.indices(len(self))
        first, last = self.kind.blocks_with(start, stop)
        chunks = (range(block, min(block + CHUNK_BLOCKS, last)) for block in range(first, last, CHUNK_BLOCKS))
        content = b"".join(map(self._read, chunks))
        offset = HEADER_BYTES + start * self.kind.dtype.itemsize - first * BLOCK_BYTES
        return np.frombuffer(content, self.kind.dtype, max(stop - start, 0), offset if content else 0)

    def _read(self, blocks: range) -> bytes:
        """Return consecutive blocks from the cache, or by one request if any is missing there."""
        size = min(blocks.stop * BLOCK_BYTES, self.kind.file_bytes) - blocks.start * BLOCK_BYTES
        content = b"".join(self.kept.read(self.before + block, min(BLOCK_BYTES, size)) for block in blocks)[:size]
        if len(content) < size or self.blocks.wrong(blocks.start, content) is not None:
            content = self.store.blocks(self.name, blocks.start, blocks.stop, self.blocks)
            for number, block in enumerate(blocks):
                self.kept.write(self.before + block, content[number * BLOCK_BYTES :][:BLOCK_BYTES])
        return content


Shard = LocalShard | StoredShard
"""A shard's tokens, by slices. Each block is checked before its tokens are returned. Raises UserError if it differs
from its record."""


def _is_transient(error: BaseException) -> bool:
    """Return whether to repeat a request after this error."""
    # gcsfs' ValueError for any answer with "invalid" in it, such as a proxy's page about its server
    page = isinstance(error, PAGES) or (isinstance(error, ValueError) and str(error).startswith("Bad Request"))
    return page or (is_transient(error) and status_of(error) != 401)


def _is_answer(error: Exception) -> bool:
    """Return whether a store, or the library that should reach it, made this error: it is no bug."""
    client = type(error).__module__.startswith(CLIENTS) or status_of(error) is not None
    return client or isinstance(error, OSError | ValueError | ImportError | NotImplementedError)

"""A dataset in a bucket, or anywhere that fsspec reaches: rows are read from there, or everything is copied first.

Small files (dataset.json, the tokenizer, the shards' sidecars) are copied to this machine at the start. Blocks of
shards are read when rows need them, many at a time, and checked. A file on this machine caches them. A failed request
is repeated until it is answered: an outage costs only time.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, cast

import fsspec
import numpy as np
from fsspec.asyn import sync
from jaxtyping import Integer
from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

from configs.files import shown_bytes
from configs.messages import progress
from configs.retry import CLIENTS, passes, status_of
from configs.schema import UserError
from data.block_cache import BlockCache
from data.blocks import (
    BLOCK_BYTES,
    Blocks,
    MappedShard,
    blocks_of,
    blocks_with,
    changed,
    read_blocks,
    remember,
)
from data.outage import OUTAGE
from data.shards import HEADER_BYTES, require_whole

READERS = 64  # requests at a time: at 50 ms each, 1,280 a second
CHUNK_BYTES = 128 * BLOCK_BYTES  # 8 MiB: a range of a file that is read completely
SECONDS = 60  # seconds for a request before it is repeated
READ_AGAIN = 3  # reads of a wrong content: the transfer may have damaged it
PAGES = (json.JSONDecodeError, UnicodeDecodeError, KeyError)  # a client's errors for a proxy's page


@cache
def readers() -> ThreadPoolExecutor:
    """Return the threads that wait for stores."""
    return ThreadPoolExecutor(READERS, "reader")


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
        self.facts = {path.removeprefix(self.root).lstrip("/"): facts for path, facts in self._listed().items()}
        if not self.facts:
            raise UserError(f"--data.source={url}: nothing is there, or the bucket does not exist")

    def _listed(self) -> dict[str, dict]:
        self.filesystem.invalidate_cache()  # of what was listed before
        return self._persist(lambda: self.filesystem.find(self.root, detail=True), "")

    @property
    def names(self) -> list[str]:
        """Return the files below the URL, in order."""
        return sorted(self.facts)

    def version(self, name: str) -> str:
        """Return a digest that changes with a file: of its size, time of change, generation and the like in the
        store."""
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

        def report(state: RetryCallState) -> None:
            OUTAGE.failed(where, cast(Exception, cast(Future, state.outcome).exception()))
            readers().submit(int)  # raises when this process ends, since an endless retry would delay that

        again = Retrying(
            retry=retry_if_exception(_passes),
            wait=wait_random_exponential(multiplier=0.1, max=5),
            before_sleep=report,
            reraise=True,
        )
        try:
            answer = again(ask)
        except Exception as error:
            client = type(error).__module__.startswith(CLIENTS) or status_of(error) is not None
            if not client and not isinstance(error, OSError | ValueError | ImportError | NotImplementedError):
                raise  # not an answer of the store
            shorter = "it is shorter than before: it changed (416)"
            why = shorter if status_of(error) == 416 else _in_a_line(error)
            raise UserError(f"--data.source={where}: cannot be read: {why}") from error
        OUTAGE.answered()
        return answer

    def blocks(self, name: str, first: int, last: int, blocks: Blocks) -> bytes:
        """Return blocks `first` to before `last` of a shard. Raise UserError if they differ from their record."""
        start, stop = first * BLOCK_BYTES, min(last * BLOCK_BYTES, blocks.type_of(name).file_bytes)
        for _ in range(READ_AGAIN):
            content = self.read(name, start, stop)
            if (wrong := blocks.wrong(first, content)) is None:
                return content
        raise UserError(changed(f"{self.url}/{name}", wrong))

    def examine(self, name: str) -> Blocks:
        """Return the sidecar of a shard that has none, after reading the complete shard."""
        size = self.facts[name]["size"]
        chunks = (self.read(name, at, min(at + CHUNK_BYTES, size)) for at in range(0, size, CHUNK_BYTES))
        parts = (chunk[at : at + BLOCK_BYTES] for chunk in chunks for at in range(0, len(chunk), BLOCK_BYTES))
        blocks = blocks_of(parts, f"{self.url}/{name}")
        require_whole(f"{self.url}/{name}", blocks.type_of(name), size)
        return blocks

    def copy(self, names: Sequence[str], folder: Path) -> None:
        """Copy files into a folder, several ranges at a time. Complete files and parts that are there are not read
        again. Raise UserError if there is no room."""
        left = [name for name in names if not (folder / name).exists()]
        if not left:
            return
        try:
            for name in left:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # wait for another process of this machine that copies
                self._copy([name for name in left if not (folder / name).exists()], folder)
        except OSError as error:
            raise UserError(f"{self.url} cannot be copied to {folder}: {error}; the same command continues") from error

    def _copy(self, names: list[str], folder: Path) -> None:
        partials = {name: folder / f"{name}.partial" for name in names}
        sizes = {name: self.facts[name]["size"] for name in names}
        written = {name: path.stat().st_size for name, path in partials.items() if path.exists()}
        # A file's last range is read once more after a kill before the rename.
        begun = {
            name: max(min(size, sizes[name] - 1), 0) // CHUNK_BYTES * CHUNK_BYTES for name, size in written.items()
        }
        needed, free = sum(sizes.values()) - sum(begun.values()), shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(
                f"{self.url} needs {shown_bytes(needed)} in {folder}, but only {shown_bytes(free)} are free"
            )
        bar = progress(total=needed, unit="B", unit_scale=True, disable=needed <= CHUNK_BYTES, desc="copying")
        ranges = ((name, at) for name in names for at in range(begun.get(name, 0), max(sizes[name], 1), CHUNK_BYTES))
        for name, start, content in self._ahead(ranges, folder):
            with partials[name].open("r+b" if start else "wb") as file:
                file.seek(start)
                file.write(content)
                file.truncate()
                bar.update(len(content))
                if start + len(content) == sizes[name]:
                    os.fsync(file.fileno())
                    partials[name].rename(folder / name)
        bar.close()

    def _ahead(self, ranges: Iterator[tuple[str, int]], folder: Path) -> Iterator[tuple[str, int, bytes]]:
        """Yield the content of each range, in order, while the next ones are read."""

        def read(name: str, start: int) -> bytes:
            stop = min(start + CHUNK_BYTES, self.facts[name]["size"])
            blocks = read_blocks(folder / name) if name.endswith(".bin") else None
            if blocks is None:
                return self.read(name, start, stop)
            return self.blocks(name, start // BLOCK_BYTES, -(-stop // BLOCK_BYTES), blocks)

        waiting: deque = deque()
        for name, start in ranges:
            waiting.append((name, start, readers().submit(read, name, start)))
            if len(waiting) == READERS:
                name, start, content = waiting.popleft()
                yield name, start, content.result()
        for name, start, content in waiting:
            yield name, start, content.result()


class StoredShard:
    """A shard in a store, read in blocks. Each read, from the store or from the cache, is checked."""

    def __init__(self, store: Store, path: Path, kept: BlockCache, remembered: Path):
        """Take `path`: the shard's local path, next to its sidecar. Without a sidecar the complete shard is read once,
        and the result kept in the folder `remembered`. Raise UserError if it is not a shard, or incomplete."""
        self.store, self.path, self.name, self.kept = store, path, path.name, kept
        url = f"{store.url}/{self.name}"
        if self.name not in store.facts:
            raise UserError(f"{url} is missing, although dataset.json lists it; bring it there")
        memory = remembered / hashlib.sha256(store.version(self.name).encode()).hexdigest()[:32]
        blocks = read_blocks(path) or remember(memory, lambda: store.examine(self.name))
        self.blocks, kind = blocks, blocks.type_of(url)
        self.dtype, self.tokens = kind
        require_whole(url, kind, store.facts[self.name]["size"])
        self.before = 0
        """Blocks of the dataset's earlier shards: the start of its own in the cache."""

    def __len__(self) -> int:
        return self.tokens

    def __getitem__(self, span: slice) -> Integer[np.ndarray, "tokens"]:
        start, stop, _ = span.indices(self.tokens)
        first, last = blocks_with(start, stop, self.dtype.itemsize)
        contents = {block: self.kept.read(self.before + block, block, self.blocks) for block in range(first, last)}
        missing = [block for block, content in contents.items() if content is None]
        for block, end in _runs(missing, CHUNK_BYTES // BLOCK_BYTES):
            content = self.store.blocks(self.name, block, end, self.blocks)
            for number in range(block, end):
                at = (number - block) * BLOCK_BYTES
                contents[number] = one = content[at : at + BLOCK_BYTES]
                self.kept.write(self.before + number, one)
        joined = b"".join(content for content in contents.values() if content is not None)
        offset = HEADER_BYTES + start * self.dtype.itemsize - first * BLOCK_BYTES
        return np.frombuffer(joined, self.dtype, max(stop - start, 0), offset if joined else 0)


Shard = MappedShard | StoredShard
"""A shard's tokens, by slices. Each block is checked before its tokens are returned. Raises UserError if it differs
from its record."""


def _runs(numbers: list[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield runs of neighbours among ascending numbers, each of at most `most`: (first, last + 1)."""
    at = 0
    while at < len(numbers):
        end = at + 1
        while end < len(numbers) and numbers[end] == numbers[at] + end - at and end - at < most:
            end += 1
        yield numbers[at], numbers[end - 1] + 1
        at = end


def mirrored(store: Store, cache_folder: Path, wanted: Callable[[str], bool]) -> Path:
    """Return the local folder with the `wanted` files of the store, and copy missing ones. Its name changes with
    dataset.json, or without one, with any file."""
    version: object = [store.version(name) for name in store.names]
    if "dataset.json" in store.facts:
        version = store.read("dataset.json", 0, store.facts["dataset.json"]["size"])
    folder = cache_folder / "stores" / hashlib.sha256(repr((store.url, version)).encode()).hexdigest()[:32]
    store.copy([name for name in store.names if wanted(name)], folder)
    return folder


def _passes(error: BaseException) -> bool:
    """Return whether to repeat a request after this error."""
    # gcsfs' ValueError for any answer with "invalid" in it, such as a proxy's page about its server
    page = isinstance(error, PAGES) or (isinstance(error, ValueError) and str(error).startswith("Bad Request"))
    return page or (passes(error) and status_of(error) != 401)


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]

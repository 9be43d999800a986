"""Reading from a bucket: python -m bench.bucket [--only=rate|outage|start]. One JSON line a measurement.

A server in a process of its own speaks the part of Google Cloud Storage's API that gcsfs asks for; each answer takes
`--milliseconds`, and a share `--errors` of them is a 503. Shards are sparse files of the size of a large dataset: only
what is asked for is read of them. `start`: seconds from opening the dataset to its first batch, and what was asked of
the store until then. `rate`: batches at a host's pace; `data_wait` is the share of the time that steps wait for
their batches, as in metrics.jsonl, and `cores` what reading takes of this process's processor time. `outage`: the store
answers nothing but errors for a while.
"""

import hashlib
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from configs.command_line import parse_arguments
from configs.schema import BatchConfig, DataConfig, FilePath, MeshConfig, Positive
from data.blocks import BLOCK_BYTES, ENTRY, NO_INDEX, Blocks
from data.dataset import open_text
from data.loader import StepBatches, local_rows, train_batches
from data.shards import HEADER_BYTES
from data.tokenizer import train_tokenizer
from hosts.runtime import run_command
from tests.fake_gcs import FakeGCS
from training.mesh import batch_shape, batch_sharding, make_mesh

SHARD_TOKENS, VOCAB_SIZE = 100_000_000, 300
OUTAGE_RATE = 0.5e6  # tokens/s


@dataclass(frozen=True)
class Arguments:
    """Reading from a stand-in for a bucket, as JSON lines."""

    only: Literal["", "rate", "outage", "start"] = ""
    """Measure one thing alone."""
    gigabytes: Positive[float] = 100.0
    """Of the dataset, in sparse files."""
    milliseconds: float = 50.0
    """That each answer of the store takes."""
    errors: float = 0.01
    """Share of the answers that are a 503."""
    rates: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)
    """M tokens/s that a host takes."""
    steps: Positive[int] = 40
    """Steps at each rate."""
    outage_seconds: Positive[float] = 600.0
    """How long the store is away."""
    folder: FilePath = ""
    """Where the sparse files lie; by default a temporary folder."""


class SparseObject:
    """What the store has for an object's content: a file."""

    def __init__(self, path: Path):
        self.file, self.size = os.open(path, os.O_RDONLY), path.stat().st_size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, span: slice) -> bytes:
        start, stop, _ = span.indices(self.size)
        return os.pread(self.file, stop - start, start)


class SparseGCS(FakeGCS):
    """The stand-in, with files for objects."""

    def md5(self, content: Any) -> bytes:
        return bytes(16)


def serve(folder: Path, settings: dict[str, float], pipe: Any) -> None:
    """The store's process: told what to be like, and asked what it was asked for."""
    server = SparseGCS()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        server.put(f"text/{path.relative_to(folder)}", SparseObject(path))  # type: ignore[arg-type]
    pipe.send(server.environment())
    while True:
        for name, value in settings.items():
            setattr(server, name, value)
        try:
            settings = pipe.recv()
        except EOFError:  # the end
            return
        if settings.pop("told", False):
            pipe.send(list(server.asked))
            server.asked.clear()


def make_dataset(folder: Path, gigabytes: float) -> int:
    """A dataset of zeros: shards are sparse files, their sidecars are whole. Returns its shards."""
    tokenizer = train_tokenizer(["some words of text " * 50], VOCAB_SIZE - 30)
    tokenizer.save(folder / "tokenizer")
    size = HEADER_BYTES + 2 * SHARD_TOKENS
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = 20240520, 1, SHARD_TOKENS
    first = header.tobytes() + bytes(BLOCK_BYTES - HEADER_BYTES)
    blocks = [first, bytes(BLOCK_BYTES), bytes(size % BLOCK_BYTES)]
    half = [(hashlib.sha256(block).digest()[:16], 0) for block in blocks]
    whole = hashlib.sha256(first)
    for at in range(BLOCK_BYTES, size, BLOCK_BYTES):
        whole.update(bytes(min(BLOCK_BYTES, size - at)))
    entries = np.array([half[0], *[half[1]] * (size // BLOCK_BYTES - 1), half[2]], ENTRY)
    sidecar = Blocks(whole.hexdigest(), NO_INDEX, header.tobytes()[:12], entries).to_bytes()
    count, shards = max(round(gigabytes * 1e9 / size), 1), []
    part = {"documents": 1, "tokens": SHARD_TOKENS, "bytes": SHARD_TOKENS, "sha256": whole.hexdigest()}
    for i in range(count):
        names = {"train": f"train_{i:06d}"} | ({"val": f"val_{i:06d}"} if i == 0 else {})
        for name in names.values():
            with (folder / f"{name}.bin").open("wb") as file:
                file.write(header.tobytes())
                file.truncate(size)
            (folder / f"{name}.blocks").write_bytes(sidecar)
        made = {name: {"file": f"{stem}.bin", **part} for name, stem in names.items()}
        shards.append({**made, "skipped": {}, "until": [i, 0]})
    counts = {name: {"documents": 1, "tokens": SHARD_TOKENS, "bytes": SHARD_TOKENS} for name in ("train", "val")}
    facts = {
        "made_from": {"source": "nothing"},
        "files": 1,
        "shards": shards,
        "complete": True,
        "skipped": {},
        **counts,
    }
    facts |= {"tokenizer": {"sha256": tokenizer.sha256}, "val_threshold": 0.1}
    (folder / "dataset.json").write_text(json.dumps(facts))
    return count


def batches_from(cache: Path) -> tuple[Iterator[Any], int]:
    """A host's batches, and the tokens of each."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    shape, sharding = batch_shape(BatchConfig(), mesh), batch_sharding(mesh)
    config = DataConfig(source="gs://bucket/text", cache_gb=0)  # what was never written to it would be right: zeros
    text = open_text(config, VOCAB_SIZE, shape[2], shape[0] * shape[1], cache)
    steps = StepBatches(text.train, text.mixture, 0, shape, local_rows(shape, sharding))
    return train_batches(steps, sharding, config.workers), int(np.prod(shape))


def paced(batches: Iterator[Any], seconds: float, steps: int) -> tuple[float, list[float]]:
    """Steps of so many seconds each: how long all took, and how long each waited for its batch."""
    waits, start = [], time.perf_counter()
    for _ in range(steps):
        time.sleep(seconds)  # what the devices do meanwhile
        asked = time.perf_counter()
        next(batches)
        waits.append(time.perf_counter() - asked)
    return time.perf_counter() - start, waits


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=arguments.folder or None) as name:
        folder = Path(name)
        (folder / "text").mkdir()
        shards = make_dataset(folder / "text", arguments.gigabytes)
        pipe, theirs = context.Pipe()
        settings = {"seconds": arguments.milliseconds / 1000, "failing": arguments.errors}
        server = context.Process(target=serve, args=(folder / "text", settings, theirs), daemon=True)
        server.start()
        os.environ |= pipe.recv()

        start = time.perf_counter()
        batches, tokens = batches_from(folder / "cache")
        opened = time.perf_counter() - start
        next(batches)
        first = time.perf_counter() - start
        pipe.send({"told": True})
        asked = pipe.recv()
        of_shards = sum(".bin" in one and "alt=media" in one for one in asked)
        sizes = sum(path.stat().st_size for path in (folder / "cache" / "stores").rglob("*") if path.is_file())
        if arguments.only in ("", "start"):
            tell(
                measured="start",
                shards=shards,
                seconds_to_open=round(opened, 1),
                seconds_to_a_batch=round(first, 1),
                requests=len(asked),
                of_shards=of_shards,
                megabytes_copied=round(sizes / 1e6, 1),
            )
        if arguments.only in ("", "rate"):
            for rate in arguments.rates:
                paced(batches, tokens / rate / 1e6, 4)  # until what was read ahead is of this pace
                spent = time.process_time()
                took, waits = paced(batches, tokens / rate / 1e6, arguments.steps)
                tell(
                    measured="rate",
                    tokens_per_second=rate * 1e6,
                    data_wait=round(sum(waits) / took, 4),
                    longest_wait=round(max(waits), 2),
                    reached=round(arguments.steps * tokens / took),
                    cores=round((time.process_time() - spent) / took, 3),
                )
        if arguments.only in ("", "outage"):
            paced(batches, tokens / OUTAGE_RATE, 4)
            pipe.send({"down": True})
            threading.Timer(arguments.outage_seconds, lambda: pipe.send({"down": False})).start()
            _, waits = paced(batches, tokens / OUTAGE_RATE, arguments.steps)
            tell(measured="outage", seconds=arguments.outage_seconds, steps=len(waits), waited=round(sum(waits), 1))
    return 0


if __name__ == "__main__":
    run_command(main)

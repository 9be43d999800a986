"""Measure preparation and loading beside other programs, and print a table.

NANOCHAT_DIR=CHECKOUT python -m bench.preparation --source=DIR --vocab_size=4096

All programs read the same documents from .parquet, with one tokenizer, and encode them. Each runs in a process of its
own, and they take turns. Processor seconds are those of the process and of the processes that it started, after its
imports. Below the table stand the programs that cannot run here. nanochat needs NANOCHAT_DIR, `rustbpe` and `torch`.
"""

import multiprocessing
import os
import resource
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet

from data.prepare.encoding import tiktoken_of
from data.prepare.listing import find_corpus
from data.prepare.preparation import Preparation, prepare
from data.tokenizer import load_tokenizer
from options.command_line import parse_arguments
from options.schema import DataConfig, FilePath, MeshConfig, Positive

GROUP_ROWS = 1024  # documents in a group of a .parquet, as in nanochat's files
BATCH = (1, 32, 2048)  # micro-batches, rows, tokens of a row
WARMUP_BATCHES = 3
Run = Callable[[], object]


@dataclass(frozen=True)
class Arguments:
    """Preparation and loading beside other programs."""

    source: FilePath = "stdlib"
    """Raw text: a file, a folder or `stdlib`."""
    vocab_size: Positive[int] = 4096
    """Size of the tokenizer's vocabulary."""
    workers: tuple[Positive[int], ...] = (1, 2)
    """Processes that prepare text; threads of nanochat and of `tokenizers`."""
    rounds: Positive[int] = 3
    """Runs of each program. The median is printed."""
    batches: Positive[int] = 50
    """Batches to load: of 32 rows of 2,048 tokens."""


class Text(NamedTuple):
    """A folder with the text, as nanochat has its own, and a prepared dataset of it."""

    folder: Path

    @property
    def parquet(self) -> Path:
        return self.folder / "base_data_climbmix"

    @property
    def prepared(self) -> Path:
        return self.folder / "prepared"

    @property
    def tokenizer(self) -> Path:
        return self.prepared / "tokenizer"

    def new(self) -> Path:
        """Return the path of a new folder."""
        return Path(tempfile.mkdtemp(dir=self.folder)) / "new"


class Program(NamedTuple):
    """What runs in a process of its own."""

    name: str
    amount: float
    unit: str
    ready: Callable[..., Run]
    """Imports what it needs, and returns what is measured."""
    arguments: tuple[Any, ...]


def write_text(source: str, text: Text) -> float:
    """Write the source's documents as .parquet, all but one to the first file: the last is nanochat's held-out text.
    Return their megabytes."""
    corpus = find_corpus(source, on_error="skip")
    documents = [one.text for file in corpus.files for one in corpus.documents(file) if one.text]
    text.parquet.mkdir()
    for number, some in enumerate((documents[1:], documents[:1])):
        path = text.parquet / f"shard_{number:05d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": some}), path, row_group_size=GROUP_ROWS)
    return sum(len(one.encode()) for one in documents) / 1e6


def tokensum(text: Text, workers: int, vocab_size: int) -> Run:
    """Return a call of data.prepare. With a `vocab_size`, it trains a tokenizer."""
    tokenizer = "" if vocab_size else str(text.tokenizer)
    settings = Preparation(source=str(text.parquet), tokenizer=tokenizer, vocab_size=vocab_size or 4096)
    return lambda: prepare(settings, text.new(), workers=workers)


def nanochat_tokenizer(text: Text) -> Any:
    """Return nanochat's tokenizer, with our tokens. Raise ImportError without a checkout of nanochat."""
    sys.path.insert(0, os.environ.get("NANOCHAT_DIR", ""))
    os.environ["NANOCHAT_BASE_DIR"] = str(text.folder)
    return import_module("nanochat.tokenizer").RustBPETokenizer(tiktoken_of(load_tokenizer(text.tokenizer)), "<|bos|>")


def nanochat(text: Text, workers: int, vocab_size: int) -> Run:
    """Return what nanochat does with all text before it makes rows: it reads and encodes it, as its loader does, and
    writes nothing. With a `vocab_size`, its scripts/tok_train.py goes before, which takes 10,000 letters of each
    document."""
    tokenizer = nanochat_tokenizer(text)
    batches = import_module("nanochat.dataset").parquets_iter_batched

    def run() -> None:
        if vocab_size:
            sys.argv = ["tok_train", f"--vocab-size={vocab_size}"]
            runpy.run_module("scripts.tok_train", run_name="__main__")
        bos = tokenizer.get_bos_token_id()
        for texts in batches("train"):
            for first in range(0, len(texts), 128):  # the loader's `tokenizer_batch_size`
                tokenizer.encode(texts[first : first + 128], prepend=bos, num_threads=workers)

    return run


def hugging_face(text: Text, workers: int, vocab_size: int) -> Run:
    """Return a `datasets.map` with the library `tokenizers`, with threads as workers. It writes Arrow."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(workers), "HF_HUB_OFFLINE": "1"}
    datasets = import_module("datasets")
    datasets.disable_progress_bars()
    tokenizer = load_tokenizer(text.tokenizer)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": tokenizer.encode(batch["text"])}

    def run() -> None:
        files = [str(path) for path in sorted(text.parquet.iterdir())]
        rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(text.new()))
        rows.map(encode, batched=True, remove_columns=["text"])

    return run


def datatrove(text: Text, workers: int, vocab_size: int) -> Run:
    """Return a pipeline of datatrove, which writes one stream of tokens."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    execute = import_module("datatrove.executor").LocalPipelineExecutor
    read = import_module("datatrove.pipeline.readers").ParquetReader
    write = import_module("datatrove.pipeline.tokens").DocumentTokenizer

    def run() -> None:
        tokenizer = str(text.tokenizer / "tokenizer.json")
        steps = [read(str(text.parquet)), write(str(text.new()), tokenizer_name_or_path=tokenizer)]
        execute(steps, tasks=workers, workers=workers, logging_dir=str(text.new())).run()

    return run


def loading(batches: Iterator[Any], count: int) -> Run:
    """Return the loading of `count` batches, after some that are not measured."""

    def load(some: int) -> None:
        for _ in range(some):
            next(batches)

    load(WARMUP_BATCHES)
    return lambda: load(count)


def tokensum_rows(text: Text, packing: Literal["stream", "best_fit"], count: int) -> Run:
    """Return the loading of a prepared dataset's batches onto the first device, as a run does it."""
    import jax

    from data.dataset import open_text
    from data.loader import StepBatches, train_batches
    from training.mesh import batch_sharding, make_mesh

    config = DataConfig(source=str(text.prepared), packing=packing)
    _, rows, length = BATCH
    opened = open_text(config, load_tokenizer(text.tokenizer).vocab_size, length, rows, text.new())
    batches = StepBatches(opened.train, opened.mixture, 0, BATCH, np.arange(rows))
    sharding = batch_sharding(make_mesh(MeshConfig(), jax.devices()[:1]))
    return loading(train_batches(batches, sharding, config.workers), count)


def nanochat_rows(text: Text, count: int) -> Run:
    """Return the loading of batches by nanochat's loader, which encodes the text."""
    tokenizer = nanochat_tokenizer(text)
    load = import_module("nanochat.dataloader").tokenizing_distributed_data_loader_bos_bestfit
    _, rows, length = BATCH
    batches = load(tokenizer, rows, length, "train", device="cpu")
    return loading(batches, count)


def programs(text: Text, megabytes: float, arguments: Arguments) -> Iterator[Program]:
    """Yield the programs, in the order of the table."""
    for workers in arguments.workers:
        for ready in (tokensum, nanochat, hugging_face, datatrove):
            name = f"{ready.__name__}: tokens, {workers} worker(s)"
            yield Program(name, megabytes, "MB", ready, (text, workers, 0))
        for ready in (tokensum, nanochat):
            name = f"{ready.__name__}: tokenizer and tokens, {workers} worker(s)"
            yield Program(name, megabytes, "MB", ready, (text, workers, arguments.vocab_size))
    rows = BATCH[1] * arguments.batches
    for packing in ("stream", "best_fit"):
        yield Program(f"tokensum: rows, {packing}", rows, "rows", tokensum_rows, (text, packing, arguments.batches))
    yield Program("nanochat: rows", rows, "rows", nanochat_rows, (text, arguments.batches))


def seconds_so_far() -> tuple[float, float]:
    """Return the time, and the processor seconds of this process and of those that it started and that ended."""
    used = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(one.ru_utime + one.ru_stime for one in used)


def measure(ready: Callable[..., Run], *arguments: Any) -> tuple[float, float]:
    """Return the seconds and the processor seconds of what `ready` returns. What it prints goes to stderr."""
    os.dup2(2, 1)
    run = ready(*arguments)
    begun = seconds_so_far()
    run()
    ended = seconds_so_far()
    return ended[0] - begun[0], ended[1] - begun[1]


def measured(program: Program) -> tuple[float, float]:
    """Return what `measure` returns in a new process. Raise ImportError if the program is not on this machine."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, program.ready, *program.arguments).result()


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    seconds: dict[Program, list[tuple[float, float]]] = {}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        text = Text(Path(name))
        megabytes = write_text(arguments.source, text)
        prepare(Preparation(source=str(text.parquet), vocab_size=arguments.vocab_size), text.prepared)
        for _ in range(arguments.rounds):
            for program in programs(text, megabytes, arguments):
                try:
                    seconds.setdefault(program, []).append(measured(program))
                except ImportError as error:
                    missing[program.name] = str(error)
    print(f"{megabytes:.1f} MB of text; medians of {arguments.rounds} runs in turn\n")
    print("| | unit | a second | a processor second |\n| --- | --- | --- | --- |")
    for program, runs in seconds.items():
        if runs:
            rates = [program.amount / statistics.median(column) for column in zip(*runs)]
            print(f"| {program.name} | {program.unit} | {' | '.join(f'{rate:,.4g}' for rate in rates)} |")
    for name, problem in missing.items():
        print(f"\nnot here: {name} ({problem})", end="")
    print()
    return 0


if __name__ == "__main__":
    from hosts.runtime import run_command

    run_command(main)

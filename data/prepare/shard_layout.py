"""Making a dataset's shards in processes, each task independently and in any order. The dataset takes them in the
source's order."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import wait as wait_for
from pathlib import Path

import numpy as np
from jaxtyping import Bool, UInt64

from configs.files import write_whole
from configs.messages import progress
from configs.schema import UserError
from data.prepare.corpus import Corpus
from data.prepare.parts import HASH_BYTES, Recipe, Task, encode_texts, hash_texts, make_tasks
from data.prepare.source_files import SourceFile


def write_record(folder: Path, facts: dict) -> None:
    """Write a dataset's record atomically."""
    write_whole(folder / "dataset.json", json.dumps(facts, indent=1))


def make_shards(recipe: Recipe, corpus: Corpus, files: list[SourceFile], facts: dict, workers: int) -> None:
    """Make the missing shards of a dataset with `workers` processes. `facts` is the record: shards are added to it in
    order. Raise the first failure, in the source's order, when everything before it is complete."""
    shards = facts["shards"]
    while shards and "until" not in shards[-1]:
        shards.pop()  # from a task that lost a shard
    start = tuple(shards[-1]["until"]) if shards else (0, 0)
    if recipe.deduplicate:  # a shard depends on the documents of all tasks
        tasks = _with_duplicates(make_tasks(recipe, corpus, files), workers)[start[0] :]
    else:
        tasks = make_tasks(recipe, corpus, files, start)
    _work(encode_texts, tasks, workers, lambda made: _take(made, recipe.folder, facts))


def _with_duplicates(tasks: list[Task], workers: int) -> list[Task]:
    """Return the tasks, each with the duplicates among its documents. A task ends at its number, not at a file."""
    hashes: list[np.ndarray] = []
    read = lambda made: hashes.append(np.fromfile(made, np.uint64).reshape(-1, HASH_BYTES // 8))
    _work(hash_texts, tasks, workers, read)
    ends = np.cumsum([len(one) for one in hashes])
    again = np.split(find_duplicates(np.concatenate(hashes)), ends[:-1])
    return [replace(task, end=(i, 0), duplicates=one) for i, (task, one) in enumerate(zip(tasks, again), 1)]


def find_duplicates(hashes: UInt64[np.ndarray, "documents 2"]) -> Bool[np.ndarray, "documents"]:
    """Return for each document whether an earlier one has its hash. This takes about 80 bytes for each."""
    order = np.lexsort(hashes.T)  # stable: equal hashes stay in order
    again = np.zeros(len(hashes), bool)
    again[order[1:]] = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
    return again


def _take(made: Path, folder: Path, facts: dict) -> None:
    """Take a task's shards into the dataset's folder."""
    shards = facts["shards"]
    for entry in json.loads((made / "entries.json").read_bytes()):
        sides = entry.keys() & {"train", "val"}
        if shards and not sides:  # it has no document
            shards[-1] |= entry | {"skipped": Counter(shards[-1]["skipped"]) + Counter(entry["skipped"])}
            continue
        for side in sides:
            file = made / entry[side]["file"]
            entry[side]["file"] = f"{side}_{len(shards):06d}.bin"
            for suffix in (".starts.npy", ".blocks", ".bin"):
                file.with_suffix(suffix).rename((folder / entry[side]["file"]).with_suffix(suffix))
        shards.append(entry)
    write_record(folder, facts)
    shutil.rmtree(made)


def _work(
    make: Callable[[Task, Path], None], tasks: Sequence[Task], workers: int, take: Callable[[Path], None]
) -> None:
    """Call `make` for each task in up to `workers` processes, or in this one, and take what it makes in order. Raise
    the first failure, once the outputs before it are taken."""
    paths = [task.recipe.parts / f"{make.__name__}-{number}" for number, task in enumerate(tasks)]
    bar = progress(total=sum(task.size for task in tasks), unit="B", unit_scale=True, desc="preparing")
    with bar, _processes(min(workers, len(tasks))) as run:
        for task, path, _ in zip(tasks, paths, run(make, tasks, paths)):
            take(path)
            bar.update(task.size)


@contextmanager
def _processes(count: int) -> Iterator[Callable[..., Iterable]]:
    """Give a `map` that calls in several processes, or one after the other in this one."""
    if count < 2:
        yield map
        return
    context = multiprocessing.get_context("spawn")  # JAX and its threads may be in this process
    pool = ProcessPoolExecutor(count, context, _start_worker)
    try:
        yield pool.map
    except BrokenProcessPool as error:
        raise UserError(
            "a worker was killed, as for want of memory, or crashed; the same command continues: with fewer "
            "--workers it needs less memory"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Ignore Ctrl-C in a worker, and end it with the command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent

    def follow() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()

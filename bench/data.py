"""Measure the data path: python -m bench.data. Print one JSON line with the rates of prepare, plan and loader.

The loader is measured at d12's shapes (256 rows of 2048 tokens a step, two reading threads), from a warm page cache to
arrays on the device. The plan is measured on documents of log-normal length (median 400 tokens, as web text).

`--only=scale` simulates a preparation of 1 TB by sizes, and measures memory and seconds of each of its phases.
"""

import json
import multiprocessing
import os
import pickle
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from configs.command_line import parse_arguments
from configs.schema import BatchConfig, DataConfig, MeshConfig, Positive
from data.dataset_folder import PLANNED, open_dataset
from data.loader import StepBatches, local_rows, train_batches
from data.mixture import Mixture, Stage
from data.packing import Plan, join_plans, load_plan, plan_rows, save_plan
from data.prepare.corpus import Corpus
from data.prepare.parts import Recipe, Task, make_tasks, write_part
from data.prepare.preparation import Preparation, prepare
from data.prepare.shard_layout import layouts_of
from data.prepare.source_files import SourceFile
from hosts.runtime import run_command
from training.mesh import batch_shape, batch_sharding, make_mesh


@dataclass(frozen=True)
class Arguments:
    """Speed of the data path, as one JSON line."""

    source: str = "stdlib"
    """Raw text to prepare."""
    vocab_size: Positive[int] = 4096
    """Vocabulary size of the tokenizer, which is trained on the text first, untimed."""
    documents: Positive[int] = 2_000_000
    """Documents to plan, or to simulate."""
    files: Positive[int] = 300_000
    """Files to simulate."""
    steps: Positive[int] = 20
    """Steps to load."""
    only: Literal["", "scale"] = ""
    """Measure this instead."""


def rates(arguments: Arguments, folder: Path) -> dict[str, Any]:
    """Return the rates of prepare, plan and loader, per second or minute."""
    settings = Preparation(source=arguments.source, vocab_size=arguments.vocab_size, on_error="skip")
    prepare(settings, folder / "first")
    tokenizer = str(folder / "first" / "tokenizer")
    start = time.perf_counter()
    prepare(Preparation(source=arguments.source, tokenizer=tokenizer, on_error="skip"), folder / "second")
    seconds = time.perf_counter() - start
    dataset = open_dataset(str(folder / "second"), DataConfig(), arguments.vocab_size, folder / "cache")
    tokens = sum(len(dataset.stream(part)) for part in ("train", "val"))
    result: dict[str, Any] = {"cores": os.cpu_count(), "prepare_tokens_per_second": round(tokens / seconds)}

    lengths = lengths_like_web_text(np.random.default_rng(0), arguments.documents)
    start = time.perf_counter()
    plan = plan_rows("best_fit", np.cumsum(lengths) - lengths, int(lengths.sum()), 2048)
    result["plan_documents_per_minute"] = round(60 * arguments.documents / (time.perf_counter() - start))
    result["plan_padding"] = 1 - lengths.sum() / 2048 / (len(plan.rows) - 1)

    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    shape, sharding = batch_shape(BatchConfig(rows_per_device=32), mesh), batch_sharding(mesh)
    mixture, here = Mixture([Stage(0, (Fraction(1),))], shape[2]), local_rows(shape, sharding)
    for packing in ("stream", "best_fit"):
        rows = dataset.rows("train", DataConfig(packing=packing), shape[2], folder / "cache")
        batches = train_batches(StepBatches([rows], mixture, 0, shape, here), sharding, DataConfig().workers)
        jax.block_until_ready([next(batches) for _ in range(3)])  # the page cache is warm, the threads run
        start = time.perf_counter()
        for batch in islice(batches, arguments.steps):
            jax.block_until_ready(batch)
        seconds = time.perf_counter() - start
        result[f"loader_{packing}_tokens_per_second"] = round(arguments.steps * np.prod(shape) / seconds)
    return result


def simulate(arguments: Arguments, folder: Path) -> dict[str, Any]:
    """Return seconds and peak memory (GB) of each phase of a preparation of 1 TB, deduplicated and shuffled, from sizes
    instead of text. Lengths are log-normal, one document in 166 is a duplicate, and tokens are holes in sparse
    files."""
    spawn, facts = multiprocessing.get_context("spawn"), {}
    documents, files = arguments.documents, arguments.files
    for phase in (_tasks, _simulate_parts, _lay_out_one, _plan):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_peak_of, args=(theirs, phase, documents, files, folder))
        process.start()
        theirs.close()
        facts[phase.__name__.strip("_")] = ours.recv()
        process.join()
    return facts


def _peak_of(connection: Any, phase: Callable[..., dict], *arguments: Any) -> None:
    begin, before = time.perf_counter(), peak_now()
    result = phase(*arguments)
    seconds, peaks = round(time.perf_counter() - begin), [round(peak / 1e9, 2) for peak in (peak_now(), before)]
    connection.send(result | dict(zip(("GB", "of_imports"), peaks)) | {"seconds": seconds})


def peak_now() -> int:
    """Return this process's peak memory in bytes. (ru_maxrss would begin with the peak of the parent process.)"""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # pyright: ignore


def simulated_tasks(files: int, folder: Path) -> tuple[Recipe, list[Task]]:
    """Return the recipe and the tasks of a source of 1 TB."""
    recipe = Recipe(folder, "", 50_000, 0.05, None, deduplicate=True, seed=0, shard_tokens=100_000_000)
    listed = [SourceFile(f"{i:06d}.jsonl", f"/text/{i:06d}.jsonl", 10**12 // files) for i in range(files)]
    return recipe, make_tasks(recipe, Corpus("/text", listed, ""), listed)


def _tasks(documents: int, files: int, folder: Path) -> dict[str, Any]:
    _, tasks = simulated_tasks(files, folder)
    return {"tasks": len(tasks), "bytes_sent_for_a_task": max(len(pickle.dumps(task)) for task in tasks)}


def _simulate_parts(documents: int, files: int, folder: Path) -> dict[str, Any]:
    recipe, tasks = simulated_tasks(files, folder)
    (folder / "parts").mkdir()
    for task in tasks:
        simulate_part(recipe, task, documents // len(tasks))
    layouts_of(recipe, tasks)
    return {"duplicates": int(np.fromfile(folder / "parts" / "again", bool).sum())}


def simulate_part(recipe: Recipe, task: Task, documents: int) -> None:
    dice = np.random.default_rng(task.number)
    lengths = lengths_like_web_text(dice, documents)
    hashes = dice.integers(0, 2**64, (documents, 2), np.uint64)
    hashes[1::100] = hashes[:-1:100]
    write_part(task, Counter(), np.append(0, np.cumsum(lengths)), 4 * lengths, hashes[:, 0] < 2**58, hashes, None)
    os.truncate(task.out, task.out.stat().st_size + int(lengths.sum()) * recipe.dtype.itemsize)


def lengths_like_web_text(dice: np.random.Generator, documents: int) -> np.ndarray:
    return dice.lognormal(np.log(400), 1.0, documents).astype(np.int64) + 1


def _lay_out_one(documents: int, files: int, folder: Path) -> dict[str, Any]:
    recipe, tasks = simulated_tasks(files, folder)
    layouts = layouts_of(replace(recipe, deduplicate=False), tasks)
    replace(layouts[0], recipe=recipe).run()
    (entry,) = json.loads((layouts[0].out / "entries.json").read_bytes())
    return {"shards": len(layouts), "tokens": entry["train"]["tokens"] + entry["val"]["tokens"]}


def _plan(documents: int, files: int, folder: Path) -> dict[str, Any]:
    def plans() -> Iterator[tuple[int, Plan]]:
        begin = 0
        for first in range(0, documents, PLANNED):
            lengths = lengths_like_web_text(np.random.default_rng(first), min(PLANNED, documents - first))
            yield begin, plan_rows("best_fit", np.cumsum(lengths) - lengths, int(lengths.sum()), 2048)
            begin += int(lengths.sum())

    save_plan(join_plans(plans()), folder / "plan")
    return {"rows": len(load_plan(folder / "plan").rows) - 1}


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    with tempfile.TemporaryDirectory() as name:
        measure = simulate if arguments.only == "scale" else rates
        print(json.dumps(measure(arguments, Path(name))))
    return 0


if __name__ == "__main__":
    run_command(main)

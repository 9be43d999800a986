"""Assembly of a dataset's shards. Their jobs end in any order; the dataset takes shards in the source's order."""

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from configs.files import write_whole
from configs.messages import progress
from data.prepare.corpus import Corpus
from data.prepare.engines import Engine
from data.prepare.parts import Recipe, Task, make_tasks
from data.prepare.shard_layout import Layout, layouts_of
from data.prepare.source_files import SourceFile


def write_record(folder: Path, facts: dict) -> None:
    """Write a dataset's record atomically."""
    write_whole(folder / "dataset.json", json.dumps(facts, indent=1))


def make_shards(
    recipe: Recipe, corpus: Corpus, files: list[SourceFile], facts: dict, open_engine: Callable[[int], Engine]
) -> None:
    """Make the missing parts of a dataset, on the engine that `open_engine` returns for a number of tasks. `facts` is
    the record: shards are added to it in order. Raise the first failure, in the source's order, when everything before
    it is complete."""
    shards, parts = facts["shards"], recipe.folder / "parts"
    while shards and "until" not in shards[-1]:
        shards.pop()  # from a task that lost a shard
    start = tuple(shards[-1]["until"]) if shards else (0, 0)
    at_once = recipe.seed is None and not recipe.deduplicate  # a shard depends on no document of another task
    tasks = make_tasks(recipe, corpus, files, start if at_once else (0, 0))
    parts.mkdir(exist_ok=True)
    for left in parts.iterdir():  # left by killed processes
        if left != recipe.excluded and not re.fullmatch(r"[0-9a-f]{32}(\.\d+-\d+)?", left.name):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    engine = open_engine(len(tasks))
    try:
        if at_once:
            layouts = [Layout(recipe, task, [task.out.name], 0, 0, 1, task.end) for task in tasks]
        else:
            _work(engine, tasks, lambda task: None)
            layouts = layouts_of(recipe, tasks)[start[0] :]
        _work(engine, layouts, lambda layout: _take(layout, facts))
    finally:
        engine.close()


def _take(layout: Layout, facts: dict) -> None:
    """Take the shards of a layout into the dataset, or complete an earlier attempt."""
    folder, shards = layout.recipe.folder, facts["shards"]
    for entry in json.loads((layout.out / "entries.json").read_bytes()):
        if shards and not entry.keys() & {"train", "val"}:  # it has no document
            shards[-1] |= entry | {"skipped": Counter(shards[-1]["skipped"]) + Counter(entry["skipped"])}
            continue
        for side in entry.keys() & {"train", "val"}:
            made = layout.out / entry[side]["file"]
            entry[side]["file"] = f"{side}_{len(shards):06d}.bin"
            for suffix in (".starts.npy", ".blocks", ".bin"):
                if made.with_suffix(suffix).exists():
                    made.with_suffix(suffix).rename((folder / entry[side]["file"]).with_suffix(suffix))
        shards.append(entry)
    write_record(folder, facts)
    shutil.rmtree(layout.out)


def _work(engine: Engine, jobs: Sequence[Layout] | Sequence[Task], take: Callable) -> None:
    """Run the jobs whose output is missing, and take their outputs in order. Raise the first failure."""
    numbers, failed, done = {id(job): i for i, job in enumerate(jobs)}, {}, 0
    complete = {i for i, job in enumerate(jobs) if job.out.exists()}
    engine.submit(*(job for i, job in enumerate(jobs) if i not in complete))
    with progress(total=sum(job.size for job in jobs), unit="B", unit_scale=True, desc="encoding") as bar:
        while True:
            while done in complete:
                take(jobs[done])
                bar.update(jobs[done].size)
                done += 1
            if engine.is_idle:
                break
            for ended in engine.wait():
                number = numbers[id(ended.job)]
                if isinstance(ended.error, OSError):
                    raise ended.error
                if ended.error is None:
                    complete.add(number)
                else:
                    failed[number] = ended.error
                    print(f"task {number + 1} of {len(jobs)} failed: {ended.error}", file=sys.stderr)
                    engine.drop(lambda job: numbers[id(job)] > min(failed))
    if failed:
        raise failed[min(failed)]

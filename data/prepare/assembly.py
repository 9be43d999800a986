"""A dataset being made: its jobs end in any order, and their shards are taken into it in the source's."""

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from configs.files import write_whole
from configs.progress import progress
from configs.schema import UserError
from data.prepare.corpus import Corpus
from data.prepare.engines import Engine
from data.prepare.parts import Recipe, Task, make_tasks
from data.prepare.shard_layout import Layout, layouts_of
from data.prepare.source_files import SourceFile
from data.tokenizer import TextTokenizer


def write_record(record: Path, facts: dict) -> None:
    write_whole(record, json.dumps(facts, indent=1))


class Making:
    """What is still missing of a dataset, and how it is made. `facts` is what dataset.json says: shards are added to it
    in their order, when they are whole."""

    def __init__(
        self,
        corpus: Corpus,
        files: list[SourceFile],
        tokenizer: TextTokenizer,
        facts: dict,
        folder: Path,
        excluded: Path | None,
    ):
        """UserError where an earlier version, which divided the source in another way, made the first shards."""
        made_from, self.shards = facts["made_from"], facts["shards"]
        if self.shards and "end" in self.shards[0]:
            raise UserError(f"{folder} was begun by an earlier version; delete it, or choose another --out")
        while self.shards and "until" not in self.shards[-1]:
            self.shards.pop()  # of a task that has lost a shard
        seed, deduplicate = made_from.get("shuffle"), made_from.get("deduplicate", False)
        self.at_once = seed is None and not deduplicate
        """Whether a shard depends on no document of another task."""
        self.facts, self.folder, shard_tokens = facts, folder, made_from["shard_tokens"]
        about = tokenizer.sha256, tokenizer.vocab_size, facts["val_threshold"], excluded
        self.recipe = Recipe(folder, *about, deduplicate, seed, shard_tokens)
        self.start = tuple(self.shards[-1]["until"]) if self.shards else (0, 0)
        self.tasks = make_tasks(self.recipe, corpus, files, self.start if self.at_once else (0, 0))

    def run(self, engine: Engine) -> None:
        """Make it. The first failure, in the order of the source, is raised when all before it is whole."""
        parts = self.folder / "parts"
        parts.mkdir(exist_ok=True)
        for left in parts.iterdir():  # by processes that were killed
            if left != self.recipe.excluded and not re.fullmatch(r"[0-9a-f]{32}(\.\d+-\d+)?", left.name):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        if self.at_once:
            layouts = [Layout(self.recipe, task, [task.out.name], 0, 0, 1, task.end) for task in self.tasks]
        else:
            _work(engine, self.tasks, lambda task: None)
            layouts = layouts_of(self.recipe, self.tasks)[self.start[0] :]
        _work(engine, layouts, self._take)

    def _take(self, layout: Layout) -> None:
        """Take the shards of a layout into the dataset. Where that was begun before, it is completed."""
        for entry in json.loads((layout.out / "entries.json").read_bytes()):
            if self.shards and not entry.keys() & {"train", "val"}:  # it has no document
                last = self.shards[-1]
                last |= entry | {"skipped": Counter(last["skipped"]) + Counter(entry["skipped"])}
                continue
            for side in entry.keys() & {"train", "val"}:
                made = layout.out / entry[side]["file"]
                entry[side]["file"] = f"{side}_{len(self.shards):06d}.bin"
                for suffix in (".starts.npy", ".blocks", ".bin"):
                    if made.with_suffix(suffix).exists():
                        made.with_suffix(suffix).rename((self.folder / entry[side]["file"]).with_suffix(suffix))
            self.shards.append(entry)
        write_record(self.folder / "dataset.json", self.facts)
        shutil.rmtree(layout.out)


def _work(engine: Engine, jobs: Sequence[Layout] | Sequence[Task], take: Callable) -> None:
    """Run the jobs whose output is missing, and take each in turn when those before it are taken. Raise the first
    failure."""
    numbers, failed, done = {id(job): i for i, job in enumerate(jobs)}, {}, 0
    whole = {i for i, job in enumerate(jobs) if job.out.exists()}
    engine.submit(*(job for i, job in enumerate(jobs) if i not in whole))
    with progress(total=sum(job.size for job in jobs), unit="B", unit_scale=True, desc="encoding") as bar:
        while True:
            while done in whole:
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
                    whole.add(number)
                else:
                    failed[number] = ended.error
                    print(f"task {number + 1} of {len(jobs)} failed: {ended.error}", file=sys.stderr)
                    engine.drop(lambda job: numbers[id(job)] > min(failed))
    if failed:
        raise failed[min(failed)]

"""A dataset being made: tasks are encoded in any order, and shards laid out as soon as all before them is there."""

import json
import shutil
import sys
from bisect import bisect_right
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from configs.files import write_whole
from data.corpus import Corpus
from data.engines import Ended, Engine
from data.layout import Cutter, Frame, Layout, Placed, Position, Shard
from data.parts import Part, Task, make_tasks
from data.records import SourceFile
from data.tokenizer import TextTokenizer


def write_record(record: Path, facts: dict) -> None:
    write_whole(record, json.dumps(facts, indent=1))


class Making:
    """What is still missing of a dataset, and how it is made. `facts` is what dataset.json says: shards are added to it
    in their order, each when it is whole."""

    def __init__(
        self,
        corpus: Corpus,
        files: list[SourceFile],
        tokenizer: TextTokenizer,
        facts: dict,
        folder: Path,
        excluded: Path | None,
    ):
        made_from, shards = facts["made_from"], facts["shards"]
        self.seed, self.deduplicate = made_from.get("shuffle"), made_from.get("deduplicate", False)
        self.at_once = self.seed is None and not self.deduplicate
        """Whether a shard depends on no document behind it."""
        self.corpus, self.facts, self.folder = corpus, facts, folder
        self.frame = Frame(corpus, folder, tokenizer.vocab_size, facts["val_threshold"])
        self.parts_folder = folder / "parts"
        self.start = Position(*shards[-1]["end"]) if shards and self.at_once else Position(0, 0)
        every = make_tasks(corpus, files, folder, tokenizer.sha256, excluded)
        self.tasks = [task for task in every if task.spans[-1].file >= self.start.file]
        self.cutter = Cutter(made_from["shard_tokens"], len(shards) if self.at_once else 0)
        self.counts: Counter = Counter()  # of each file: documents in the tasks that are placed
        self.placed = 0  # tasks whose documents were given their places, or had them already
        self.whole: list[tuple] = []  # documents that are laid out when all are there
        self.finished: dict[int, tuple[Shard, Ended]] = {}  # shards that wait for one before
        self.failed: dict[int, Exception] = {}
        while self.placed < len(self.tasks) and (spans := self._used_up(self.tasks[self.placed])):
            self._place_spans(self.tasks[self.placed], spans)
            self.placed += 1

    def run(self, engine: Engine) -> None:
        """Makes it. The first failure, in the order of the source, is raised when all before it is whole."""
        self.parts_folder.mkdir(exist_ok=True)
        for left in self.parts_folder.iterdir():  # by processes that were killed
            if left.is_dir():
                shutil.rmtree(left)
            elif left.suffix not in ("", ".done"):
                left.unlink()
        missing = [task for task in self.tasks[self.placed :] if not task.part.exists()]
        numbers = {id(task): number for number, task in enumerate(self.tasks)}
        engine.submit(*missing)
        total = sum(task.size for task in self.tasks)
        there = total - sum(task.size for task in missing)
        bar = tqdm(total=total, initial=there, unit="B", unit_scale=True, disable=None, desc="encoding")
        self._place(engine)
        while not engine.is_idle:
            for ended in engine.wait():
                if isinstance(ended.error, OSError):
                    raise ended.error
                if isinstance(ended.job, Layout):
                    self._record(ended.job.shard, ended)
                elif ended.error:
                    number = numbers[id(ended.job)]
                    self.failed[number] = ended.error
                    print(f"task {number + 1} of {len(self.tasks)} failed: {ended.error}", file=sys.stderr)
                    engine.drop(lambda job: numbers.get(id(job), -1) > min(self.failed))
                elif isinstance(ended.job, Task):
                    bar.update(ended.job.size)
            bar.set_postfix_str(f"{len(self.facts['shards'])} shards", refresh=False)
            self._place(engine)
        bar.close()
        if self.failed:
            raise self.failed[min(self.failed)]

    def _used_up(self, task: Task) -> list[int] | None:
        """The spans of a task all of whose documents are in shards, and whose part is deleted."""
        if not task.done.exists():
            return None
        spans = json.loads(task.done.read_bytes())
        file = task.spans[-1].file
        alone = sum(documents for span, documents in zip(task.spans, spans) if span.file == file)
        return spans if Position(file, self.counts[file] + alone) <= self.start else None

    def _place_spans(self, task: Task, spans: list[int]) -> Placed:
        files, documents = [span.file for span in task.spans], []
        for file, count in zip(files, spans):
            documents.append(self.counts[file])
            self.counts[file] += count
        return Placed(task.part, files, documents)

    def _place(self, engine: Engine) -> None:
        """Gives the documents of the next tasks whose parts are there their places, and has full shards laid out."""
        begun = self.placed
        while self.placed < len(self.tasks) and self.tasks[self.placed].part.exists():
            number, task = self.placed, self.tasks[self.placed]
            part = self.frame.part(task.part)
            placed, index = self._place_spans(task, part.spans), np.arange(len(part.lengths))
            self.cutter.parts[number], self.placed = placed, number + 1
            which, lengths = np.full(len(index), number), np.array(part.lengths)
            if not self.at_once:
                hashes = part.hashes if self.deduplicate else part.hashes[:0]
                self.whole.append((which, index, lengths, hashes, part.problems))
                continue
            # Documents up to the start are in shards already.
            first = bisect_right(range(len(index)), self.start, key=partial(_end_after, part, placed, 0))
            problems = {i - first: problem for i, problem in part.problems.items() if i >= first}
            end_after = partial(_end_after, part, placed, first)
            self._cut(engine, which[first:], index[first:], lengths[first:], problems, end_after)
        if self.placed == len(self.tasks) and (begun < self.placed or not self.tasks):
            if self.whole:
                self._cut_whole(engine)
            if not self.cutter.is_empty:
                self._lay_out(engine, self.cutter.close())

    def _cut_whole(self, engine: Engine) -> None:
        """Places all documents: without those that were there before, in the order that the seed gives."""
        columns = [np.concatenate(arrays) for arrays in list(zip(*self.whole))[:4]]
        which, index, lengths, hashes = columns
        firsts = np.cumsum([0, *(len(one[0]) for one in self.whole)])
        problems = {int(first) + i: text for first, one in zip(firsts, self.whole) for i, text in one[4].items()}
        if self.deduplicate:
            real = np.flatnonzero(lengths)
            again = np.setdiff1d(real, real[np.unique(hashes[real], return_index=True)[1]])
            lengths[again] = 0
            problems |= dict.fromkeys(again.tolist(), "a duplicate")
        order = np.arange(len(which))
        if self.seed is not None:  # the raw stream of PCG64 is the same in every numpy
            order = np.argsort(np.random.PCG64(self.seed).random_raw(len(which)), kind="stable")
        places = np.argsort(order, kind="stable")
        problems = {int(places[i]): problem for i, problem in problems.items()}
        end = Position(self.facts["files"], 0)
        self._cut(engine, which[order], index[order], lengths[order], problems, lambda _: end)

    def _cut(self, engine: Engine, *documents: Any) -> None:
        for shard in self.cutter.add(*documents):
            self._lay_out(engine, shard)

    def _lay_out(self, engine: Engine, shard: Shard) -> None:
        if shard.number >= len(self.facts["shards"]):  # else it is there
            engine.submit(Layout(self.frame, shard), first=True)

    def _record(self, shard: Shard, ended: Ended) -> None:
        """Takes a shard's files into the dataset, when those before it are."""
        self.finished[shard.number] = shard, ended
        shards = self.facts["shards"]
        while len(shards) in self.finished:
            shard, ended = self.finished.pop(len(shards))
            if ended.error:
                raise ended.error
            made, entry = ended.result
            for path in made.iterdir():
                path.replace(self.folder / path.name)
            made.rmdir()
            shards.append(entry)
            write_record(self.folder / "dataset.json", self.facts)
            if self.at_once and len(shard.which):
                self._use_up(int(shard.which.max()))

    def _use_up(self, number: int) -> None:
        """Deletes the parts before this one, but for what tells where the documents behind them stand."""
        for i in [i for i in self.cutter.parts if i < number]:
            task = self.tasks[i]
            del self.cutter.parts[i]
            write_whole(task.done, json.dumps(self.frame.part(task.part).spans))
            task.part.unlink()


def _end_after(part: Part, placed: Placed, first: int, place: int) -> Position:
    """The position behind a part's document, counted from its document `first` on."""
    i = first + place
    span = int(np.searchsorted(part.firsts, i, "right")) - 1
    return Position(placed.files[span], placed.documents[span] + i + 1 - int(part.firsts[span]))

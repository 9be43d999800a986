"""What bench.data measures of data.prepare: encoding beside others', two cores, kills, memory."""

import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from configs.schema import UserError
from data.dataset import PLANNED
from data.packing import Plan, join_plans, load_plan, plan_rows, save_plan
from data.prepare.corpus import Corpus, find_corpus
from data.prepare.encoding import tiktoken_of
from data.prepare.parts import Recipe, Task, make_tasks, write_part
from data.prepare.preparation import Preparation, Where, prepare
from data.prepare.shard_layout import layouts_of
from data.prepare.source_files import SourceFile
from data.tokenizer import load_tokenizer, train_tokenizer

ROOT = Path(__file__).parents[1]
LARGE = 200_000_000  # bytes of a document
DRIVER = """
import sys
from pathlib import Path
import data.prepare.parts
from data.prepare.preparation import Preparation, Where, prepare
data.prepare.parts.TASK_BYTES = eval(sys.argv[1])
prepare(Preparation(**eval(sys.argv[2])), Path(sys.argv[3]), where=Where(workers=2))
"""


def write_text(source: str, megabytes: float, path: Path) -> list[str]:
    """Some MB of documents of `source`, again from the first where it has fewer, also as the lines of one .jsonl."""
    corpus, texts, left = find_corpus(source, on_error="skip"), [], megabytes * 1e6
    for document in (document for file in itertools.cycle(corpus.files) for document in corpus.documents(file)):
        if left <= 0:
            break
        if document.text:
            texts.append(document.text)
            left -= len(document.text.encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def encoding(source: str, megabytes: float, vocab_size: int, nanochat: str, folder: Path) -> dict[str, Any]:
    """Processor seconds to encode one text with one vocabulary, in turn, three times: a task of ours from file to part;
    nanochat's tokenizer, as its loader calls it, on texts in memory; datatrove's pipeline, from file to file."""
    texts = write_text(source, megabytes, folder / "text" / "text.jsonl")
    train_tokenizer(iter(texts), vocab_size).save(folder / "tokenizer")
    tokenizer, corpus = load_tokenizer(folder / "tokenizer"), find_corpus(str(folder / "text"))
    (folder / "parts").mkdir()
    recipe = Recipe(folder, tokenizer.sha256, vocab_size, 0.05, None, deduplicate=False, seed=None, shard_tokens=10**8)
    tasks = make_tasks(recipe, corpus, corpus.files)

    def ours() -> None:
        for task in tasks:
            task.out.unlink(missing_ok=True)
            task.run()

    ours()  # which reads the tokenizer

    rivals: dict[str, Callable[[], Any]] = {"ours": ours}
    if nanochat:
        sys.path.insert(0, nanochat)
        enc, (bos,) = tiktoken_of(tokenizer), tokenizer.special_tokens
        theirs = importlib.import_module("nanochat.tokenizer").RustBPETokenizer(enc, bos)
        batches = [texts[i : i + 128] for i in range(0, len(texts), 128)]
        rivals["nanochat"] = lambda: [theirs.encode(batch, prepend=bos, num_threads=4) for batch in batches]
    try:
        executor = importlib.import_module("datatrove.executor").LocalPipelineExecutor
        reader = importlib.import_module("datatrove.pipeline.readers").JsonlReader
        writer = importlib.import_module("datatrove.pipeline.tokens").DocumentTokenizer
    except ImportError:
        pass
    else:

        def datatrove() -> None:
            path = str(folder / "tokenizer" / "tokenizer.json")
            steps = [reader(str(folder / "text")), writer(str(folder / "datatrove"), tokenizer_name_or_path=path)]
            executor(pipeline=steps, skip_completed=False, logging_dir=str(folder / "logs")).run()

        rivals["datatrove"] = datatrove
    size = sum(len(text.encode()) for text in texts)
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(3):
        for name, run in rivals.items():
            before = spent()
            run()
            seconds[name].append(round(spent() - before, 2))
    rates = {name: round(size / 1e6 / min(found), 2) for name, found in seconds.items()}
    return {"megabytes": round(size / 1e6, 1), "processor_seconds": seconds, "megabytes_per_second_a_core": rates}


def spent() -> float:
    """Processor seconds of this process and of those that it has waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def cores(source: str, megabytes: float, vocab_size: int, folder: Path) -> dict[str, Any]:
    """Seconds of whole commands, tokenizer given: by one worker, by two, and, as what a second core gives at all, two
    commands of one worker beside each other; in turn, twice."""
    texts = write_text(source, megabytes, folder / "text" / "text.jsonl")
    train_tokenizer(iter(texts[:2000]), vocab_size).save(folder / "tokenizer")

    def took(name: str, workers: int, commands: int) -> float:
        words = [sys.executable, "-m", "data.prepare", f"--source={folder}/text", f"--tokenizer={folder}/tokenizer"]
        outs, begin = [f"--out={folder}/{name}.{i}" for i in range(commands)], time.perf_counter()
        quiet = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started = [subprocess.Popen([*words, f"--workers={workers}", out], **quiet) for out in outs]
        if [process.wait() for process in started] != [0] * commands:
            raise UserError(f"data.prepare failed: {' '.join(words)}")
        return round(time.perf_counter() - begin, 2)

    seconds: dict[str, list[float]] = {"one worker": [], "two workers": [], "one worker, twice at once": []}
    for turn in range(2):
        for (name, found), (workers, commands) in zip(seconds.items(), ((1, 1), (2, 1), (1, 2))):
            found.append(took(f"{name}.{turn}", workers, commands))
    one, two, twice = (min(found) for found in seconds.values())
    return {"seconds": seconds, "ratio": round(one / two, 2), "ratio_of_the_machine": round(2 * one / twice, 2)}


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a folder, by its path there."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def prepare_under_fire(
    settings: Preparation, out: Path, task_bytes: int, kills: int, generator: random.Random
) -> tuple[int, str]:
    """Prepares with two workers; SIGKILL, as often as told, to a worker or to the command, at a time drawn anew, after
    one to three more files are there. Returns how many there were, and what the last command said. Fails as it does."""
    words = [sys.executable, "-c", DRIVER, repr((task_bytes, task_bytes)), repr(vars(settings)), str(out)]
    begin = lambda: subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    there = lambda: len([*out.glob("parts/*"), *out.glob("*.bin")])
    process, done = begin(), 0
    while done < kills and process.poll() is None:
        before, aim = there(), generator.randint(1, 3)
        while process.poll() is None and abs(there() - before) < aim:
            time.sleep(0.002 * generator.random())
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        except OSError:  # it has ended
            break
        if children and generator.random() < 0.5:
            os.kill(int(generator.choice(children)), signal.SIGKILL)
        else:
            process.kill()
            process.communicate()
            process = begin()
        done += 1
    said = process.communicate()[1]
    if process.returncode:
        raise UserError(f"after {done} kills a preparation ended with {process.returncode}: {said}")
    return done, said


def kills(source: str, megabytes: float, vocab_size: int, count: int, folder: Path) -> dict[str, Any]:
    """One preparation under so many kills, beside one in peace by one worker."""
    texts = write_text(source, megabytes, folder / "text" / "text.jsonl")
    train_tokenizer(iter(texts[:2000]), vocab_size).save(folder / "tokenizer")
    settings = Preparation(
        source=str(folder / "text"), tokenizer=str(folder / "tokenizer"), shard_tokens=round(megabytes * 1e6 / 40)
    )
    prepare(settings, folder / "serial", where=Where(workers=1))
    done, _ = prepare_under_fire(settings, folder / "out", round(megabytes * 1e6 / 3 / count), count, random.Random(0))
    expected = digests(folder / "serial")
    return {"kills": done, "files": len(expected), "same_bytes": digests(folder / "out") == expected}


def memory_at_scale(documents: int, files: int, folder: Path) -> dict[str, Any]:
    """Return GB of memory at the peak of each phase of a preparation of 1 TB, deduplicated and shuffled, with sizes in
    place of text: lengths are log-normal, one document in 166 is a duplicate, tokens are holes in sparse files."""
    spawn, facts = multiprocessing.get_context("spawn"), {}
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
    found = phase(*arguments)
    seconds = round(time.perf_counter() - begin)
    connection.send(
        found | {"GB": round(peak_now() / 1e9, 2), "of_imports": round(before / 1e9, 2), "seconds": seconds}
    )


def peak_now() -> int:
    """Bytes of memory of this process at its peak. ru_maxrss would begin with that of the process that started it."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # pyright: ignore


def simulated_tasks(files: int, folder: Path) -> tuple[Recipe, list[Task]]:
    """Tasks of a source of 1 TB."""
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


def large_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Files with a document of 200 MB, most with one emoji among its ASCII, so that each of its characters takes 4
    bytes in Python; and a table of 1 GB in one group of rows."""
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(1, 9))) for _ in range(5000)]
    some = " ".join(generator.choices(words, k=200_000))
    wide = some * (LARGE // len(some)) + "😀"
    (folder / "txt").mkdir()
    (folder / "txt" / "a.txt").write_text(wide)
    (folder / "txt" / "b.txt").write_text("two of them, or the one would be cut")
    yield ".txt", folder / "txt"
    (folder / "a.jsonl").write_text(json.dumps({"text": wide}, ensure_ascii=False))
    yield ".jsonl", folder / "a.jsonl"
    (folder / "b.jsonl").write_text(json.dumps({"text": wide}))
    yield ".jsonl, escaped", folder / "b.jsonl"
    (folder / "c.jsonl").write_text(json.dumps({"text": "😀 🎉 " * (LARGE // 10)}, ensure_ascii=False))
    yield ".jsonl of 4-byte characters", folder / "c.jsonl"
    with pa.output_stream(str(folder / "a.jsonl.zst"), compression="zstd") as file:
        file.write(json.dumps({"text": wide}, ensure_ascii=False).encode())
    yield ".jsonl.zst of one line", folder / "a.jsonl.zst"
    pq.write_table(pa.table({"text": ["small"] * 5000 + [wide]}), folder / "a.parquet")
    yield ".parquet, one row", folder / "a.parquet"
    many = [some[i : i + 4000] + str(i) for i in range(0, 1_000_000, 4)]
    pq.write_table(pa.table({"text": many}), folder / "b.parquet", row_group_size=len(many), compression="zstd")
    yield ".parquet, one group of rows", folder / "b.parquet"


READER = r"""
import sys
from pathlib import Path
from data.prepare.corpus import find_corpus
from data.prepare.encoding import Encoder
from data.tokenizer import load_tokenizer
encoder, corpus = Encoder(load_tokenizer(sys.argv[1])), find_corpus(sys.argv[2])
read = 0
for file in corpus.files:
    for _, text, _ in corpus.read(file):
        for window in encoder.windows(text):
            read += len(window.encode())
            if sys.argv[3] == "encoded":
                encoder.encode(window)
from bench.preparing import peak_now
print(read, peak_now())
"""


def peak_bytes(tokenizer: Path, source: Path, how: str) -> tuple[int, int]:
    """Bytes of text in a file, and of memory, at its peak, of a process that reads it as a worker does. `how`: `read`,
    or `encoded` as well."""
    words = [sys.executable, "-c", READER, str(tokenizer), str(source), how]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    read, peak = map(int, done.stdout.split())
    return read, peak


def memory(vocab_size: int, folder: Path) -> dict[str, Any]:
    """GB of memory of a worker at its peak, by kind of file."""
    train_tokenizer(write_text("stdlib", 2, folder / "text.jsonl"), vocab_size).save(folder / "tokenizer")
    kinds, paths = zip(*large_files(folder))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        peaks = threads.map(lambda path: peak_bytes(folder / "tokenizer", path, "encoded")[1], paths)
    return {kind: round(peak / 1e9, 2) for kind, peak in zip(kinds, peaks)}

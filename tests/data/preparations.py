"""Write text, kill its preparation, and read and hash the results, for the tests of data."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Integer

from configs.retry import StorageLost
from configs.schema import UserError
from data.prepare.corpus import Corpus
from data.prepare.preparation import Preparation

ROOT = Path(__file__).parents[2]
LARGE = 200_000_000  # bytes per document
DRIVER = """
import sys
from pathlib import Path
import data.prepare.parts
from data.prepare.preparation import Preparation, Where, prepare
data.prepare.parts.TASK_BYTES = eval(sys.argv[1])
prepare(Preparation(**eval(sys.argv[2])), Path(sys.argv[3]), where=Where(workers=2))
"""


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> str:
    """Write files, given by their paths in a folder. Return the folder as a source of text."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return str(folder)


def jsonl(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder, by its path there."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def prepare_under_fire(
    settings: Preparation, out: Path, task_bytes: int, kills: int, generator: random.Random
) -> tuple[int, str]:
    """Prepare with two workers and send `kills` SIGKILLs, each to a worker or the command, at random times after one to
    three more files. Return the number of kills and the last command's output. UserError if that one fails."""
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
    log = process.communicate()[1]
    if process.returncode:
        raise UserError(f"after {done} kills a preparation ended with {process.returncode}: {log}")
    return done, log


class DeadlyCorpus(Corpus):
    """A corpus with a document that kills its reader, or whose store is lost."""

    def read(self, file, start=0, stop=None):
        for number, text, problem in super().read(file, start, stop):
            if "deadly" in text:
                os.kill(os.getpid(), signal.SIGKILL)
            if "away" in text:
                raise StorageLost("the store")
            yield number, text, problem


def large_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield files with a document of 200 MB, and a table of 1 GB in one group of rows. One emoji among the ASCII of
    most makes Python store 4 bytes per character."""
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
from data.prepare.listing import find_corpus
from data.prepare.encoding import Encoder
from data.tokenizer import load_tokenizer
encoder, corpus = Encoder(load_tokenizer(sys.argv[1])), find_corpus(sys.argv[2])
read = 0
for file in corpus.files:
    for _, text, _ in corpus.read(file):
        for window in encoder.windows(text):
            read += len(window.encode())
print(read, Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


def peak_bytes(tokenizer: Path, source: Path) -> tuple[int, int]:
    """Return the bytes of text in `source`, and the peak memory in bytes of a process that reads it like a worker.
    (ru_maxrss would start at the parent's peak.)"""
    words = [sys.executable, "-c", READER, str(tokenizer), str(source)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    read, peak = map(int, done.stdout.split())
    return read, 1024 * peak


def read_shard(path: Path) -> Integer[np.ndarray, "tokens"]:
    """Return one shard's tokens."""
    magic = np.fromfile(path, "<i4", 1)
    return np.fromfile(path, "<u2" if magic == 20240520 else "<u4", offset=1024)


def tokens_of(folder: Path, part: str) -> list[Integer[np.ndarray, "tokens"]]:
    """Return the tokens of each document of `train` or `val`, from the shards and their indices."""
    pieces = []
    for path in sorted(folder.glob(f"{part}_*.bin")):
        pieces += np.split(read_shard(path), np.load(path.with_suffix(".starts.npy"))[1:])
    return pieces


def facts_of(folder: Path) -> dict:
    return json.loads((folder / "dataset.json").read_text())

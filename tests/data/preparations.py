"""Write text, kill its preparation, and read and hash the results, for the tests of data."""

import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from configs.schema import UserError
from data.prepare.preparation import Preparation

ROOT = Path(__file__).parents[2]
DRIVER = """
import sys
from pathlib import Path
import data.prepare.parts
from data.prepare.preparation import Preparation, prepare
data.prepare.parts.TASK_BYTES = eval(sys.argv[1])
prepare(Preparation(**eval(sys.argv[2])), Path(sys.argv[3]), workers=2)
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
    """Prepare with two workers and kill the command `kills` times, each after one to three more files. Return the
    number of kills and the last command's output. Raise UserError if that one fails."""
    words = [sys.executable, "-c", DRIVER, repr((task_bytes, task_bytes)), repr(vars(settings)), str(out)]
    begin = lambda: subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    there = lambda: len([*out.glob("parts/*/*"), *out.glob("*.bin")])
    process, done = begin(), 0
    while done < kills and process.poll() is None:
        before, aim = there(), generator.randint(1, 3)
        while process.poll() is None and abs(there() - before) < aim:
            time.sleep(0.002 * generator.random())
        process.kill()
        process.communicate()
        process = begin()
        done += 1
    log = process.communicate()[1]
    if process.returncode:
        raise UserError(f"after {done} kills a preparation ended with {process.returncode}: {log}")
    return done, log


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

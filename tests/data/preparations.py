"""Write text, and read and hash its datasets, for the tests of data."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Integer

from data.prepare.listing import find_corpus

ROOT = Path(__file__).parents[2]


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> str:
    """Write files, given by their paths in a folder. Return the folder as a source of text."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return str(folder)


def texts_of(source: object, **options: object) -> list[str]:
    """Return the texts of a source's documents, those without text left out."""
    corpus = find_corpus(str(source), on_error="skip", **options)
    return [document.text for file in corpus.files for document in corpus.documents(file) if document.text]


def jsonl(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder, by its path there."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


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

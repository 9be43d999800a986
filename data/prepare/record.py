"""dataset.json, the record of a preparation: what a run reads, and what a preparation needs to continue."""

import json
from pathlib import Path
from typing import NotRequired, TypedDict

import msgspec

from data.dataset_folder import damaged, load_dataset_json
from system.files import write_whole


class _Counts(TypedDict):
    documents: int
    tokens: int
    bytes: int


class _Part(_Counts):
    file: str
    sha256: str


class _Shard(TypedDict):
    """Some documents. `first` is where each reason to skip one was met first: (file, byte of its task's start, number
    from there). `until` says where the source continues: (file, byte)."""

    train: NotRequired[_Part]
    val: NotRequired[_Part]
    skipped: dict[str, int]
    first: NotRequired[dict[str, tuple[str, int, int]]]
    until: NotRequired[tuple[int, int]]


class _Tokenizer(TypedDict):
    sha256: str


class _Begun(TypedDict):
    made_from: dict[str, object]
    files: int
    shards: list[_Shard]
    complete: bool


class _WithTokenizer(_Begun):
    tokenizer: _Tokenizer
    val_threshold: float
    held_out_by: str
    """`text`: by the hash of the text, below the threshold; `file`: by file."""


class _Complete(_WithTokenizer):
    train: _Counts
    val: _Counts
    skipped: dict[str, int]


def read_dataset_json(folder: Path) -> dict:
    """Return the folder's dataset.json. Raise UserError if it cannot be read, or is not from data.prepare."""
    facts = load_dataset_json(folder)
    try:
        msgspec.convert(facts, _Begun)
        msgspec.convert(facts, _Complete if facts["complete"] else _WithTokenizer if facts["shards"] else _Begun)
    except msgspec.ValidationError as error:
        raise damaged(folder) from error
    return facts


def write_dataset_json(folder: Path, facts: dict) -> None:
    """Write a dataset's record atomically."""
    write_whole(folder / "dataset.json", json.dumps(facts, indent=1))

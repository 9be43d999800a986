"""dataset.json: the record of a dataset folder."""

import json
from pathlib import Path
from typing import NotRequired, TypedDict

import msgspec

from configs.schema import UserError


class _Counts(TypedDict):
    documents: int
    tokens: int
    bytes: int


class _Part(_Counts):
    file: str
    sha256: str


class _Shard(TypedDict):
    """Some documents. `until` says where the source continues: (file, byte)."""

    train: NotRequired[_Part]
    val: NotRequired[_Part]
    skipped: dict[str, int]
    until: NotRequired[tuple[int, int]]


class _Tokenizer(TypedDict):
    sha256: str


class _MadeFrom(TypedDict):
    conversations: NotRequired[bool]


class _Begun(TypedDict):
    made_from: _MadeFrom
    files: int
    shards: list[_Shard]
    complete: bool


class _WithTokenizer(_Begun):
    tokenizer: _Tokenizer
    val_threshold: float
    held_out_by: NotRequired[str]
    """`text`: by the hash of the text, below the threshold; `file`: by file. Missing in datasets of the first
    version."""


class _Complete(_WithTokenizer):
    train: _Counts
    val: _Counts
    skipped: dict[str, int]


def read_record(folder: Path) -> dict:
    """Return the folder's dataset.json. Raise UserError if it cannot be read, or is not from data.prepare."""
    path = folder / "dataset.json"
    try:
        facts = json.loads(path.read_bytes())
        msgspec.convert(facts, _Begun)
        msgspec.convert(facts, _Complete if facts["complete"] else _WithTokenizer if facts["shards"] else _Begun)
        return facts
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged; delete the folder {folder}, and prepare it again") from error

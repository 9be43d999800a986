"""dataset.json, the record of a dataset folder, and the hash of a text that decides if it is held out."""

import hashlib
import json
from pathlib import Path
from typing import NotRequired, TypedDict

import msgspec

from configs.retry import with_retries
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
    held_out_by: str
    """`text`: by the hash of the text, below the threshold; `file`: by file."""


class _Complete(_WithTokenizer):
    train: _Counts
    val: _Counts
    skipped: dict[str, int]


def read_record(folder: Path) -> dict:
    """Return the folder's dataset.json. Raise UserError if it cannot be read, or is not from data.prepare."""
    path = folder / "dataset.json"
    try:
        facts = json.loads(with_retries(str(path), path.read_bytes))
        msgspec.convert(facts, _Begun)
        msgspec.convert(facts, _Complete if facts["complete"] else _WithTokenizer if facts["shards"] else _Begun)
        return facts
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        why = "is damaged, or of an earlier version"
        raise UserError(f"{path} {why}; delete the folder {folder}, and prepare it again") from error


def hash_share(text: str) -> float:
    """Return a number in [0, 1) from a text. A document is held out if it is below the held-out fraction. So equal
    texts share a side in every dataset."""
    content = text.encode(errors="surrogateescape")  # a file's name may be any bytes
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64

"""dataset.json: what a dataset folder says of itself."""

import json
from pathlib import Path
from typing import Any, NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from configs.schema import UserError


class _Part(TypedDict):
    file: str
    documents: int
    tokens: int
    bytes: int
    sha256: str


class _Shard(TypedDict):
    """The documents up to the position `end`: (file, document)."""

    train: NotRequired[_Part]
    val: NotRequired[_Part]
    skipped: dict[str, int]
    end: tuple[int, int]


class _Tokenizer(TypedDict):
    sha256: str


class _Counts(TypedDict):
    documents: int
    tokens: int
    bytes: int


class _Begun(TypedDict):
    made_from: dict[str, Any]
    files: int
    shards: list[_Shard]
    complete: bool


class _WithTokenizer(_Begun):
    tokenizer: _Tokenizer
    val_threshold: float
    held_out_by: NotRequired[str]
    """`text`, whose hash falls below the threshold; it is not there if it is the name's, as it was at first."""


class _Complete(_WithTokenizer):
    train: _Counts
    val: _Counts
    skipped: dict[str, int]


def read_record(folder: Path) -> dict:
    """What the folder's dataset.json says. UserError where it cannot be read, or is not what data.prepare writes."""
    path, facts = folder / "dataset.json", {}
    try:
        facts = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        pass
    if _fits(facts, _Begun):
        stage = _Complete if facts["complete"] else _WithTokenizer if facts["shards"] else _Begun
        if _fits(facts, stage):
            return facts
    raise UserError(f"{path} is damaged; delete the folder {folder}, and prepare it again")


def _fits(value: Any, kind: Any) -> bool:
    """Whether JSON has the types of `kind`."""
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        whole = isinstance(value, dict) and kind.__required_keys__ <= value.keys()
        return whole and all(_fits(value[name], hints[name]) for name in hints.keys() & value.keys())
    inner = get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if get_origin(kind) is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(_fits, value, inner))
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(one, inner[1]) for one in value.values())
    return kind is Any or isinstance(value, kind)

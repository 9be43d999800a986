"""nanochat's tokenizer.pkl: a pickled tiktoken.Encoding, read without running what a pickle may name."""

import pickle
from pathlib import Path
from typing import Any

NAMES = {"name": str, "pat_str": str, "mergeable_ranks": dict, "special_tokens": dict}
"""The parts of an encoding's pickle, and their types."""


class _Encoding:
    """Keeps what a pickle has of a tiktoken.Encoding."""

    kept: Any = None

    def __setstate__(self, kept: object) -> None:
        self.kept = kept


class _Unpickler(pickle.Unpickler):
    """Knows an encoding and plain values. A pickle can name any function of Python, and have it called."""

    def find_class(self, module: str, name: str, /) -> type[_Encoding]:
        if (module, name) != ("tiktoken.core", "Encoding"):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no tokenizer needs")
        return _Encoding


def read_pickle(path: Path) -> tuple[dict[bytes, int], str, dict[str, int]]:
    """Return the ranks of the tokens' bytes, the expression that splits a text, and the special tokens. Raise
    ValueError, or what pickle raises, for anything else."""
    with path.open("rb") as file:
        encoding = _Unpickler(file).load()
    kept = encoding.kept if isinstance(encoding, _Encoding) else None
    if not isinstance(kept, dict) or any(not isinstance(kept.get(name), kind) for name, kind in NAMES.items()):
        raise ValueError("it is no tiktoken.Encoding")
    ranks, special = kept["mergeable_ranks"], kept["special_tokens"]
    of_types = lambda table, kind: all(isinstance(key, kind) and type(i) is int for key, i in table.items())
    if not (of_types(ranks, bytes) and of_types(special, str)):
        raise ValueError("its tokens are not bytes and numbers")
    return ranks, kept["pat_str"], special

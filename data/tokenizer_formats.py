"""Tokenizers of other formats, made a tokenizer.json: nanochat's, tiktoken's, and those of exports.

Preparation and the commands around a run take them by `find_tokenizer`. A run itself reads only a tokenizer.json.
"""

import json
import os
import pickle
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from data.tokenizer import BOS_NAMES, TextTokenizer, load_tokenizer
from system.errors import UserError

# nanochat's split (GPT-4's, with numbers of at most two digits): merges do not cross it.
SPLIT = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)
PICKLED = {"pat_str": str, "mergeable_ranks": dict, "special_tokens": dict}  # in nanochat's tokenizer.pkl, with types


def find_tokenizer(name: str | Path) -> TextTokenizer:
    """Return the tokenizer in a tokenizer.json, an export's too, or in nanochat's tokenizer.pkl, in a folder with one,
    or tiktoken's (`tiktoken:gpt2`). Raise UserError if there is none."""
    if str(name).startswith("tiktoken:"):
        return _from_tiktoken(str(name).removeprefix("tiktoken:"))
    path = Path(os.path.expanduser(name))
    if (path / "tokenizer.pkl").exists() and not (path / "tokenizer.json").exists():
        path = path / "tokenizer.pkl"
    if path.suffix != ".pkl":
        return _without_bos(load_tokenizer(name))
    try:
        return convert_tiktoken(*read_pickle(path))
    except Exception as error:  # a pickle may raise any
        raise UserError(f"{name}: no readable tokenizer in {path.name} ({error})") from error


def bos_template(tokenizer: TextTokenizer) -> str:
    """Return a post-processor that writes the BOS before a text, in tokenizer.json's format. export.py adds it."""
    bos = tokenizer.library.id_to_token(tokenizer.bos)
    one, two = f"{bos} $A", f"{bos} $A $B:1"
    template = processors.TemplateProcessing(single=one, pair=two, special_tokens=[(bos, tokenizer.bos)])
    return json.dumps(json.loads(template.__getstate__()))


def _without_bos(tokenizer: TextTokenizer) -> TextTokenizer:
    """Return the tokenizer without the post-processor that export.py added, if it has that, in any spelling: other
    programs read an export and write it anew."""
    if not (tokenizer.library.post_processor and set(BOS_NAMES) & tokenizer.special_tokens.keys()):
        return tokenizer
    facts, template = json.loads(tokenizer.json), json.loads(bos_template(tokenizer))
    match facts["post_processor"]:
        case {"type": "Sequence", "processors": [own, last]} if last == template:
            facts["post_processor"] = own
        case last if last == template:
            facts["post_processor"] = None
        case _:
            return tokenizer
    return TextTokenizer(Tokenizer.from_str(json.dumps(facts)).to_str())


def byte_level(model: models.BPE, *splits: str) -> Tokenizer:
    """Return a tokenizer that cuts text by the expressions in turn, and writes one letter per byte."""
    cuts = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([*cuts, letters]), decoders.ByteLevel()
    return tokenizer


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
    if not isinstance(kept, dict) or any(not isinstance(kept.get(name), kind) for name, kind in PICKLED.items()):
        raise ValueError("it is no tiktoken.Encoding")
    ranks, special = kept["mergeable_ranks"], kept["special_tokens"]
    of_types = lambda table, kind: all(isinstance(key, kind) and type(i) is int for key, i in table.items())
    if not (of_types(ranks, bytes) and of_types(special, str)):
        raise ValueError("its tokens are not bytes and numbers")
    return ranks, kept["pat_str"], special


def _from_tiktoken(name: str) -> TextTokenizer:
    """Return one of tiktoken's encodings as a tokenizer.json. tiktoken downloads it the first time."""
    import tiktoken  # only needed here

    try:
        encoding = tiktoken.get_encoding(name)
    except Exception as error:
        raise UserError(
            f"--tokenizer=tiktoken:{name}: tiktoken cannot give it ({error}); it knows "
            f"{', '.join(tiktoken.list_encoding_names())}, and downloads what it has not yet"
        ) from error
    return convert_tiktoken(encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens)


def convert_tiktoken(ranks: dict[bytes, int], split: str, special_tokens: dict[str, int]) -> TextTokenizer:
    """Return a tokenizer.json that encodes as tiktoken does. The tokens' ranks imply the merges."""
    letters = {byte: letter for letter, byte in byte_letters().items()}
    spell = lambda token: "".join(letters[b] for b in token)
    ordered = sorted(ranks, key=lambda token: ranks[token])
    merges = [(spell(a), spell(b)) for a, b in (merged_from(token, ranks) for token in ordered if len(token) > 1)]
    vocab = {spell(token): i for token, i in ranks.items()} | special_tokens
    # As in tiktoken, a word that is a token becomes that token, even if no merges lead to it.
    tokenizer = byte_level(models.BPE(vocab, merges, ignore_merges=True), without_possessive_counts(split))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    return TextTokenizer(tokenizer.to_str())


def without_possessive_counts(split: str) -> str:
    """Return the expression without the last `+` of `{1,3}+`: tiktoken never gives back what that took, and the engine
    of `tokenizers` would repeat it."""
    return re.sub(r"(?<=\d\})\+", "", split)


def merged_from(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two tokens that tiktoken joins to a token: those that remain of its bytes after all merges of lower
    ranks."""
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        pairs = [ranks.get(a + b, sys.maxsize) for a, b in pairwise(pieces)]
        i = min(range(len(pairs)), key=pairs.__getitem__)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces


def byte_letters() -> dict[str, int]:
    """Return the byte of each letter of a byte-level vocabulary: the byte's own letter if it is printable, otherwise
    one after 255, as in GPT-2."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in prints]
    return {chr(b): b for b in prints} | {chr(256 + i): b for i, b in enumerate(others)}

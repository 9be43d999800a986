"""Text to tokens: by any tokenizer.json, nanochat's tokenizer.pkl, or one of tiktoken's; run by `tokenizers`."""

import hashlib
import json
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from configs.files import StorageLost, with_retries, write_whole
from configs.schema import UserError

BOS = "<|bos|>"
# Special tokens of conversations (data/conversation.py); with the BOS, nanochat's nine.
CHAT_TOKENS = (
    *("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
    *("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"),
)
# Tokens that start a document in others' tokenizers (or, in GPT-2's data, end and so separate documents).
BOS_NAMES = (BOS, "<|endoftext|>", "<|begin_of_text|>", "<bos>", "<s>")
# nanochat's split (GPT-4's, with numbers of at most two digits): merges do not cross it.
SPLIT = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)
PROBE = {"a test": 'A  b\tc\n    Dé 1,234 "x" ﬁ ① 日本 🙂'}  # what case folding, NFKC and unknown tokens lose
PROCESSORS = '{"type": "Sequence", "processors": ['  # in a tokenizer.json: its own, and one that writes the BOS
PICKLED = {"pat_str": str, "mergeable_ranks": dict, "special_tokens": dict}  # in nanochat's tokenizer.pkl, with types


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer.json, kept byte for byte, and the facts that training needs."""

    json: str

    @cached_property
    def library(self) -> Tokenizer:
        """Return the `tokenizers` object. Special tokens inside a text encode as plain letters."""
        tokenizer = Tokenizer.from_str(self.json)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Return the special tokens, which represent no text, and their ids."""
        added = self.library.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    @cached_property
    def bos(self) -> int:
        """Return the id of the token that starts a document. Raise UserError if the tokenizer has no known one."""
        ids = [self.special_tokens[name] for name in BOS_NAMES if name in self.special_tokens]
        if not ids:
            raise UserError(
                f"the tokenizer has no token that starts a document: none of {', '.join(BOS_NAMES)} is among its "
                f"special tokens ({', '.join(self.special_tokens) or 'it has none'}); add one to its tokenizer.json"
            )
        return ids[0]

    @property
    def json_with_bos(self) -> str:
        """Return the tokenizer.json for other programs: it writes the BOS before a text, as training does.
        `load_tokenizer` undoes it."""
        if self.library.encode("").ids[:1] == [self.bos]:
            return self.json
        text = self.json if '"post_processor":' in self.json else self.json.replace("{", '{"post_processor": null, ', 1)
        (head,) = re.findall(r'(?s)^.*?"post_processor":\s*', text)
        end, ours = json.JSONDecoder().raw_decode(text, len(head))[1], self._template
        own = text[len(head) : end]
        return head + (ours if own == "null" else f"{PROCESSORS}{own}, {ours}]}}") + text[end:]

    @property
    def _template(self) -> str:
        """Return a post-processor that writes the BOS, in tokenizer.json's format."""
        bos = self.library.id_to_token(self.bos)
        one, two = f"{bos} $A", f"{bos} $A $B:1"
        template = processors.TemplateProcessing(single=one, pair=two, special_tokens=[(bos, self.bos)])
        return json.dumps(json.loads(template.__getstate__()))

    @cached_property
    def token_bytes(self) -> Int[np.ndarray, "vocab"]:
        """Return the number of bytes of text of each token; 0 for special tokens."""
        vocab = self.library.get_vocab()
        sizes = np.zeros(max(vocab.values()) + 1, np.int32)
        in_bytes = set(pre_tokenizers.ByteLevel.alphabet()) <= vocab.keys()  # each character of a token is a byte
        for token, i in vocab.items():
            sizes[i] = len(token) if in_bytes else _text_bytes(token)
        for i, token in self.library.get_added_tokens_decoder().items():  # never as bytes' letters
            sizes[i] = 0 if token.special else _text_bytes(token.content)
        return sizes

    @property
    def vocab_size(self) -> int:
        """Return a number above all ids."""
        return len(self.token_bytes)

    @cached_property
    def sha256(self) -> str:
        """Return a digest of the tokenizer: equal digests mean equal tokens."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's tokens, without a BOS, encoded on all cores."""
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens."""
        return self.library.decode(list(ids))

    def text_lost(self, texts: Mapping[str, str] = PROBE) -> str:
        """Return the first difference between a text, apart from blanks at its ends, and what its tokens decode to;
        "" if there is none. Bits per byte divide by the bytes of tokens, and are wrong if those are another text's.
        `texts`: by their names."""
        for (name, text), ids in zip(texts.items(), self.encode(list(texts.values()))):
            decoded = self.decode(ids)
            if decoded.strip() != text.strip():
                at = next((i for i, (a, b) in enumerate(zip(text, decoded)) if a != b), min(len(text), len(decoded)))
                there = f"{decoded[at : at + 20]!r}, not {text[at : at + 20]!r}"
                return f"the tokens of {name} decode from character {at:,} on to {there}"
        return ""

    @property
    def missing_chat_tokens(self) -> list[str]:
        """Return those of `CHAT_TOKENS` that the tokenizer lacks."""
        return [token for token in CHAT_TOKENS if token not in self.special_tokens]

    @property
    def with_chat_tokens(self) -> "TextTokenizer":
        """Return the tokenizer with all of `CHAT_TOKENS`. Missing ones get the ids from `vocab_size` on."""
        library, missing = Tokenizer.from_str(self.json), self.missing_chat_tokens
        library.add_special_tokens([AddedToken(token, special=True) for token in missing])
        return TextTokenizer(library.to_str()) if missing else self

    def require_same_in(self, folder: Path) -> None:
        """Raise UserError if `folder` contains another tokenizer: a network would read other words than it learned."""
        if (folder / "tokenizer.json").exists() and load_tokenizer(folder).sha256 != self.sha256:
            raise UserError(
                f"{folder} has another tokenizer than the data was made with; prepare the data with "
                f"--tokenizer={folder}, or start a new run"
            )

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, and for other programs tokens.json: the BOS's id, and each token's bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        facts = json.dumps({"bos": self.bos, "token_bytes": self.token_bytes.tolist()})
        write_whole(folder / "tokens.json", facts)
        write_whole(folder / "tokenizer.json", self.json)


def load_tokenizer(name: str | Path) -> TextTokenizer:
    """Return the tokenizer in a tokenizer.json or in nanochat's tokenizer.pkl, in a folder with one, or tiktoken's
    (`tiktoken:gpt2`). Raise UserError if there is none."""
    if str(name).startswith("tiktoken:"):
        return _from_tiktoken(str(name).removeprefix("tiktoken:"))
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        is_nanochat = (path / "tokenizer.pkl").exists() and not (path / "tokenizer.json").exists()
        path = path / ("tokenizer.pkl" if is_nanochat else "tokenizer.json")
    try:
        if path.suffix == ".pkl":
            return convert_tiktoken(*read_pickle(path))
        tokenizer = TextTokenizer(with_retries(str(path), path.read_bytes).decode())
        if tokenizer.library.post_processor and set(BOS_NAMES) & tokenizer.special_tokens.keys():
            before, both, after = tokenizer.json.partition(f", {tokenizer._template}]}}")
            plain = before.replace(PROCESSORS, "", 1) + after if both else before.replace(tokenizer._template, "null")
            tokenizer = TextTokenizer(plain)
        _ = tokenizer.library
    except StorageLost:
        raise
    except Exception as error:  # the library has no exception type for parse errors
        raise UserError(f"{name}: no readable tokenizer in {path.name} ({error})") from error
    return tokenizer


def byte_level(model: models.BPE, *splits: str) -> Tokenizer:
    """Return a tokenizer that cuts text by the expressions in turn, and writes one letter per byte."""
    cuts = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([*cuts, letters]), decoders.ByteLevel()
    return tokenizer


def _text_bytes(token: str) -> int:
    """Return the bytes of an added token, or of a sentencepiece vocabulary's: `<0x0A>` is a byte, `▁` a space."""
    return 1 if token.startswith("<0x") and token.endswith(">") else len(token.replace("▁", " ").encode())


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
    # tiktoken's {1,3}+ never gives back what it took; the engine of `tokenizers` would repeat it.
    split = re.sub(r"(?<=\d\})\+", "", split)
    letters = {byte: letter for letter, byte in byte_letters().items()}
    spell = lambda token: "".join(letters[b] for b in token)
    ordered = sorted(ranks, key=lambda token: ranks[token])
    merges = [(spell(a), spell(b)) for a, b in (merged_from(token, ranks) for token in ordered if len(token) > 1)]
    vocab = {spell(token): i for token, i in ranks.items()} | special_tokens
    # As in tiktoken, a word that is a token becomes that token, even if no merges lead to it.
    tokenizer = byte_level(models.BPE(vocab, merges, ignore_merges=True), split)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    return TextTokenizer(tokenizer.to_str())


def merged_from(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two tokens that tiktoken joins to a token: those that remain of its bytes after all merges of lower
    ranks."""
    pieces = [token[i : i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(pieces)]
        i = min(range(len(pairs)), key=pairs.__getitem__)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces


def byte_letters() -> dict[str, int]:
    """Return the byte of each letter of a byte-level vocabulary: the byte's own letter if it is printable, otherwise
    one after 255, as in GPT-2."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in prints]
    return {chr(b): b for b in prints} | {chr(256 + i): b for i, b in enumerate(others)}

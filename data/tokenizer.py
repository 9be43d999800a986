"""Text to tokens, by any tokenizer.json. The library `tokenizers` runs it."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Int, Integer
from tokenizers import Tokenizer, pre_tokenizers

from system.errors import StorageLost, UserError
from system.files import is_there, with_retries, write_whole

BOS = "<|bos|>"
# Special tokens of conversations (data/conversation.py); with the BOS, nanochat's nine.
CHAT_TOKENS = (
    *("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
    *("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"),
)
# Tokens that start a document in others' tokenizers (or, in GPT-2's data, end and so separate documents).
BOS_NAMES = (BOS, "<|endoftext|>", "<|begin_of_text|>", "<bos>", "<s>")
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte of a character that the vocabulary lacks


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

    @cached_property
    def token_bytes(self) -> Int[np.ndarray, "vocab"]:
        """Return the number of bytes of text of each token after another one; 0 for special tokens. The decoder says
        how a token is spelled: a vocabulary may contain another spelling's letters."""
        vocab = self.library.get_vocab()
        sizes = np.zeros(max(vocab.values()) + 1, np.int32)
        kinds, letters = _decoder_kinds(self.library), set(pre_tokenizers.ByteLevel.alphabet())
        join = self.library.decoder.decode if self.library.decoder else " ".join
        around = len(join(["a", "a"]).encode())
        for token, i in vocab.items():
            if "ByteLevel" in kinds and letters.issuperset(token):
                sizes[i] = len(token)  # each letter is a byte
            elif "ByteLevel" in kinds:
                sizes[i] = len(token.encode())
            elif "ByteFallback" in kinds and BYTE.fullmatch(token):
                sizes[i] = 1
            else:
                sizes[i] = len(join(["a", token, "a"]).encode()) - around
        for i, token in self.library.get_added_tokens_decoder().items():
            if token.special:
                sizes[i] = 0
            elif "ByteLevel" in kinds:  # never as bytes' letters
                sizes[i] = len(token.content.encode())
        return sizes

    @cached_property
    def added_bytes(self) -> int:
        """Return the bytes that the tokenizer adds to each text: 1 if it begins every text with a blank, as Metaspace
        does with `prepend_scheme=always`, otherwise 0."""
        (ids,) = self.encode(["a"])
        return max(int(self.token_bytes[ids].sum()) - len("a"), 0)  # below 0: it cannot spell the letter

    def text_bytes(
        self, inputs: Integer[np.ndarray, "*tokens"], targets: Integer[np.ndarray, "*tokens"]
    ) -> Int[np.ndarray, "*tokens"]:
        """Return the bytes of text of each target after its input. A text's first token follows a special one, and is
        counted without `added_bytes`."""
        sizes = self.token_bytes[targets]
        if not self.added_bytes:
            return sizes
        is_first = (self.token_bytes[inputs] == 0) & (sizes > 0)
        return sizes - self.added_bytes * is_first

    @property
    def vocab_size(self) -> int:
        """Return a number above all ids."""
        return len(self.token_bytes)

    @cached_property
    def sha256(self) -> str:
        """Return a digest of tokenizer.json: equal digests mean equal tokens."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    @cached_property
    def _content(self) -> dict:
        """Return what determines the tokens of a text and the text of tokens: not the spelling of tokenizer.json, nor
        what other programs' calls add to a text (padding, truncation, the post-processor)."""
        return json.loads(self.library.to_str()) | {"post_processor": None}

    def is_same_as(self, other: "TextTokenizer") -> bool:
        """Return whether both encode and decode alike. Other programs write tokenizer.json in another spelling."""
        return self.json == other.json or self._content == other._content

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's tokens, without a BOS, encoded on all cores."""
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the tokens."""
        return self.library.decode(list(ids))

    @property
    def missing_chat_tokens(self) -> list[str]:
        """Return those of `CHAT_TOKENS` that the tokenizer lacks."""
        return [token for token in CHAT_TOKENS if token not in self.special_tokens]

    def require_same_in(self, folder: Path) -> None:
        """Raise UserError if `folder` contains another tokenizer: a network would read other words than it learned."""
        is_saved = with_retries(str(folder), lambda: is_there(folder / "tokenizer.json"))
        if is_saved and not self.is_same_as(load_tokenizer(folder)):
            raise UserError(
                f"{folder} has another tokenizer than the data was made with; prepare the data with "
                f"--tokenizer={folder}, or start a new run"
            )

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, and for other programs tokens.json: the BOS's id, each token's bytes, and the bytes
        that the tokenizer adds to each text."""
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"bos": self.bos, "token_bytes": self.token_bytes.tolist(), "added_bytes": self.added_bytes}
        write_whole(folder / "tokens.json", json.dumps(facts))
        write_whole(folder / "tokenizer.json", self.json)


def load_tokenizer(name: str | Path) -> TextTokenizer:
    """Return the tokenizer in a tokenizer.json, or in a folder with one. Raise UserError if there is none."""
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        path = path / "tokenizer.json"
    try:
        tokenizer = TextTokenizer(with_retries(str(path), path.read_bytes).decode())
        _ = tokenizer.library
    except StorageLost:
        raise
    except Exception as error:  # the library has no exception type for parse errors
        raise UserError(f"{name}: no readable tokenizer in {path.name} ({error})") from error
    return tokenizer


def _decoder_kinds(library: Tokenizer) -> set[str]:
    """Return the kinds of the decoder's steps; none if tokens are joined by blanks."""
    if not library.decoder:
        return set()
    facts = json.loads(library.decoder.__getstate__())
    return {step["type"] for step in facts.get("decoders", [facts])}

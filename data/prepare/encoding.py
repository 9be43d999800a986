"""Encoding text to tokens, document by document in one thread.

tiktoken encodes several times as fast as `tokenizers` (docs/data.md), so it is used if both give the same tokens by
construction, as `tiktoken_of` decides.
"""

import json
import re

import numpy as np
import tiktoken
from jaxtyping import UInt32

from data.conversation import render, texts_of
from data.tokenizer import TextTokenizer
from data.tokenizer_formats import byte_letters, convert_tiktoken

TOO_LONG = re.compile(r"\s{100000}")  # tiktoken's regular expressions overflow their stack on a million blanks


class Encoder:
    """Turns documents into tokens: texts, or conversations as written by `document_of`."""

    def __init__(self, tokenizer: TextTokenizer, conversations: bool = False):
        self.tokenizer = tokenizer
        self.conversations = conversations
        self.fast = tiktoken_of(tokenizer)

    def encode(self, document: str) -> UInt32[np.ndarray, "tokens"]:
        """Return the tokens of a document, without the BOS."""
        if not self.conversations:
            return self._encode(document)
        encode = lambda texts: (self._encode(text).tolist() for text in texts)
        return np.array(render(self.tokenizer, json.loads(document), encode=encode)[1:], np.uint32)

    def miscounted(self, document: str, ids: UInt32[np.ndarray, "tokens"]) -> str:
        """Return how the bytes that a document's tokens count differ from those of its text, apart from blanks at its
        ends; "" if they do not. Bits per byte divide by the former."""
        inputs = np.concatenate([np.array([self.tokenizer.bos], np.uint32), ids[:-1]])[: len(ids)]
        counted = int(self.tokenizer.text_bytes(inputs, ids).sum())
        texts = texts_of(document) if self.conversations else [document]
        most = sum(len(text.encode()) for text in texts)
        least = sum(len(text.strip().encode()) for text in texts)
        return "" if least <= counted <= most else f"its tokens count {counted:,} bytes, and its text has {most:,}"

    def _encode(self, text: str) -> UInt32[np.ndarray, "tokens"]:
        if self.fast and not (len(text) >= 100_000 and TOO_LONG.search(text)):
            ids = self.fast.encode_to_numpy(text, disallowed_special=())
            # tiktoken drops what its expression does not match.
            if self.tokenizer.token_bytes[ids].sum() == len(text.encode()):
                return ids
        return np.array(self.tokenizer.encode([text])[0], np.uint32)


def tiktoken_of(tokenizer: TextTokenizer) -> tiktoken.Encoding | None:
    """Return tiktoken's encoding with the same tokens, for a byte-level BPE whose text is cut by one regular
    expression.

    `tokenizers` joins pairs in the order of its list of merges. tiktoken joins any two tokens that together are a
    token, the lowest id first. Both agree if the merges are those that `convert_tiktoken` finds from the tokens alone:
    no token is ever split, so two neighbours that together are a token were joined from its bytes, and are that pair.
    """
    facts, special, letters = json.loads(tokenizer.library.to_str()), tokenizer.special_tokens, byte_letters()
    model = facts["model"]
    try:
        split = facts["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        words = {bytes(letters[one] for one in word): i for word, i in model["vocab"].items() if word not in special}
        converted = json.loads(convert_tiktoken(words, split, special).library.to_str())
    except Exception:  # other steps, or not written as bytes; the library has no exception type of its own
        return None
    converted["model"] |= {key: model.get(key) for key in ("vocab", "ignore_merges")}
    is_same = all(facts[key] == converted[key] for key in ("normalizer", "pre_tokenizer", "model"))
    if not is_same or len(special) < len(facts["added_tokens"]) or not all(bytes([i]) in words for i in range(256)):
        return None
    return tiktoken.Encoding("of tokenizer.json", pat_str=split, mergeable_ranks=words, special_tokens=special)

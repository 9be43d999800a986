"""Encoding text to tokens, document by document in one thread.

tiktoken encodes several times as fast as `tokenizers` (docs/data.md), so it is used if both give the same tokens by
construction, as `tiktoken_of` decides.
"""

import json
import re
import sys

import numpy as np
import tiktoken
from jaxtyping import UInt32
from tokenizers import models

from data.conversation import render, texts_of
from data.tokenizer import TextTokenizer
from data.tokenizer_formats import SPLIT, byte_letters, byte_level, without_possessive_counts

TOO_LONG = re.compile(r"\s{100000}")  # tiktoken's regular expressions overflow their stack on a million blanks
MARK = "\0"  # a text with it is encoded by `tokenizers`
# SPLIT, for the text that `marked` returns. Without the look ahead, tiktoken's expressions are twice as fast; a
# possessive `+` makes no difference in SPLIT, since what would be given back cannot begin the rest.
MARKED_SPLIT = SPLIT.replace(r"\s+(?!\S)|", "").replace("?+", "?").replace("++", "+")
BLANKS = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
IS_BLANK = np.zeros(sys.maxunicode + 1, bool)  # by character: those that `\s` matches
IS_BLANK[[ord(blank) for blank in BLANKS]] = True


class Encoder:
    """Turns documents into tokens: texts, or conversations as written by `document_of`."""

    def __init__(self, tokenizer: TextTokenizer, conversations: bool = False):
        self.tokenizer = tokenizer
        self.conversations = conversations
        self.fast = tiktoken_of(tokenizer)
        self.mark = tokenizer.vocab_size  # the id of MARK
        self.is_marked = self.fast is not None and self.fast._pat_str == SPLIT
        if self.fast and self.is_marked:
            special = {MARK: self.mark}
            ranks = self.fast._mergeable_ranks
            self.fast = tiktoken.Encoding(
                "of marked text", pat_str=MARKED_SPLIT, mergeable_ranks=ranks, special_tokens=special
            )

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
        if self.fast and MARK not in text and not (len(text) >= 100_000 and TOO_LONG.search(text)):
            if self.is_marked:
                ids = self.fast.encode_to_numpy(marked(text), allowed_special={MARK}, disallowed_special=())
                ids = ids[ids != self.mark]
            else:
                ids = self.fast.encode_to_numpy(text, disallowed_special=())
            # tiktoken drops what its expression does not match.
            if self.tokenizer.token_bytes[ids].sum() == len(text.encode()):
                return ids
        return np.array(self.tokenizer.encode([text])[0], np.uint32)


def marked(text: str) -> str:
    r"""Return the text with a MARK before each blank that is the last of several and no line's end, and that another
    letter follows: where `\s+(?!\S)` of SPLIT ends a word. A special token ends a word, too."""
    encoding, dtype = ("ascii", "u1") if text.isascii() else ("utf-32-le", "<u4")
    letters = np.frombuffer(text.encode(encoding), dtype)
    blank = IS_BLANK[letters]
    last = np.flatnonzero(blank[:-2] & blank[1:-1] & ~blank[2:]) + 1
    is_line_end = (letters[last] == ord("\n")) | (letters[last] == ord("\r"))
    return np.insert(letters, last[~is_line_end], ord(MARK)).tobytes().decode(encoding)


def tiktoken_of(tokenizer: TextTokenizer) -> tiktoken.Encoding | None:
    """Return tiktoken's encoding with the same tokens, for a byte-level BPE whose text is cut by one regular
    expression.

    `tokenizers` joins pairs in the order of its list of merges. tiktoken joins any two tokens that together are a
    token, the lowest id first. Both agree if each token has one merge, in the order of ids, and if the merges lead from
    its bytes to it: two neighbours that together are a token, but not its merge, would be neighbours in that token's
    own bytes, too, and the merges would not lead to it.
    """
    facts, special, letters = json.loads(tokenizer.library.to_str()), tokenizer.special_tokens, byte_letters()
    model = facts["model"]
    try:
        split = facts["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        words = {word: i for word, i in model["vocab"].items() if word not in special}
        ranks = {bytes(letters[one] for one in word): i for word, i in words.items()}
        merges = models.BPE(model["vocab"], [tuple(pair) for pair in model["merges"]])
        plain = json.loads(byte_level(merges, without_possessive_counts(split)).to_str())
    except Exception:  # other steps, or not written as bytes; the library has no exception type of its own
        return None
    plain["model"]["ignore_merges"] = model["ignore_merges"]
    is_same = all(facts[key] == plain[key] for key in ("normalizer", "pre_tokenizer", "model"))
    made = [model["vocab"][a + b] for a, b in model["merges"]]
    if not is_same or made != sorted({i for word, i in words.items() if len(word) > 1}):
        return None
    if len(special) < len(facts["added_tokens"]) or not all(bytes([i]) in ranks for i in range(256)):
        return None
    if any([token.id for token in merges.tokenize(word)] != [i] for word, i in words.items()):
        return None
    return tiktoken.Encoding("of tokenizer.json", pat_str=split, mergeable_ranks=ranks, special_tokens=special)

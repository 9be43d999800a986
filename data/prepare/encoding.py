"""Encoding text to tokens, document by document in one thread.

tiktoken encodes several times as fast as `tokenizers` (docs/data.md), so it is used if both give the same tokens by
construction, as `tiktoken_of` decides.
"""

import json
import re

import numpy as np
import tiktoken
from jaxtyping import UInt32
from tokenizers import models

from data.conversation import render
from data.tokenizer import TextTokenizer, byte_letters, byte_level, merged_from

TOO_LONG = re.compile(r"\s{100000}")  # tiktoken's regular expressions overflow their stack on a million blanks


class Encoder:
    """Turns documents into tokens."""

    def __init__(self, tokenizer: TextTokenizer):
        self.tokenizer = tokenizer
        self.fast = tiktoken_of(tokenizer)

    def encode(self, text: str) -> UInt32[np.ndarray, "tokens"]:
        """Return the tokens of a text, without a BOS."""
        if self.fast and not (len(text) >= 100_000 and TOO_LONG.search(text)):
            return self.fast.encode_to_numpy(text, disallowed_special=())
        return np.array(self.tokenizer.encode([text])[0], np.uint32)


class ConversationEncoder(Encoder):
    """Turns conversations, as written by `document_of`, into tokens."""

    def encode(self, text: str) -> UInt32[np.ndarray, "tokens"]:
        """Return the tokens of a conversation, without the BOS."""
        encode = lambda texts: (super(ConversationEncoder, self).encode(one).tolist() for one in texts)
        return np.array(render(self.tokenizer, json.loads(text), encode=encode)[1:], np.uint32)


def tiktoken_of(tokenizer: TextTokenizer) -> tiktoken.Encoding | None:
    """Return tiktoken's encoding with the same tokens, for a byte-level BPE whose text is cut by one regular
    expression.

    `tokenizers` joins pairs in the order of its list of merges. tiktoken joins any two tokens that together are a
    token, the lowest id first. Both agree under two conditions: ids grow along the merges, and each token's bytes,
    joined as in tiktoken, end as the pair of its merge. No token is ever split, so two neighbours that together are a
    token were joined from its bytes alone, and are that pair.
    """
    facts, special, letters = json.loads(tokenizer.library.to_str()), tokenizer.special_tokens, byte_letters()
    model = facts["model"]
    try:
        split = facts["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
        plain = json.loads(byte_level(models.BPE(), split).to_str())
        is_plain = all(facts[key] == plain[key] for key in ("normalizer", "pre_tokenizer"))
        own = {key: model[key] for key in ("vocab", "merges", "ignore_merges")}
        # `tokenizers` and tiktoken read `{1,3}+` in different ways.
        if not is_plain or model != plain["model"] | own or re.search(r"\d}\+", split):
            return None
        spelled = lambda word: bytes(letters[letter] for letter in word)
        ranks = {spelled(token): i for token, i in model["vocab"].items() if token not in special}
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        merges = [(spelled(a), spelled(b)) for a, b in pairs]
    except (TypeError, LookupError, ValueError):  # other steps, or not written as bytes
        return None
    order = [ranks.get(a + b, -1) for a, b in merges]
    whole = all(bytes([i]) in ranks for i in range(256)) and len(merges) == len(ranks) - 256
    whole = whole and len(special) == len(facts["added_tokens"])
    if not whole or order != sorted(set(order)) or any(merged_from(a + b, ranks) != [a, b] for a, b in merges):
        return None
    return tiktoken.Encoding("of tokenizer.json", pat_str=split, mergeable_ranks=ranks, special_tokens=special)

"""A byte-level BPE tokenizer with a BOS, trained and run by the `tokenizers` library."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from jaxtyping import Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS = "<|bos|>"
# nanochat's (GPT-4's, with numbers cut into at most two digits): what a merge may not cross.
SPLIT = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains `vocab_size` tokens: the BOS (id 0), the 256 bytes, merges. Any text encodes, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _special_tokens_are_text(tokenizer)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`."""
    return _special_tokens_are_text(Tokenizer.from_file(str(path)))


def _special_tokens_are_text(tokenizer: Tokenizer) -> Tokenizer:
    """The BOS's letters inside a text encode as letters. A tokenizer.json does not keep this setting."""
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> Int[np.ndarray, "tokens"]:
    """All documents in one array, a BOS before each, on all cores."""
    bos = np.array([tokenizer.token_to_id(BOS)])
    encodings = tokenizer.encode_batch_fast(list(texts))
    parts = [part for encoding in encodings for part in (bos, np.asarray(encoding.ids, np.int64))]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def token_bytes(tokenizer: Tokenizer) -> Int[np.ndarray, "vocab"]:
    """How many bytes of text each token stands for; 0 for the BOS."""
    sizes = np.zeros(tokenizer.get_vocab_size(), np.int32)
    for token, i in tokenizer.get_vocab().items():
        # In a byte-level vocabulary each character of a token is one byte.
        sizes[i] = 0 if token == BOS else len(token)
    return sizes

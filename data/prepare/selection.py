"""Decisions from a first look at the text: the held-out documents, and the tokenizer."""

import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from data.prepare.corpus import Corpus
from data.prepare.source_files import SourceFile
from data.tokenizer import BOS, CHAT_TOKENS, TextTokenizer
from data.tokenizer_formats import SPLIT, byte_level
from system.errors import UserError

SAMPLED = 32  # fewest files for training a tokenizer
LONGEST_PIECE = 256  # most characters of a piece in a tokenizer's training; the longest of Python's library has 201


def hash_share(text: str) -> float:
    """Return a number in [0, 1) from a text. A document is held out if it is below the held-out fraction. So equal
    texts share a side in every dataset."""
    content = text.encode(errors="surrogateescape")  # a file's name may be any bytes
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64


def held_out_threshold(corpus: Corpus, files: list[SourceFile], val_fraction: float) -> float:
    """Return the threshold of hashes below which documents are held out: `val_fraction`. If one side of a small corpus
    would be empty, hold out the document of the lowest hash, or train on the one of the highest."""
    lowest, highest, count, problem = 1.0, 0.0, 0, ""
    for document in (document for file in files for document in corpus.documents(file)):
        if document.problem and not problem:
            problem = f"{document.name}: {document.problem}"
        if not document.problem:
            share, count = hash_share(document.text), count + 1
            lowest, highest = min(lowest, share), max(highest, share)
            if lowest < val_fraction <= highest:
                return val_fraction
    if lowest >= highest:
        skipped = f" (the first that was skipped: {problem})" if problem else ""
        raise UserError(
            f"{corpus.source}: {count} document(s) with text found there{skipped}; at least 2 different ones are "
            "needed, one to train on and one to hold out (a single file is cut every 16,000 bytes)"
        )
    return highest if highest < val_fraction else float(np.nextafter(lowest, 1))


def sampled_tokenizer(
    corpus: Corpus, files: list[SourceFile], vocab_size: int, sample_bytes: int, threshold: float
) -> TextTokenizer:
    """Train a tokenizer on a sample of the training documents. Raise UserError if they cannot fill its vocabulary."""
    tokenizer = train_tokenizer(sample(corpus, files, sample_bytes, threshold), vocab_size)
    learned = tokenizer.vocab_size
    if learned < vocab_size:
        raise UserError(
            f"a vocab_size of {vocab_size} is more than the text of {corpus.source} can fill: use more text, or "
            f"--vocab_size={learned} (of train.py: --model.vocab_size={learned}) or less{corpus.left_out}"
        )
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Train `vocab_size` tokens: the BOS (id 0), those of conversations, the 256 bytes, merges. Any text round-trips.

    The time of merges grows with the square of a piece's length. So a longer unbroken run of letters or blanks is cut
    into parts of LONGEST_PIECE characters for training.
    """
    tokenizer = byte_level(models.BPE(), SPLIT, f"(?m:.{{{LONGEST_PIECE}}})")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, *CHAT_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),  # it prints empty lines otherwise
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = byte_level(models.BPE(), SPLIT).pre_tokenizer
    return TextTokenizer(tokenizer.to_str())


def text_lost(tokenizer: TextTokenizer, texts: Mapping[str, str], encoded: Iterable[Sequence[int]]) -> str:
    """Return the first difference between a text, apart from blanks at its ends, and what its tokens decode to;
    "" if there is none. Bits per byte divide by the bytes of tokens, and are wrong if those are another text's.
    `texts`: by their names; `encoded`: the tokens of each."""
    for (name, text), ids in zip(texts.items(), encoded):
        decoded = tokenizer.decode(ids)
        if decoded.strip() != text.strip():
            at = next((i for i, (a, b) in enumerate(zip(text, decoded)) if a != b), min(len(text), len(decoded)))
            there = f"{decoded[at : at + 20]!r}, not {text[at : at + 20]!r}"
            return f"the tokens of {name} decode from character {at:,} on to {there}"
    return ""


def add_chat_tokens(tokenizer: TextTokenizer) -> TextTokenizer:
    """Return the tokenizer with all of `CHAT_TOKENS`. Missing ones get the ids from `vocab_size` on."""
    library = Tokenizer.from_str(tokenizer.json)
    library.add_special_tokens([AddedToken(token, special=True) for token in tokenizer.missing_chat_tokens])
    return TextTokenizer(library.to_str())


def sample(corpus: Corpus, files: list[SourceFile], sample_bytes: int, threshold: float) -> Iterator[str]:
    """Yield training documents: the first ones of each sampled file, up to its share. The files are sampled evenly over
    the source, at least 32 of them, with four times the bytes. From the hub, each is downloaded."""
    files = [file for file in files if not file.held_out]
    total = max(sum(file.size for file in files), 1)
    count = min(max(math.ceil(4 * sample_bytes / total * len(files)), SAMPLED), len(files))
    files = [files[i * len(files) // count] for i in range(count)]
    share = sample_bytes / max(sum(file.size for file in files), 1)
    for file in files:
        left = file.size * share
        for document in corpus.documents(file):
            if left <= 0:
                break
            if not document.problem and hash_share(document.text) >= threshold:
                left -= len(document.text)
                yield from corpus.texts(document.text)

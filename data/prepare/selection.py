"""Decisions from a first look at the text: the held-out and excluded documents, and the tokenizer.

Excluded from training are documents that are held out in separate files, and those that share 13 consecutive words with
an evaluation's texts, GPT-3's criterion of contamination (arXiv:2005.14165, appendix C).
"""

import hashlib
import json
import math
import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from jaxtyping import UInt64
from tokenizers import models, pre_tokenizers, trainers

from configs.files import write_whole
from configs.schema import MIN_VOCAB_SIZE, UserError
from data.prepare.corpus import UNREADABLE, Corpus
from data.prepare.source_files import SourceFile
from data.record import hash_share
from data.tokenizer import BOS, CHAT_TOKENS, SPLIT, TextTokenizer, byte_level

WORDS = 13
SAMPLED = 32  # fewest files for training a tokenizer
LONGEST_PIECE = 4096  # most characters of a piece in a tokenizer's training


@dataclass(frozen=True)
class Exclusion:
    """The texts to exclude."""

    shares: set[float]
    """Hashes of the held-out texts."""
    numbers: dict[str, int]
    """A number for each word of the evaluations."""
    grams: UInt64[np.ndarray, "grams"]
    """Hashes of the evaluations' n-grams."""
    source: str
    """The evaluations'."""

    def problem(self, document: str, texts: Sequence[str]) -> str:
        """Return why a document with these texts is excluded."""
        if self.shares and hash_share(document) in self.shares:
            return "the text of a held-out document"
        if len(self.grams) and any(np.isin(_grams(text, self.numbers), self.grams).any() for text in texts):
            return f"{WORDS} words of {self.source}"
        return ""


def save_exclusion(corpus: Corpus, evaluations: Corpus | None, folder: Path) -> Path | None:
    """Write the texts to exclude from a corpus' training text to a file of the folder, named by its digest. Return None
    if there are none."""
    held_out = [file for file in corpus.files if file.held_out]
    if not held_out and not evaluations:
        return None
    shares = [hash_share(document.text) for file in held_out for document in corpus.documents(file) if document.text]
    texts = list(_texts(evaluations)) if evaluations else []
    numbers = {word: i for i, word in enumerate(sorted({word for text in texts for word in _words(text)}), 1)}
    grams = np.unique(np.concatenate([np.zeros(0, np.uint64), *(_grams(text, numbers) for text in texts)]))
    content = pickle.dumps(Exclusion(set(shares), numbers, grams, evaluations.source if evaluations else ""))
    path = folder / f"excluded-{hashlib.sha256(content).hexdigest()[:32]}"
    folder.mkdir(exist_ok=True)
    write_whole(path, content)
    return path


@cache
def load_exclusion(path: Path) -> Exclusion:
    return pickle.loads(path.read_bytes())


def _texts(evaluations: Corpus) -> Iterator[str]:
    """Yield the texts of evaluations: documents, and every string in lines of JSON. Raise UserError if one cannot be
    read."""
    for file in evaluations.files:
        number = 1
        try:
            for number, content in evaluations.contents(file):  # noqa: B007  (the message has it)
                record = json.loads(content) if evaluations.is_lines(file) and content else content.decode()
                yield from _strings(record)
        except (*UNREADABLE, ValueError, RecursionError) as error:
            name = evaluations.name(file, number)
            raise UserError(f"--exclude_ngrams_of={evaluations.source}: {name} cannot be read: {error}") from error


def _strings(record: object) -> Iterator[str]:
    if isinstance(record, str):
        yield record
    elif isinstance(record, dict | list):
        for value in record.values() if isinstance(record, dict) else record:
            yield from _strings(value)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _grams(text: str, numbers: dict[str, int]) -> UInt64[np.ndarray, "grams"]:
    """Return a hash of each 13 consecutive words, from the words' numbers. Words without one count as 0."""
    words = np.array([numbers.get(word, 0) for word in _words(text)], np.uint64)
    count = max(len(words) - WORDS + 1, 0)
    mixed = np.zeros(count, np.uint64)
    for i in range(WORDS if count else 0):
        mixed = (mixed ^ words[i : i + count]) * np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio
        mixed ^= mixed >> np.uint64(29)
    return mixed


def held_out_threshold(corpus: Corpus, files: list[SourceFile], val_fraction: float) -> float:
    """Return the threshold of hashes below which documents are held out: `val_fraction`. If one side of a small corpus
    would be empty, hold out the document of the lowest hash, or train on the one of the highest."""
    lowest, highest, count, problem = 1.0, 0.0, 0, ""
    for document in (document for file in files for document in corpus.documents(file)):
        problem = problem or document.problem
        if not document.problem:
            share, count = hash_share(document.text), count + 1
            lowest, highest = min(lowest, share), max(highest, share)
            if lowest < val_fraction <= highest:
                return val_fraction
    if lowest >= highest:
        raise UserError(
            f"{corpus.source}: {count} document(s) with text found there"
            + f" (the first that was skipped: {problem})" * bool(problem)
            + "; at least 2 different ones are needed, one to train on and one to hold out (a single file is cut every "
            "16,000 bytes)"
        )
    return highest if highest < val_fraction else float(np.nextafter(lowest, 1))


def sampled_tokenizer(
    corpus: Corpus, files: list[SourceFile], vocab_size: int, sample_bytes: int, threshold: float, excluded: Path | None
) -> TextTokenizer:
    """Train a tokenizer on a sample of the training documents. Raise UserError if they cannot fill its vocabulary."""
    tokenizer = train_tokenizer(sample(corpus, files, sample_bytes, threshold, excluded), vocab_size)
    learned = tokenizer.vocab_size
    if learned < vocab_size:
        smaller = f"use vocab_size={learned} or less, or more text" if learned >= MIN_VOCAB_SIZE else "use more text"
        raise UserError(
            f"a vocab_size of {vocab_size} is more than the text of {corpus.source} can fill: its tokenizer "
            f"learned {learned} tokens; {smaller}{corpus.left_out}"
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


def sample(
    corpus: Corpus, files: list[SourceFile], sample_bytes: int, threshold: float, excluded: Path | None
) -> Iterator[str]:
    """Yield training documents: the first ones of each sampled file, up to its share. The files are sampled evenly over
    the source, at least 32 of them, with four times the bytes. From the hub, each is downloaded."""
    exclusion, files = excluded and load_exclusion(excluded), [file for file in files if not file.held_out]
    total = max(sum(file.size for file in files), 1)
    count = min(max(math.ceil(4 * sample_bytes / total * len(files)), SAMPLED), len(files))
    files = [files[i * len(files) // count] for i in range(count)]
    share = sample_bytes / max(sum(file.size for file in files), 1)
    for file in files:
        left = file.size * share
        for document in corpus.documents(file):
            if left <= 0:
                break
            if document.problem or hash_share(document.text) < threshold:
                continue
            texts = corpus.texts(document.text)
            if not (exclusion and exclusion.problem(document.text, texts)):
                left -= len(document.text)
                yield from texts

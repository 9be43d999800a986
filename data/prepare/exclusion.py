"""Documents excluded from training: those held out in separate files, and those that share 13 consecutive words with an
evaluation's texts, GPT-3's criterion of contamination (arXiv:2005.14165, appendix C)."""

import hashlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from jaxtyping import UInt64

from configs.files import write_whole
from data.prepare.corpus import Corpus
from data.record import hash_share

WORDS = 13


class Exclusion:
    """The texts to exclude."""

    def __init__(self, shares: np.ndarray, words: list[str], grams: UInt64[np.ndarray, "grams"], source: str):
        """Take `shares`: hashes of the held-out texts; `words`: of the n-grams, in the order of their numbers."""
        self.shares, self.grams, self.source = set(shares.tolist()), grams, source
        self.numbers = {word: i for i, word in enumerate(words, 1)}

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
    words = sorted({word for text in texts for word in _words(text)})
    numbers = {word: i for i, word in enumerate(words, 1)}
    grams = np.unique(np.concatenate([np.zeros(0, np.uint64), *(_grams(text, numbers) for text in texts)]))
    content = io.BytesIO()
    np.savez(
        content,
        shares=np.unique(shares),
        words=np.frombuffer("\n".join(words).encode(), np.uint8),
        grams=grams,
        source=np.frombuffer((evaluations.source if evaluations else "").encode(), np.uint8),
    )
    path = folder / f"excluded-{hashlib.sha256(content.getvalue()).hexdigest()[:32]}"
    folder.mkdir(exist_ok=True)
    write_whole(path, content.getvalue())
    return path


@cache
def load_exclusion(path: Path) -> Exclusion:
    with np.load(path) as file:
        words = file["words"].tobytes().decode().split("\n")
        return Exclusion(file["shares"], words, file["grams"], file["source"].tobytes().decode())


def _texts(evaluations: Corpus) -> Iterator[str]:
    """Yield the texts of evaluations: documents, and every string in lines of JSON."""
    for file in evaluations.files:
        for _, content in evaluations.contents(file):
            record = json.loads(content) if evaluations.is_lines(file) and content else content.decode()
            yield from _strings(record)


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

"""Bits per byte of text other than the run's own: the documents, the figures, and comparisons of two networks.

Documents are text, so networks with other tokenizers read the same. A document's tokens are cut into rows of its own,
each after a BOS. Every token counts once. So its figure depends on the document and the network only.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from data.dataset_folder import open_dataset
from data.prepare.corpus import Document
from data.prepare.listing import find_corpus
from data.prepare.selection import hash_share, text_lost
from evaluation.scorer import Question, Scorer
from evaluation.statistics import ratio, student_interval
from hosts.distributed import check_hosts_agree, on_every_process
from options.schema import DataConfig
from run.network import Network
from system.errors import UserError
from system.files import is_there


def read_documents(
    source: str, most: int, text_column: str, cache: Path, text_extensions: str = ""
) -> tuple[list[Document], int]:
    """Return documents with text, and the number of those without, which together are `most` or all. They are always
    the same: files of raw text are taken in the order of a hash of their names, and documents of a dataset are spread
    evenly over its held-out part. Raise UserError if no document has text."""
    is_dataset = is_there(Path(source).expanduser() / "dataset.json")
    documents = _held_out(source, most, cache) if is_dataset else _of_text(source, text_column, text_extensions)
    taken = list(islice(documents, most))
    kept = [document for document in taken if not document.problem]
    skipped = len(taken) - len(kept)
    if not kept:
        first = f", {taken[0].name} the first: {taken[0].problem}" if taken else ""
        raise UserError(f"--source={source} gives no document with text ({skipped} were skipped{first})")
    return kept, skipped


def _of_text(source: str, text_column: str, text_extensions: str) -> Iterator[Document]:
    corpus = find_corpus(source, text_column, on_error="skip", text_extensions=text_extensions)
    _require_text(source, corpus.conversations)
    for file in sorted(corpus.files, key=lambda file: hash_share(file.name)):
        yield from corpus.documents(file)


def _require_text(source: str, conversations: bool) -> None:
    if conversations:
        raise UserError(
            f"--source={source} is conversations, not text; a run on them has their loss and bits per byte: "
            "evaluate.py --run_dir=RUN"
        )


def _held_out(source: str, most: int, cache: Path) -> Iterator[Document]:
    """Yield a dataset's held-out documents, decoded by its own tokenizer."""
    dataset = open_dataset(source, DataConfig(source), 0, cache)
    _require_text(source, dataset.conversations)
    stream, starts = dataset.stream("val"), dataset.document_starts("val")
    ends = np.append(starts[1:], len(stream))
    count = min(most, len(starts))
    for i in (i * len(starts) // count for i in range(count)):
        ids = stream.read(int(starts[i]), int(ends[i]))
        text = dataset.tokenizer.decode(ids[int(ids[0] == dataset.tokenizer.bos) :].tolist())
        yield Document(f"held-out document {i}", text, "" if text else "empty")


def bits_of(network: Network, given: str, documents: Sequence[Document]) -> Float[np.ndarray, "documents"]:
    """Return the bits of each document. `given` names the network. Raise UserError if its tokenizer loses text: what
    it drops would cost no bits. Every process must call it."""
    tokenizer, scorer, texts = network.tokenizer, Scorer(network), [document.text for document in documents]

    def require_no_loss() -> None:
        named = {document.name: document.text for document in documents}
        if lost := text_lost(tokenizer, named, tokenizer.encode(texts)):
            raise UserError(f"the tokenizer of {given} loses text, so bits per byte would be wrong: {lost}")

    on_every_process("a tokenizer", require_no_loss)
    check_hosts_agree("their text", hashlib.sha256(json.dumps(texts).encode()).hexdigest())
    questions = []
    for number, ids in enumerate(tokenizer.encode(texts)):
        for start in range(0, len(ids), scorer.longest):
            row = np.array([tokenizer.bos, *ids[start : start + scorer.longest]], np.int32)
            questions.append(Question(number, [row], [(1, len(row))], 0))
    bits = np.zeros(len(documents))
    for question, scores in scorer(network.params, questions):
        bits[question.index] += np.sum(scores.losses, dtype=np.float64) / math.log(2)
    return bits


def figures(bits: Float[np.ndarray, "documents"], sizes: Sequence[int]) -> dict[str, Any]:
    """Return `bits_per_byte` of documents of these sizes together, and its standard error; None for one document."""
    value, error = ratio(bits.tolist(), sizes)
    return {"bits_per_byte": value, "stderr": error, "documents": len(sizes), "bytes": sum(sizes)}


def compared(
    ours: Float[np.ndarray, "documents"], theirs: Float[np.ndarray, "documents"], sizes: Sequence[int]
) -> dict[str, Any]:
    """Return the `difference` in bits per byte, ours less theirs, and its `interval` of 95% by Student's t; None for
    one document. It is paired by document, so a document that is hard for both does not widen the interval."""
    difference, error = ratio((ours - theirs).tolist(), sizes)
    interval = None if error is None else student_interval(difference, error, len(sizes))
    return {"difference": difference, "interval": interval}

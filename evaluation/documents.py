"""Documents to measure networks on, and their bits. They are text, so networks with other tokenizers read the same.
They come from raw text, from the held-out part of a dataset, or from several sources with their shares.

A document's tokens are cut into rows of its own, each after a BOS. Every token counts once. So its figure depends on
the document and the network only.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.schema import DataConfig, UserError
from data.dataset_folder import open_dataset
from data.mixture import mean_shares, read_source
from data.prepare.corpus import Document
from data.prepare.listing import find_corpus
from data.record import hash_share
from evaluation.item_log import ItemLog
from evaluation.network import Network
from evaluation.scorer import Question, Scorer


class Source(NamedTuple):
    """Some documents of one source."""

    name: str
    share: float
    """Weight of this source in the figure over all sources."""
    documents: list[Document]
    skipped: int
    """Documents without readable text."""


def read_sources(source: str, most: int, text_column: str, tokenizer: Path, cache: Path) -> list[Source]:
    """Return up to `most` documents of each source, always the same ones. Files of raw text are taken in the order of a
    hash of their names; documents of a dataset are spread evenly over its held-out part. `tokenizer`: for shards
    without a dataset.json. Raise UserError if a source gives none."""
    sources = []
    names, stages = read_source(source)
    for share, name in zip(mean_shares(stages), names):
        folder = Path(name).expanduser()
        if (folder / "dataset.json").exists():
            documents = _held_out(name, DataConfig(), most, cache)
        elif folder.is_dir() and any(folder.glob("*.bin")):
            documents = _held_out(name, DataConfig(tokenizer=str(tokenizer)), most, cache)
        else:
            documents = _of_text(name, text_column)
        skipped, kept = 0, []
        for document in islice(documents, most):
            skipped += bool(document.problem)
            kept += [] if document.problem else [document]
        if not kept:
            raise UserError(f"--source={name} gives no document with text ({skipped} were skipped)")
        sources.append(Source(name, share, kept, skipped))
    return sources


def _of_text(source: str, text_column: str) -> Iterator[Document]:
    corpus = find_corpus(source, text_column, on_error="skip")
    _require_text(source, corpus.conversations)
    for file in sorted(corpus.files, key=lambda file: hash_share(file.name)):
        yield from corpus.documents(file)


def _require_text(source: str, conversations: bool) -> None:
    if conversations:
        raise UserError(
            f"--source={source} is conversations, not text; a run on them has their loss and bits per byte: "
            "evaluate.py --run_dir=RUN"
        )


def _held_out(source: str, config: DataConfig, most: int, cache: Path) -> Iterator[Document]:
    """Return a dataset's held-out documents, decoded by its own tokenizer."""
    dataset = open_dataset(source, replace(config, source=source), 0, cache)
    _require_text(source, dataset.conversations)
    stream, starts = dataset.stream("val"), dataset.document_starts("val")
    ends = np.append(starts[1:], len(stream))
    count = min(most, len(starts))
    for i in (i * len(starts) // count for i in range(count)):
        ids = stream.read(int(starts[i]), int(ends[i]))
        text = dataset.tokenizer.decode(ids[int(ids[0] == dataset.tokenizer.bos) :].tolist())
        yield Document(f"held-out document {i}", text, "" if text else "empty")


def digest(sources: list[Source]) -> str:
    """Return a digest: equal ones mean equal texts, with equal shares."""
    facts = [(source.share, [(document.name, document.text) for document in source.documents]) for source in sources]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def measure_documents(network: Network, scorer: Scorer, sources: Sequence[Source], log: ItemLog) -> list[dict]:
    """Return a line for each document. Those in `log` are not measured again. Every process must call it."""
    finished = {(line["source"], line["document"]) for line in log.lines}
    for source in sources:
        left = [document for document in source.documents if (source.name, document.name) not in finished]
        lines = _lines(network, scorer, left) if left else ()
        log.extend({"source": source.name, **line} for line in lines)
    return log.lines


def _lines(network: Network, scorer: Scorer, documents: Sequence[Document]) -> Iterator[dict[str, Any]]:
    length, tokenizer = scorer.longest, network.tokenizer
    encoded = [np.array(ids, np.int32) for ids in tokenizer.encode([document.text for document in documents])]
    pieces = [(number, start) for number, ids in enumerate(encoded) for start in range(0, len(ids), length)]
    rows = [np.append(np.int32(tokenizer.bos), encoded[number][start : start + length]) for number, start in pieces]
    questions = [Question(i, [row], [(1, len(row))], 0) for i, row in enumerate(rows)]
    losses, missing = [np.zeros(len(ids)) for ids in encoded], [len(ids) for ids in encoded]
    for question, scores in scorer(network.params, questions):
        (number, start), count = pieces[question.index], len(question.rows[0]) - 1
        losses[number][start : start + count] = scores.losses[0, :count]
        missing[number] -= count
        if not missing[number]:
            yield _line(documents[number], losses[number] / math.log(2), tokenizer.token_bytes[encoded[number]], length)


def _line(document: Document, bits: np.ndarray, sizes: np.ndarray, length: int) -> dict[str, Any]:
    octaves = np.array([before.bit_length() for before in range(min(len(bits), length))], int)
    return {
        "document": document.name,
        "bytes": len(document.text.encode()),
        "tokens": len(bits),
        "bits": float(bits.sum()),
        "full": len(bits) >= length,
        # Of its first row, by the number of preceding tokens, in octaves: 0, 1, 2-3, 4-7, ...
        "bits_by_octave": np.bincount(octaves, bits[: len(octaves)]).tolist(),
        "bytes_by_octave": np.bincount(octaves, sizes[: len(octaves)]).tolist(),
    }

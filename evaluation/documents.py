"""Documents to measure networks on, as text, so that networks with other tokenizers read the same: of raw text, of the
held-out part of a dataset, or of several with their shares."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from configs.schema import DataConfig, UserError
from data.dataset_folder import open_dataset
from data.held_out import hash_share
from data.mixture import mean_shares, read_source
from data.prepare.corpus import Document
from data.prepare.listing import find_corpus


class Source(NamedTuple):
    """Some documents of one source."""

    name: str
    share: float
    """Of the figure of all sources."""
    documents: list[Document]
    skipped: int
    """Documents that were met and have no text, or none that can be read."""


def read_sources(source: str, most: int, text_column: str, tokenizer: Path, cache: Path) -> list[Source]:
    """Up to `most` documents of each source, always the same ones: of raw text, files in the order of a hash of their
    names; of a dataset, spread evenly over its held-out part. `tokenizer`: of shards that have no record of their own.
    UserError where a source gives none."""
    found = []
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
        found.append(Source(name, share, kept, skipped))
    return found


def _of_text(source: str, text_column: str) -> Iterator[Document]:
    corpus = find_corpus(source, text_column, on_error="skip")
    for file in sorted(corpus.files, key=lambda file: hash_share(file.name)):
        yield from corpus.documents(file)


def _held_out(source: str, config: DataConfig, most: int, cache: Path) -> Iterator[Document]:
    """A dataset's held-out documents, decoded by its own tokenizer."""
    dataset = open_dataset(source, replace(config, source=source), 0, cache)
    stream, starts = dataset.stream("val"), dataset.document_starts("val")
    ends = np.append(starts[1:], len(stream))
    count = min(most, len(starts))
    for i in (i * len(starts) // count for i in range(count)):
        ids = stream.read(int(starts[i]), int(ends[i]))
        text = dataset.tokenizer.decode(ids[int(ids[0] == dataset.tokenizer.bos) :].tolist())
        yield Document(f"held-out document {i}", text, "" if text else "empty")


def digest(sources: list[Source]) -> str:
    """Equal digests mean equal texts, with equal shares."""
    facts = [(source.share, [(document.name, document.text) for document in source.documents]) for source in sources]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

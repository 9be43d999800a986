"""Read the facts of datasets: documents, repeats, their packing into rows, and documents' names in the source."""

from collections.abc import Collection, Iterator
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Integer

from configs.messages import progress
from configs.schema import UserError
from data.dataset_folder import Dataset
from data.packing import FITS, learned, plan_rows
from data.prepare.corpus import Corpus
from data.prepare.listing import find_corpus
from data.record import read_record

AT_ONCE = 2**22  # tokens that are read at a time, or one document if that is longer


class Documents(NamedTuple):
    """The documents of one part of a dataset, in their order."""

    starts: Int[np.ndarray, "documents"]
    """Position of each in the stream of tokens."""
    tokens: Int[np.ndarray, "documents"]
    """Tokens of each, including its BOS."""
    bytes: Int[np.ndarray, "documents"]
    """Bytes of each document's text."""
    hashes: Integer[np.ndarray, "documents"]
    """64 bits of BLAKE2 over its tokens: documents with equal hashes count as equal."""
    learned: Int[np.ndarray, "documents"]
    """Tokens of each that are trained on: all, or an assistant's in a conversation."""


class Packed(NamedTuple):
    """The training documents packed into rows of `length` tokens."""

    rows: int
    padding: float
    """Share of the positions that no document fills."""
    cut: float
    """Share of the documents that would fit a row, but are cut in two."""
    seen: Float[np.ndarray, "length"]
    """Share of the targets that see at least 1, 2, ... tokens of their own document."""
    mean_seen: float


class Facts(NamedTuple):
    """The facts of one dataset."""

    dataset: Dataset
    train: Documents
    val: Documents
    repeats: Bool[np.ndarray, "documents"]
    """True for training documents that repeat an earlier one."""
    leaked: Bool[np.ndarray, "documents"]
    """True for held-out documents that are also trained on."""
    packed: dict[str, Packed]
    """By packing."""


def read_facts(dataset: Dataset, length: int) -> Facts:
    """Read all of the dataset, and plan rows of `length` tokens in every way that its documents may be packed."""
    train, val = (_documents(dataset, part) for part in ("train", "val"))
    repeats = np.ones(len(train.hashes), bool)
    repeats[np.unique(train.hashes, return_index=True)[1]] = False
    packings = [packing for packing in ("stream", *FITS) if (packing == "whole") == dataset.conversations]
    packed = {packing: _packed(dataset, train, packing, length) for packing in packings}
    return Facts(dataset, train, val, repeats, np.isin(val.hashes, train.hashes), packed)


def text_of(dataset: Dataset, part: str, document: int, documents: Documents, most: int = 300) -> str:
    """Return the beginning of a document's text."""
    start = int(documents.starts[document])
    ids = dataset.stream(part).read(start, start + min(most, int(documents.tokens[document])))
    return dataset.tokenizer.decode(ids[int(ids[0] == dataset.tokenizer.bos) :].tolist())


def _documents(dataset: Dataset, part: str) -> Documents:
    stream, starts = dataset.stream(part), dataset.document_starts(part)
    ends = np.append(starts[1:], len(stream))
    sizes, learns, hashes = np.zeros_like(starts), ends - starts, np.zeros(len(starts), np.uint64)
    first, bar = 0, progress(total=len(stream), unit="tokens", unit_scale=True, desc=f"{part} documents")
    while first < len(starts):
        last = max(int(np.searchsorted(ends, starts[first] + AT_ONCE, "right")), first + 1)
        tokens = stream.read(int(starts[first]), int(ends[last - 1])).astype(np.uint32)  # one type for all shards
        places = starts[first:last] - starts[first]
        sizes[first:last] = np.add.reduceat(dataset.tokenizer.token_bytes[tokens], places)
        if dataset.conversations:
            learns[first:last] = np.add.reduceat(learned(tokens, dataset.tokenizer.special_tokens), places, dtype=int)
        for i, ids in enumerate(np.split(tokens, places[1:]), first):
            hashes[i] = int.from_bytes(blake2b(ids.tobytes(), digest_size=8).digest(), "little")
        first = last
        bar.update(len(tokens))
    bar.close()
    return Documents(starts, ends - starts, sizes, hashes, learns)


def _packed(dataset: Dataset, documents: Documents, packing: str, length: int) -> Packed:
    stream, (starts, tokens) = dataset.stream("train"), documents[:2]
    if packing == "stream":
        rows = max(len(stream) - 1, 0) // length
        bounds = np.union1d(starts[starts < rows * length], np.arange(rows) * length)
        pieces = np.diff(bounds, append=rows * length)
        cut = starts // length != (starts + tokens - 1) // length
    else:
        headless = stream.read(0, 1).tolist() != [dataset.tokenizer.bos]
        plan = plan_rows(packing, starts, len(stream), length, headless)
        rows, pieces, cut = len(plan.rows) - 1, plan.lengths, np.zeros(len(starts), bool)
    targets = max(int(pieces.sum()), 1)
    # A piece of n tokens has one target that sees 1 token of it, one that sees 2, ... and one that sees n.
    at_least = np.cumsum(np.bincount(pieces, minlength=length + 1)[:0:-1])[::-1]
    seen = np.cumsum(at_least[::-1])[::-1] / targets
    fit = tokens <= length
    padding = 1 - targets / max(rows * length, 1)
    return Packed(rows, padding, float((cut & fit).sum() / max(fit.sum(), 1)), seen, float(seen.sum()))


def names_of(dataset: Dataset, beginnings: Collection[tuple[int, str]]) -> dict[tuple[int, str], str]:
    """Return documents' names by their texts' bytes and beginnings. Read the source, and return nothing if it is not on
    this machine or has changed."""
    by_size: dict[int, list[str]] = {}
    for size, beginning in beginnings:
        by_size.setdefault(size, []).append(beginning)
    names: dict[tuple[int, str], str] = {}
    for corpus in _sources(dataset):
        for file in progress(corpus.files, unit="files", desc="naming documents"):
            with suppress(UserError):  # a damaged file, which --max_files left out
                for document in corpus.documents(file):
                    text = "".join(corpus.texts(document.text)) if document.text else ""
                    size = len(text.encode())
                    for beginning in by_size.get(size, ()):
                        if text.startswith(beginning.rstrip("\ufffd")):  # the cut may be inside a letter
                            names.setdefault((size, beginning), document.name)
    return names


def _sources(dataset: Dataset) -> Iterator[Corpus]:
    """Yield the dataset's sources that are here and unchanged."""
    made_from = read_record(dataset.folder)["made_from"] if (dataset.folder / "dataset.json").exists() else {}
    for option, version in (("source", "version"), ("val_source", "val_version")):
        source = made_from.get(option, "")
        if source and "://" not in source and not source.startswith("hf:"):
            options = [made_from.get(name, "") for name in ("text_column", "separator", "text_extensions")]
            try:
                corpus = find_corpus(source, options[0], "skip", *options[1:], conversations=dataset.conversations)
            except UserError:  # the source is gone
                continue
            if corpus.version == made_from[version]:
                yield corpus

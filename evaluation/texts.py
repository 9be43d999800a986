"""Bits per byte of text other than the run's own: the documents, the figures, and comparisons of two networks.

Documents are text, so networks with other tokenizers read the same. A document's tokens are cut into rows of its own,
each after a BOS. Every token counts once. So its figure depends on the document and the network only.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from configs.schema import DataConfig, UserError
from data.dataset import read_source
from data.dataset_folder import hash_share, open_dataset
from data.prepare.corpus import Document
from data.prepare.listing import find_corpus
from evaluation.evaluator import ratio
from evaluation.network import Network
from evaluation.results import ItemLog, write_json
from evaluation.scorer import Question, Scorer
from hosts.distributed import check_hosts_agree

Lines = Sequence[Mapping[str, Any]]


class Source(NamedTuple):
    """Some documents of one source."""

    name: str
    share: float
    """Weight of this source in the figure over all sources."""
    documents: list[Document]
    skipped: int
    """Documents without readable text."""


class Measured(NamedTuple):
    """A network's results on the text. Its parameters are not kept."""

    given: str
    """The network's folder, as the user wrote it."""
    name: str
    facts: dict[str, Any]
    """The facts that the lines depend on."""
    folder: Path
    lines: list[dict]
    """One line for each document."""


def read_sources(source: str, most: int, text_column: str, cache: Path) -> list[Source]:
    """Return up to `most` documents of each source, always the same ones. Files of raw text are taken in the order of a
    hash of their names; documents of a dataset are spread evenly over its held-out part. Raise UserError if a source
    gives none."""
    sources = []
    for name, share in zip(*read_source(source)):
        is_dataset = (Path(name).expanduser() / "dataset.json").exists()
        documents = _held_out(name, most, cache) if is_dataset else _of_text(name, text_column)
        taken = list(islice(documents, most))
        kept = [document for document in taken if not document.problem]
        skipped = len(taken) - len(kept)
        if not kept:
            raise UserError(f"--source={name} gives no document with text ({skipped} were skipped)")
        sources.append(Source(name, float(share), kept, skipped))
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


def digest(sources: list[Source]) -> str:
    """Return a digest: equal ones mean equal texts, with equal shares."""
    facts = [(source.share, [(document.name, document.text) for document in source.documents]) for source in sources]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def measure_text(network: Network, given: str, sources: list[Source], out: str | Path) -> Measured:
    """Measure a network on the sources' documents, except those that an earlier start wrote to `out`. Raise UserError
    if its tokenizer loses text: what it drops would cost no bits. Every process must call it."""
    for source in sources:
        texts = {f"{document.name} of {source.name}": document.text for document in source.documents}
        if lost := network.tokenizer.text_lost(texts):
            raise UserError(f"the tokenizer of {given} loses text, so bits per byte would be wrong: {lost}")
    text, scorer = digest(sources), network.scorer()
    check_hosts_agree("their text", text)
    facts = {"tokenizer": network.tokenizer.sha256, "text": text} | scorer.facts | network.facts
    folder = Path(out) / "texts" / f"{network.label}_{text[:8]}"
    lines = measure_documents(network, scorer, sources, ItemLog(folder / "documents.jsonl", facts))
    return Measured(given, f"{given} ({network.title})", facts, folder, lines)


def measure_documents(network: Network, scorer: Scorer, sources: Sequence[Source], log: ItemLog) -> list[dict]:
    """Return a line for each document. Those in `log` are not measured again. Every process must call it."""
    finished = {(line["source"], line["document"]) for line in log}
    for source in sources:
        if left := [document for document in source.documents if (source.name, document.name) not in finished]:
            log.extend({"source": source.name, **line} for line in _lines(network, scorer, left))
    return log


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
            document, bits = documents[number], losses[number] / math.log(2)
            size = len(document.text.encode())
            yield {"document": document.name, "bytes": size, "tokens": len(bits), "bits": float(bits.sum())}


def results_of(sources: list[Source], ours: Measured, theirs: Measured | None) -> dict[str, Any]:
    """Return a network's figures, and a comparison with another one. Write them next to our lines."""

    def step(measured: Measured) -> dict[str, Any]:
        return {name: value for name, value in measured.facts.items() if name == "step"}

    results = {**step(ours), "skipped": sum(source.skipped for source in sources), **figures(sources, ours.lines)}
    first = jax.process_index() == 0
    if theirs:
        comparison = compared(sources, ours.lines, theirs.lines)
        results["against"] = {"run_dir": theirs.given, **step(theirs), **comparison}
        if first:
            print(in_words(ours.name, theirs.name, comparison), file=sys.stderr)
    if first:
        write_json(ours.folder / "bits_per_byte.json", {"text": ours.facts["text"], **results})
    return results


def in_words(name: str, other: str, comparison: dict[str, Any]) -> str:
    """Return a comparison as a sentence."""
    interval = comparison["interval"]
    reach = "one document has no interval" if interval is None else "95%: {:+.4f} to {:+.4f}".format(*interval)
    return f"{name} minus {other}: {comparison['difference']:+.4f} bits per byte; {reach}"


def figures(sources: Sequence[Source], lines: Lines) -> dict[str, Any]:
    """Return `bits_per_byte` of all sources by their shares, and of each source."""
    of_sources = {source.name: _sums([line for line in lines if line["source"] == source.name]) for source in sources}
    return {
        **_by_share(sources, [(of["bits_per_byte"], of["stderr"]) for of in of_sources.values()]),
        "documents": len(lines),
        "sources": {source.name: of_sources[source.name] | {"share": source.share} for source in sources},
    }


def _sums(lines: Lines) -> dict[str, Any]:
    of = {name: [line[name] for line in lines] for name in ("bytes", "tokens", "bits")}
    value, error = ratio(of["bits"], of["bytes"])
    counts = {"documents": len(lines), **{name: sum(of[name]) for name in ("bytes", "tokens")}}
    return {"bits_per_byte": value, "stderr": error, **counts}


def _by_share(sources: Sequence[Source], values: Sequence[tuple[float, float | None]]) -> dict[str, Any]:
    """Return the sources' figures together. There is no standard error if one of them has none."""
    errors = [error for _, error in values]
    known = [source.share * error for source, error in zip(sources, errors) if error is not None]
    return {
        "bits_per_byte": sum(source.share * value for source, (value, _) in zip(sources, values)),
        "stderr": math.hypot(*known) if len(known) == len(errors) else None,
    }


def compared(sources: Sequence[Source], ours: Lines, theirs: Lines) -> dict[str, Any]:
    """Return the `difference` in bits per byte, ours less theirs, and its `interval` of 95% by Student's t; None for
    one document. It is paired by document, so a document that is hard for both does not widen the interval."""
    from scipy.stats import t  # half a second to import

    other = {(line["source"], line["document"]): line["bits"] for line in theirs}
    values = []
    for source in sources:
        own = [line for line in ours if line["source"] == source.name]
        differences = [line["bits"] - other[source.name, line["document"]] for line in own]
        values.append(ratio(differences, [line["bytes"] for line in own]))
    together = _by_share(sources, values)
    difference, error = together["bits_per_byte"], together["stderr"]
    if error is None:
        return {"difference": difference, "interval": None}
    reach = float(t.ppf(0.975, min(len(source.documents) for source in sources) - 1)) * error
    return {"difference": difference, "interval": [difference - reach, difference + reach]}

"""Bits per byte of text other than the run's own: the figures, their errors, and comparisons of two networks."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from evaluation.bits_per_byte import ratio
from evaluation.documents import Source, digest, measure_documents
from evaluation.item_log import ItemLog, write_json
from evaluation.network import Network
from evaluation.pictures import plot_bits
from hosts.runtime import check_hosts_agree

Lines = Sequence[Mapping[str, Any]]


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


def measure_text(network: Network, given: str, sources: list[Source], out: str | Path) -> Measured:
    """Measure a network on the sources' documents, except those that an earlier start wrote to `out`. Every process
    must call it."""
    text, scorer = digest(sources), network.scorer()
    check_hosts_agree("their text", text)
    facts = {"tokenizer": network.tokenizer.sha256, "text": text} | scorer.facts | network.facts
    folder = Path(out) / "texts" / f"{network.label}_{text[:8]}"
    lines = measure_documents(network, scorer, sources, ItemLog(folder / "documents.jsonl", facts))
    return Measured(given, f"{given} ({network.title})", facts, folder, lines)


def results_of(sources: list[Source], ours: Measured, theirs: Measured | None) -> dict[str, Any]:
    """Return a network's figures, and a comparison with another one. Write them and a picture next to our lines."""
    step = lambda measured: {name: value for name, value in measured.facts.items() if name == "step"}
    curves = {one.name: figures(sources, one.lines) for one in (ours, theirs) if one}
    results = {**step(ours), "skipped": sum(source.skipped for source in sources), **curves[ours.name]}
    first = jax.process_index() == 0
    if theirs:
        same = all(ours.facts[name] == theirs.facts[name] for name in ("params_sha256", "tokenizer"))
        comparison = compared(sources, ours.lines, theirs.lines, same)
        results["against"] = {"run_dir": theirs.given, **step(theirs), **comparison}
        if first:
            print(in_words(ours.name, theirs.name, comparison), file=sys.stderr)
    if first:
        write_json(ours.folder / "bits_per_byte.json", {"text": ours.facts["text"], **results})
        plot_bits(curves, ", ".join(source.name for source in sources), ours.folder / "bits_per_byte.png")
    return {name: value for name, value in results.items() if not name.startswith("by_")}


def in_words(name: str, other: str, comparison: dict[str, Any]) -> str:
    """Return a comparison as a sentence."""
    difference, noise = comparison["difference"], comparison["noise"]
    verdict = "within noise" if noise else f"{name if difference < 0 else other} is better"
    verdict = "one document has no standard error" if noise is None else verdict
    verdict = "rounding, since the parameters are the same" if comparison["same_parameters"] else verdict
    return f"{name} less {other}: {difference:+.4f} bits per byte, {verdict}"


def figures(sources: Sequence[Source], lines: Lines) -> dict[str, Any]:
    """Return `bits_per_byte` of all sources by their shares, of each source, by the documents' size in bytes, and by a
    token's position in its row. Positions are given for all documents' first rows, and for documents that fill their
    first row, so that all positions count the same documents."""
    of_sources = {source.name: _sums([line for line in lines if line["source"] == source.name]) for source in sources}
    sizes = sorted({line["bytes"].bit_length() for line in lines})
    return {
        **_by_share(sources, [(of["bits_per_byte"], of["stderr"]) for of in of_sources.values()]),
        "documents": len(lines),
        "sources": {source.name: of_sources[source.name] | {"share": source.share} for source in sources},
        "by_bytes": [
            {"from": 1 << size - 1} | _sums([line for line in lines if line["bytes"].bit_length() == size])
            for size in sizes
        ],
        "by_position": _by_position(lines),
        "by_position_of_full_rows": _by_position([line for line in lines if line["full"]]),
    }


def _sums(lines: Lines) -> dict[str, Any]:
    value, error = ratio([line["bits"] for line in lines], [line["bytes"] for line in lines])
    counts = {name: sum(line[name] for line in lines) for name in ("bytes", "tokens")}
    return {"bits_per_byte": value, "stderr": error, "documents": len(lines), **counts}


def _by_position(lines: Lines) -> list[dict[str, Any]]:
    figures = []
    for octave in range(max((len(line["bits_by_octave"]) for line in lines), default=0)):
        there = [line for line in lines if len(line["bits_by_octave"]) > octave and line["bytes_by_octave"][octave]]
        if there:
            names = ("bits_by_octave", "bytes_by_octave")
            value, error = ratio(*([line[name][octave] for line in there] for name in names))
            first = (1 << octave) >> 1
            figures.append({"from": first, "bits_per_byte": value, "stderr": error, "documents": len(there)})
    return figures


def _by_share(sources: Sequence[Source], values: Sequence[tuple[float, float | None]]) -> dict[str, Any]:
    """Return the sources' figures together. There is no standard error if one of them has none."""
    errors = [error for _, error in values]
    known = [source.share * error for source, error in zip(sources, errors) if error is not None]
    return {
        "bits_per_byte": sum(source.share * value for source, (value, _) in zip(sources, values)),
        "stderr": math.hypot(*known) if len(known) == len(errors) else None,
    }


def compared(sources: Sequence[Source], ours: Lines, theirs: Lines, same: bool = False) -> dict[str, Any]:
    """Return the `difference` in bits per byte, ours less theirs. It is paired by document, so a document that is hard
    for both adds nothing to its standard error. `interval`: 95%, by Student's t. `noise`: the interval contains 0, or
    both are the `same` network and differ by rounding only."""
    from scipy.stats import t  # half a second to import

    bits = [{(line["source"], line["document"]): line["bits"] for line in lines} for lines in (ours, theirs)]
    values = []
    for source in sources:
        own = [line for line in ours if line["source"] == source.name]
        keys = [(source.name, line["document"]) for line in own]
        values.append(ratio([bits[0][key] - bits[1][key] for key in keys], [line["bytes"] for line in own]))
    all_sources = _by_share(sources, values)
    difference, error = all_sources["bits_per_byte"], all_sources["stderr"]
    result = {"difference": difference, "stderr": error, "interval": None, "noise": None}
    if error is not None:
        reach = float(t.ppf(0.975, min(len(source.documents) for source in sources) - 1)) * error
        interval = [difference - reach, difference + reach]
        result |= {"interval": interval, "noise": same or interval[0] <= 0 <= interval[1]}
    by_source = {source.name: {"difference": value, "stderr": error} for source, (value, error) in zip(sources, values)}
    return {"same_parameters": same, **result, "sources": by_source}

"""Bits per byte of other text than the run's own, and how two networks compare on it."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax

from evaluation.bits_per_byte import compared, figures
from evaluation.documents import Source, digest, measure_documents
from evaluation.item_log import ItemLog, write_json
from evaluation.network import Network
from evaluation.pictures import plot_bits
from hosts.runtime import check_hosts_agree


class Measured(NamedTuple):
    """What a network gives on the text. Its parameters are not kept."""

    given: str
    """Its folder, as a user names it."""
    name: str
    facts: dict[str, Any]
    """What the lines depend on."""
    folder: Path
    lines: list[dict]
    """One for each document."""


def measure_text(network: Network, given: str, sources: list[Source], out: str | Path) -> Measured:
    """Measure a network on the sources' documents, except those that an earlier start has left in `out`. Every process
    must call it."""
    text, scorer = digest(sources), network.scorer()
    check_hosts_agree("their text", text)
    facts = {"tokenizer": network.tokenizer.sha256, "text": text} | scorer.facts | network.facts
    folder = Path(out) / "texts" / f"{network.label}_{text[:8]}"
    lines = measure_documents(network, scorer, sources, ItemLog(folder / "documents.jsonl", facts))
    return Measured(given, f"{given} ({network.title})", facts, folder, lines)


def results_of(sources: list[Source], ours: Measured, theirs: Measured | None) -> dict[str, Any]:
    """Return a network's figures, and how another one compares. Write them, and a picture, beside our lines."""
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
    verdict = "no more than noise" if noise else f"{name if difference < 0 else other} is better"
    verdict = "one document has no standard error" if noise is None else verdict
    verdict = "rounding, since the parameters are the same" if comparison["same_parameters"] else verdict
    return f"{name} less {other}: {difference:+.4f} bits per byte, {verdict}"

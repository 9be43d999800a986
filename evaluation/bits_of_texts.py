"""Bits per byte from the lines of evaluation/document_losses.py: their standard errors over documents, what they depend
on, and how two networks compare on the same text."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from configs.files import write_whole
from evaluation.documents import Source

Lines = Sequence[Mapping[str, Any]]


def ratio(bits: Sequence[float], sizes: Sequence[float | int]) -> tuple[float, float | None]:
    """Sum of bits over sum of bytes, and its standard error over documents: that of a ratio of two sums (Cochran,
    Sampling Techniques, 1977, 6.3). None for a single document."""
    of, by = (np.array(values, np.float64) for values in (bits, sizes))
    value = float(of.sum() / by.sum())
    if len(of) < 2:
        return value, None
    residuals: Float[np.ndarray, "_"] = of - value * by
    return value, float(math.sqrt(len(of) / (len(of) - 1) * np.sum(residuals**2)) / by.sum())


def figures(sources: Sequence[Source], lines: Lines) -> dict[str, Any]:
    """`bits_per_byte` of all sources by their shares, of each source, by size of the documents in bytes, and by how
    many tokens stand before one in its row: of all documents' first rows, and of those of documents that fill it alone,
    where each position is of the same documents."""
    of_sources = {source.name: _whole([line for line in lines if line["source"] == source.name]) for source in sources}
    sizes = sorted({line["bytes"].bit_length() for line in lines})
    return {
        **_by_share(sources, [(of["bits_per_byte"], of["stderr"]) for of in of_sources.values()]),
        "documents": len(lines),
        "sources": {source.name: of_sources[source.name] | {"share": source.share} for source in sources},
        "by_bytes": [
            {"from": 1 << size - 1} | _whole([line for line in lines if line["bytes"].bit_length() == size])
            for size in sizes
        ],
        "by_position": _by_position(lines),
        "by_position_of_full_rows": _by_position([line for line in lines if line["full"]]),
    }


def _whole(lines: Lines) -> dict[str, Any]:
    value, error = ratio([line["bits"] for line in lines], [line["bytes"] for line in lines])
    counts = {name: sum(line[name] for line in lines) for name in ("bytes", "tokens")}
    return {"bits_per_byte": value, "stderr": error, "documents": len(lines), **counts}


def _by_position(lines: Lines) -> list[dict[str, Any]]:
    found = []
    for octave in range(max((len(line["bits_by_octave"]) for line in lines), default=0)):
        there = [line for line in lines if len(line["bits_by_octave"]) > octave and line["bytes_by_octave"][octave]]
        if there:
            names = ("bits_by_octave", "bytes_by_octave")
            value, error = ratio(*([line[name][octave] for line in there] for name in names))
            first = (1 << octave) >> 1
            found.append({"from": first, "bits_per_byte": value, "stderr": error, "documents": len(there)})
    return found


def _by_share(sources: Sequence[Source], values: Sequence[tuple[float, float | None]]) -> dict[str, Any]:
    """The sources' figures together. No standard error where one of them has none."""
    errors = [error for _, error in values]
    known = [source.share * error for source, error in zip(sources, errors) if error is not None]
    return {
        "bits_per_byte": sum(source.share * value for source, (value, _) in zip(sources, values)),
        "stderr": math.hypot(*known) if len(known) == len(errors) else None,
    }


def compared(sources: Sequence[Source], ours: Lines, theirs: Lines, same: bool = False) -> dict[str, Any]:
    """Return the `difference` in bits per byte, ours less theirs, paired by document: what makes a document hard for
    both is no part of its standard error. `interval`: 95%, by Student's t; `noise`: it holds 0, or both are the `same`
    network, which differs by rounding alone."""
    from scipy.stats import t  # half a second to import

    bits = [{(line["source"], line["document"]): line["bits"] for line in lines} for lines in (ours, theirs)]
    values = []
    for source in sources:
        own = [line for line in ours if line["source"] == source.name]
        keys = [(source.name, line["document"]) for line in own]
        values.append(ratio([bits[0][key] - bits[1][key] for key in keys], [line["bytes"] for line in own]))
    whole = _by_share(sources, values)
    difference, error = whole["bits_per_byte"], whole["stderr"]
    result = {"difference": difference, "stderr": error, "interval": None, "noise": None}
    if error is not None:
        reach = float(t.ppf(0.975, min(len(source.documents) for source in sources) - 1)) * error
        interval = [difference - reach, difference + reach]
        result |= {"interval": interval, "noise": same or interval[0] <= 0 <= interval[1]}
    by_source = {source.name: {"difference": value, "stderr": error} for source, (value, error) in zip(sources, values)}
    return {"same_parameters": same, **result, "sources": by_source}


def in_words(name: str, other: str, comparison: Mapping[str, Any]) -> str:
    """A comparison in a sentence."""
    if comparison["same_parameters"]:
        return f"{name} and {other} have the same parameters; {comparison['difference']:+.1g} bits per byte is rounding"
    if comparison["interval"] is None:
        return f"{name} less {other}: {comparison['difference']:+.4f} bits per byte; one document tells no error"
    low, high = comparison["interval"]
    better = name if comparison["difference"] < 0 else other
    verdict = "no more than noise" if comparison["noise"] else f"{better} is better"
    between = f"between {low:+.4f} and {high:+.4f} with 95% confidence"
    return f"{name} less {other}: {comparison['difference']:+.4f} bits per byte, {between}: {verdict}"


def plot(results: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw each run's bits per byte against the size of documents, and against the position in the row."""
    from matplotlib.figure import Figure  # a second to import

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = {"by_bytes": "bytes of a document", "by_position": "tokens before one in its row"}
    for axes, (panel, label) in zip(figure.subplots(1, 2), panels.items()):
        for i, (name, result) in enumerate(results.items()):
            curves = {name: (result[panel], "-")}
            full = result["by_position_of_full_rows"]
            if panel == "by_position" and full not in ([], result[panel]):
                curves[f"{name}, full rows"] = (full, ":")
            for legend, (points, style) in curves.items():
                errors = [2 * (point["stderr"] or 0) for point in points]
                places, values = ([point[key] for point in points] for key in ("from", "bits_per_byte"))
                looks = {"fmt": f"o{style}", "color": f"C{i}", "ms": 3, "capsize": 2}
                axes.errorbar(places, values, yerr=errors, label=legend, **looks)
        octaves = sorted({point["from"] for result in results.values() for point in result[panel]})
        axes.set_xscale("symlog" if panel == "by_position" else "log", base=2)
        axes.set_xticks(octaves, [str(octave) for octave in octaves], fontsize="small")
        axes.minorticks_off()
        axes.set_xlabel(f"{label}: from this number up to twice as many", fontsize="small")
        axes.set_ylabel("bits per byte, 2 standard errors")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=100)
    write_whole(path, content.getvalue())

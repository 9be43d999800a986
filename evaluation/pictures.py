"""Pictures of evaluations."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_accuracies(points: Mapping[str, tuple[float, float | None, float]], title: str, path: Path) -> None:
    """Draw each task's accuracy with two standard errors to both sides, against the accuracy of guessing."""
    from matplotlib.figure import Figure  # a second to import

    labels = list(points)[::-1]
    accuracy, errors, guessing = zip(*(points[label] for label in labels))
    figure = Figure(figsize=(7, 1.2 + 0.28 * len(labels)), layout="constrained")
    axes = figure.add_subplot()
    both = [2 * (error or 0) for error in errors]
    axes.errorbar(accuracy, labels, xerr=both, fmt="o", capsize=3, label="accuracy, 2 standard errors")
    axes.plot(guessing, labels, "|", color="black", markersize=14, label="guessing")
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.7, len(labels) - 0.3), xlabel="accuracy", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    _save(figure, path, 150)


def plot_bits(results: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
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
    _save(figure, path, 100)


def _save(figure: "Figure", path: Path, dpi: int) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi)
    write_whole(path, content.getvalue())

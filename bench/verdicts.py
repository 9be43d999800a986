"""Show comparisons of bench.compare: a verdict, text, a table and a picture."""

from pathlib import Path
from typing import Any

from bench.paired import LEVEL
from configs.files import write_picture

AXES = ("tokens", "FLOPs", "seconds")
HELD_OUT_ROWS, FIRST_ROWS = "held-out rows", "the first rows of documents"


def verdict(of: dict[str, Any], at: str, most_seeds: int) -> str:
    """Return a comparison's verdict as a sentence."""
    axis, names = of["axes"][at], f"{of['recipe']} minus {of['first']}"
    if of["seeds"] == 1:
        return f"{names}: no verdict on the recipes, since there is one seed."
    where = f"at equal {at}, {shown(axis)} bits per byte of {of['text']}"
    how = f"{where} over {of['seeds']} seeds, p = {axis['p_corrected']:.2g}"
    if axis["p_corrected"] > LEVEL:
        spent = "after all seeds" if of["seeds"] == most_seeds else "so far"
        return f"{names}: no difference is shown {spent} {how}."
    return f"{of['recipe']} is {'better' if axis['difference'] < 0 else 'worse'} than {of['first']} {how}."


def shown(of: dict[str, Any]) -> str:
    """Return a difference with its interval."""
    ends = "[{:+.4f}, {:+.4f}]".format(*of["interval"]) if of["interval"] else "(no interval: one seed)"
    return f"{of['difference']:+.4f} {ends}"


def in_words(of: dict[str, Any], comparisons: int) -> str:
    """Return a comparison for a terminal."""
    lines = [f"{of['recipe']} minus {of['first']}, bits per byte of {of['text']}, 95% intervals"]
    for name, axis in of["axes"].items():
        seeds = " ".join(f"{value:+.4f}" for value in axis["by_seed"])
        line = f"  equal {name:<8} {shown(axis)}  p {axis['p_corrected']:.2g}  by seed: {seeds}"
        share, cut = min(zip(axis["shares_of_runs"], (of["first"], of["recipe"])))
        line += f"  ({cut} after {share:.0%} of its run)" if share < 0.995 else ""
        if name == "seconds" and of["seconds_not_comparable"]:
            line += f"  NOT COMPARABLE: {of['seconds_not_comparable']}"
        lines.append(line)
    if documents := of["documents"]:
        about = "of these networks, not of the recipes"
        lines.append(f"  over {documents['documents']} documents {shown(documents)}: {about}")
    return "\n".join([*lines, f"  {of['verdict']}", f"  p is corrected for {comparisons} comparison(s)."])


def as_table(compared: dict[str, Any]) -> str:
    """Return the comparisons as a table in Markdown."""
    at, comparisons = compared["at"], compared["comparisons"]
    lines = [f"| minus `{comparisons[0]['first']}` | bits per byte at equal {at}, 95% interval | corrected p | seeds |"]
    lines.append("| --- | --- | --- | --- |")
    for of in comparisons:
        about = "" if of["text"] == HELD_OUT_ROWS else f", of {of['text']}"
        p = of["axes"][at]["p_corrected"]
        lines.append(f"| `{of['recipe']}` | {shown(of['axes'][at])}{about} | {p:.2g} | {of['seeds']} |")
    return "\n".join(lines) + "\n"


def draw(compared: dict[str, Any], path: Path) -> None:
    """Draw each comparison's interval and seeds, for each axis."""
    from matplotlib.figure import Figure  # a second to import

    comparisons = compared["comparisons"]
    figure = Figure(figsize=(8, 1.2 + 0.9 * len(comparisons)), layout="constrained")
    panel = figure.add_subplot()
    for j, name in enumerate(AXES):
        panel.plot([], [], "o", color=f"C{j}", label=f"equal {name}")
    for i, of in enumerate(comparisons):
        for j, (name, axis) in enumerate(of["axes"].items()):
            if name == "seconds" and of["seconds_not_comparable"]:
                continue
            place, color = i + 0.25 * (j - 1), f"C{j}"
            panel.plot(axis["by_seed"], [place] * of["seeds"], "|", color=color, markersize=9)
            panel.plot(axis["difference"], place, "o", color=color)
            if axis["interval"]:
                panel.plot(axis["interval"], [place, place], color=color)
    panel.axvline(0, color="black", linewidth=1)
    panel.set_yticks(range(len(comparisons)), [of["recipe"].replace(" --", "\n--") for of in comparisons])
    panel.set_ylim(len(comparisons) - 0.5, -0.5)
    panel.set_xlabel(f"bits per byte, minus {comparisons[0]['first']}; 95% intervals, a tick for each seed")
    panel.grid(alpha=0.3, axis="x")
    panel.legend(fontsize="small")
    write_picture(path, figure)

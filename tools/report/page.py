"""Write a report as one self-contained HTML page: it needs no network, no server and no other file."""

import time
from collections.abc import Sequence
from html import escape
from itertools import count
from typing import Any

from tools.report.comparison import as_text, compared, differences
from tools.report.figures import axes, figures
from tools.report.html_parts import FOLDER, details, document, in_script, place, table
from tools.report.plots import Figure
from tools.report.runs import AXES, Run, number
from tools.report.sentences import sentences

SHOWN_SPIKES = 20  # only the newest, since each has texts


def contents(runs: list[Run], now: float, comparisons: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the page's contents as JSON: sections of HTML by their ids, and the plots for page.js. `comparisons`:
    those of bench.compare."""
    plots = figures(runs)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return {
        "title": ", ".join(run.name for run in runs),
        "sections": {
            "made": escape(f"Made {when} from {', '.join(str(run.folder) for run in runs)}"),
            "recipes": "".join(map(_recipes, comparisons)),
            "know": _know(runs, now),
            "differences": _differences(runs),
            "missing": _missing(plots),
            "spikes": "".join(map(_spikes, runs)) or "<p>The loss of no logged step jumped.</p>",
            "samples": "".join(map(_samples, count(), runs)) or "<p>None were made yet.</p>",
            "machines": "".join(map(_machine, count(), runs)),
        },
        "figures": [figure._asdict() for figure in plots if figure.traces],
        "axes": [axes(run) for run in runs],
        "axis_names": AXES,
    }


def page(shown: dict[str, Any], follow: int = 0) -> str:
    """Return the page that shows `contents`. `follow`: seconds between two requests for newer ones, or 0."""
    section = lambda id: f'<div id="{id}">{shown["sections"][id]}</div>'
    choice = "".join(
        f'<label><input type="radio" name="axis" value="{axis}"{" checked" * (axis == "tokens")}> {name}</label>'
        for axis, name in AXES.items()
    )
    body = f"""{section("recipes")}{section("know")}{section("differences")}
<h2>Course</h2><div class="axis"><span class="muted">against&ensp;</span>{choice}
<span class="muted">Drag to zoom, double-click to go back, click a name to hide its line.</span></div>
<div class="plots">{"".join(map(place, shown["figures"]))}</div>{section("missing")}
<h2>Jumps of the loss</h2>{section("spikes")}
<h2>Samples</h2>{section("samples")}
<h2>Machine, versions and options</h2>{section("machines")}"""
    script = f"let report = {in_script(shown)}; const follow = {follow};\n{(FOLDER / 'page.js').read_text()}"
    return document(shown["title"], shown["sections"]["made"], body, script)


def _recipes(pair: dict[str, Any]) -> str:
    """Return a comparison of bench.compare."""
    ends = lambda of: "[{:+.4f}, {:+.4f}]".format(*of["interval"]) if of["interval"] else ""
    rows = [
        [f"equal {name}", f"{of['difference']:+.4f}", ends(of), f"{of['p_corrected']:.2g}"]
        for name, of in pair["axes"].items()
    ]
    if why := pair["seconds_not_comparable"]:
        rows[-1][1:] = [f"not comparable: {why}", "", ""]
    if of := pair["documents"]:
        rows.append([f"these networks, over {of['documents']} documents", f"{of['difference']:+.4f}", ends(of), ""])
    title = f"<h2>{escape(pair['recipe'])} minus {escape(pair['first'])}</h2><p>{escape(pair['verdict'])}</p>"
    return title + table(["", "bits per byte", "95% interval", "corrected p"], rows)


def _know(runs: list[Run], now: float) -> str:
    parts = [("Comparison", compared(runs))] if len(runs) > 1 else []
    parts += [(run.name if len(runs) > 1 else "What to know", sentences(run, now)) for run in runs]
    mark = ' class="heed"'
    item = lambda sentence: f"<li{mark * sentence.heed}>{escape(sentence.text)}</li>"
    return "".join(f"<h2>{escape(title)}</h2><ul>{''.join(map(item, group))}</ul>" for title, group in parts)


def _differences(runs: list[Run]) -> str:
    rows = [[name, *values] for name, values in differences(runs).items()]
    return f"<h2>What differs</h2>{table(['option', *(run.name for run in runs)], rows)}" if rows else ""


def _missing(plots: list[Figure]) -> str:
    """Return a sentence for each reason why plots are not drawn."""
    by_reason: dict[str, list[str]] = {}
    for plot in plots:
        if not plot.traces:
            by_reason.setdefault(plot.missing, []).append(plot.title)
    return "".join(
        f'<p class="muted">Not drawn without {escape(reason)}: {escape(", ".join(dict.fromkeys(titles)))}.</p>'
        for reason, titles in by_reason.items()
    )


def _spikes(run: Run) -> str:
    parts = []
    for i, (step, facts) in enumerate(run.spikes[-SHOWN_SPIKES:]):
        loss, usual = (number(facts, name) for name in ("loss", "median"))
        loss, usual = ("unknown" if value is None else f"{value:.4f}" for value in (loss, usual))
        command = f"python -m tools.dataset {run.folder} --step={step - 1}"
        shown = _texts(facts.get("texts") or []) + f"<p>More of it: <code>{escape(command)}</code></p>"
        title = f"{run.name}, step {step:,}: a jump to {loss} from a median of {usual}"
        parts.append(details(title, shown, f"spike-{i}-{step}"))
    return "".join(parts)


def _samples(position: int, run: Run) -> str:
    samples = {line["step"]: line["samples"] for line in run.lines if line.get("samples")}
    return "".join(
        details(f"{run.name}, step {step:,}", _texts(samples[step]), f"sample-{position}-{step}", step == max(samples))
        for step in sorted(samples, reverse=True)
    )


def _texts(texts: list[str]) -> str:
    return "".join(f"<pre>{escape(text)}</pre>" for text in texts)


def _machine(position: int, run: Run) -> str:
    listed = lambda facts: ", ".join(f"{name} {value}" for name, value in run.record[facts].items())
    facts = [["devices", listed("devices")], ["versions", listed("versions")]]
    facts += [["dataset (fingerprint)", run.record["dataset"]]]
    facts += [[f"change {i}", "; ".join(map(str, change))] for i, change in enumerate(run.record["changes"], 1)]
    options = [[name, as_text(value)] for name, value in run.options.items()]
    all_options = details("All options", table([], options), f"options-{position}")
    return f"<h3>{escape(run.name)}</h3>{table([], facts)}{all_options}"

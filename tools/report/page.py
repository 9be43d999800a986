"""A report as one HTML page that needs nothing else: no network, no server, no other file."""

import json
import time
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from tools.report.comparison import compared, differences
from tools.report.figures import axes, figures
from tools.report.runs import AXES, Run
from tools.report.sentences import Sentence, sentences

HERE = Path(__file__).parent
SHOWN_SPIKES = 20  # the newest; each has texts


def contents(runs: list[Run], now: float) -> dict[str, Any]:
    """What the page shows, as JSON can hold it: sections of HTML by their ids, and what page.js draws."""
    found = figures(runs)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    return {
        "title": ", ".join(run.name for run in runs),
        "sections": {
            "made": escape(f"Made {when} from {', '.join(str(run.folder) for run in runs)}"),
            "know": _know(runs, now),
            "differences": _differences(runs),
            "missing": _missing({figure.title: figure.missing for figure in found if not figure.traces}),
            "spikes": "".join(_spikes(run) for run in runs) or "<p>The loss of no logged step jumped.</p>",
            "samples": "".join(_samples(run, i) for i, run in enumerate(runs)) or "<p>None were made yet.</p>",
            "machines": "".join(_machine(run, i) for i, run in enumerate(runs)),
        },
        "figures": [figure._asdict() for figure in found if figure.traces],
        "axes": [axes(run) for run in runs],
        "axis_names": AXES,
    }


def page(shown: dict[str, Any], follow: int = 0) -> str:
    """The page that shows `contents`; `follow`: it looks for newer ones at its server every so many seconds."""
    section = lambda id: f'<div id="{id}">{shown["sections"][id]}</div>'
    plots = "".join(map(place, shown["figures"]))
    choice = "".join(
        f'<label><input type="radio" name="axis" value="{axis}"{" checked" * (axis == "tokens")}> {name}</label>'
        for axis, name in AXES.items()
    )
    data = json.dumps(shown, allow_nan=False).replace("<", "\\u003c")  # no text of a run ends the script
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(shown["title"])}</title><link rel="icon" href="data:,">
<style>{(HERE / "page.css").read_text()}</style>
<script>{get_plotlyjs()}</script></head>
<body><h1>{escape(shown["title"])}</h1><p class="muted" id="made">{shown["sections"]["made"]}</p>
{section("know")}{section("differences")}
<h2>Course</h2><div class="axis"><span class="muted">against&ensp;</span>{choice}
<span class="muted">Drag to zoom, double-click to go back, click a name to hide its line.</span></div>
<div class="plots">{plots}</div>{section("missing")}
<h2>Jumps of the loss</h2>{section("spikes")}
<h2>Samples</h2>{section("samples")}
<h2>Machine, versions and options</h2>{section("machines")}
<script>let report = {data}; const follow = {follow};
{(HERE / "page.js").read_text()}</script></body></html>
"""


def place(figure: dict[str, Any]) -> str:
    """Where the page draws a figure; its height grows with the names in its legend, so that the plot keeps its room."""
    names = figure["layout"]["showlegend"] and sum(trace.get("showlegend", True) for trace in figure["traces"])
    return (
        f"<section{' class=wide' * (figure['id'] == 'loss')}><h3>{escape(figure['title'])} "
        f"<span>{escape(figure['about'])}</span></h3>"
        f'<div class="plot" id="{figure["id"]}" style="--names: {int(names)}"></div></section>'
    )


def _know(runs: list[Run], now: float) -> str:
    parts = [("Beside each other", compared(runs))] if len(runs) > 1 else []
    parts += [(run.name if len(runs) > 1 else "What to know", sentences(run, now)) for run in runs]
    return "".join(f"<h2>{escape(title)}</h2>{_list(said)}" for title, said in parts)


def _list(said: list[Sentence]) -> str:
    marks = {True: ' class="heed"', False: ""}
    return "<ul>" + "".join(f"<li{marks[sentence.heed]}>{escape(sentence.text)}</li>" for sentence in said) + "</ul>"


def _differences(runs: list[Run]) -> str:
    rows = differences(runs)
    if not rows:
        return ""
    shown = table(["option", *(run.name for run in runs)], [[name, *values] for name, values in rows.items()])
    return f"<h2>What differs</h2>{shown}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """HTML of a table; without a head where all its cells are empty."""
    cells = lambda kind, row: "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row)
    top = f"<tr>{cells('th', head)}</tr>" if any(head) else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{top}{body}</table></div>'


def _missing(reasons: dict[str, str]) -> str:
    """What is not drawn, in a sentence for each reason."""
    by_reason = {reason: [title for title, of in reasons.items() if of == reason] for reason in reasons.values()}
    return "".join(
        f'<p class="muted">Not drawn, for want of {escape(reason)}: {escape(", ".join(titles))}.</p>'
        for reason, titles in by_reason.items()
    )


def _spikes(run: Run) -> str:
    parts = []
    for i, spike in enumerate(run.spikes[-SHOWN_SPIKES:]):
        loss, usual = (f"{value:.4f}" if value is not None else "unknown" for value in (spike.loss, spike.median))
        where = f"back to step {spike.step:,}, for a jump" if spike.rolled_back else f"step {spike.step:,}: a jump"
        batch = f", in batch {spike.batch:,}" if spike.batch is not None else ""
        shown = "".join(f"<pre>{escape(text)}</pre>" for text in spike.texts)
        if not spike.rolled_back:
            command = f"python -m tools.dataset {run.folder} --step={spike.step - 1}"
            shown += f"<p>More of it: <code>{escape(command)}</code></p>"
        summary = escape(f"{run.name}, {where} to {loss} from a median of {usual}{batch}")
        parts.append(f'<details id="spike-{i}-{spike.step}"><summary>{summary}</summary>{shown}</details>')
    return "".join(parts)


def _samples(run: Run, number: int) -> str:
    parts = []
    for step, texts in reversed(run.samples):
        shown = "".join(f"<pre>{escape(text)}</pre>" for text in texts)
        opened = "" if parts else " open"
        summary = f"{escape(run.name)}, step {step:,}"
        parts.append(f'<details id="sample-{number}-{step}"{opened}><summary>{summary}</summary>{shown}</details>')
    return "".join(parts)


def _machine(run: Run, number: int) -> str:
    devices, versions = run.record.get("devices") or {}, run.record.get("versions") or {}
    facts = {
        "devices": ", ".join(f"{name} {value}" for name, value in devices.items()),
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
        "dataset (fingerprint)": str(run.record.get("dataset")),
    }
    changes = [[f"change {i}", "; ".join(map(str, each))] for i, each in enumerate(run.record.get("changes") or (), 1)]
    options = [[name, value if isinstance(value, str) else json.dumps(value)] for name, value in run.options.items()]
    return (
        f"<h3>{escape(run.name)}</h3>{table([], [list(fact) for fact in facts.items()] + changes)}"
        f'<details id="options-{number}"><summary>All options</summary>{table([], options)}</details>'
    )

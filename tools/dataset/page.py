"""Write the facts of datasets as a page like tools.report's."""

import time
from html import escape
from itertools import cycle
from typing import Any

import numpy as np

from data.mixture import Mixture
from data.record import read_record
from tools.dataset.facts import Facts, names_of, text_of
from tools.report.html_parts import details, document, in_script, place, table
from tools.report.plots import COLORS, DASHES, Figure, plot_layout, short, stacked_bars
from tools.report.sentences import percent

EXAMPLES = 8  # documents of each kind whose beginnings are shown
POINTS = 200  # of a curve
PACKING = (
    "In rows of {length} tokens. Cut: documents that would fit a row, but are in two. Padding: positions that no "
    "document fills. Own tokens: how many tokens of its own document a target sees on average; without "
    "--data.mask_documents it sees the earlier documents of its row, too."
)


def dataset_page(names: list[str], datasets: list[Facts], length: int, mixture: Mixture | None, tokens: int) -> str:
    """Return the page of datasets by these names. `mixture`: a run's, on `tokens` tokens, with rows of `length`."""
    facts = dict(zip(names, datasets))
    plots = [_lengths(facts), _bytes(facts), _split(facts), _seen(facts)]
    if mixture and len(names) > 1:
        plots += [_shares(names, mixture, length, tokens)]
    if mixture:
        plots += [_epochs(facts, mixture, length, tokens)]
    where = ", ".join(f"{each.dataset.folder} (fingerprint {each.dataset.fingerprint})" for each in datasets)
    drawn = [plot._asdict() for plot in plots]
    body = f"""<h2>Sources</h2>{_sources(facts)}
<div class="plots">{"".join(map(place, drawn))}</div>
<h2>What packing costs</h2><p class="muted">{escape(PACKING.format(length=f"{length:,}"))}</p>{_packing(facts)}
<h2>Documents</h2>{"".join(_examples(name, each) for name, each in facts.items())}"""
    script = f"""for (const plot of {in_script(drawn)})
  Plotly.newPlot(plot.id, plot.traces, plot.layout, {{ displayModeBar: false, responsive: true }});"""
    made = escape(f"Made {time.strftime('%Y-%m-%d %H:%M:%S')} from {where}")
    return document(", ".join(names), made, body, script)


def _sources(facts: dict[str, Facts]) -> str:
    head = ["", "documents", "tokens", "bytes", "bytes a token", "learned", "held out", "repeat another", "in both"]
    rows = []
    for name, (_, train, val, repeats, leaked, _) in facts.items():
        tokens, text = train.tokens.sum() + val.tokens.sum(), train.bytes.sum() + val.bytes.sum()
        sizes = [len(train.tokens) + len(val.tokens), tokens, text]
        row = [name, *(f"{size:,}" for size in sizes), f"{text / tokens:.3f}"]
        row += [percent((train.learned.sum() + val.learned.sum()) / tokens)]
        row += [f"{len(val.tokens):,} ({percent(val.tokens.sum() / tokens)} of the tokens)"]
        row += [f"{repeats.sum():,} ({percent(train.tokens[repeats].sum() / train.tokens.sum())} of the tokens)"]
        rows.append([*row, f"{leaked.sum():,}"])
    first, *facts_by_row = map(list, zip(head, *rows))  # a column per dataset fits a narrow page
    return table(first, facts_by_row) + "".join(_origin(name, each) for name, each in facts.items())


def _origin(name: str, facts: Facts) -> str:
    folder, tokenizer = facts.dataset.folder, facts.dataset.tokenizer
    known = f"{name}: a tokenizer of {tokenizer.vocab_size:,} tokens"
    if (folder / "dataset.json").exists():
        record = read_record(folder)
        skipped = ", ".join(f"{count:,} {why}" for why, count in record.get("skipped", {}).items()) or "nothing"
        known += f"; made from {record['made_from']['source']}; skipped: {skipped}"
    return f"<p>{escape(known)}.</p>"


def _packing(facts: dict[str, Facts]) -> str:
    rows = []
    for name, each in facts.items():
        for packing, packed in each.packed.items():
            sizes = [f"{packed.rows:,}", percent(packed.padding), percent(packed.cut), f"{packed.mean_seen:,.0f}"]
            rows.append([f"{name}, {packing}", *sizes])
    return table(["", "rows", "padding", "cut", "own tokens"], rows)


def _examples(name: str, facts: Facts) -> str:
    """Return the beginnings of notable documents: the longest, those with the most and fewest bytes per token, the most
    repeated ones, and those both trained on and held out."""
    train, val = facts.train, facts.val
    ratio = train.bytes / train.tokens
    _, first, copies = np.unique(train.hashes, return_index=True, return_counts=True)
    repeated = [i for i in np.argsort(-copies, kind="stable")[:EXAMPLES] if copies[i] > 1]
    in_ratio = lambda order: {int(i): f"{ratio[i]:.2f} bytes a token" for i in order[:EXAMPLES]}
    in_tokens = lambda documents, order: {int(i): f"{documents.tokens[i]:,} tokens" for i in order[:EXAMPLES]}
    often = {int(first[i]): f"{copies[i]:,} times, {train.tokens[first[i]]:,} tokens each" for i in repeated}
    groups = [
        ("the longest", "train", in_tokens(train, np.argsort(-train.tokens))),
        ("most bytes a token", "train", in_ratio(np.argsort(-ratio))),
        ("fewest bytes a token", "train", in_ratio(np.argsort(ratio))),
        ("the most repeated", "train", often),
        ("held out, but trained on too", "val", in_tokens(val, np.flatnonzero(facts.leaked))),
    ]
    parts = {"train": train, "val": val}
    beginnings = {
        (part, i): (int(parts[part].bytes[i]), text_of(facts.dataset, part, i, parts[part]))
        for _, part, chosen in groups
        for i in chosen
    }
    names, shown = names_of(facts.dataset, set(beginnings.values())), ""
    for n, (kind, part, chosen) in enumerate(groups):
        texts = ""
        for i, about in chosen.items():
            file = names.get(beginnings[part, i], "file not known: the source is not here, or has changed")
            texts += f"<p>{escape(about)}: {escape(file)}</p><pre>{escape(beginnings[part, i][1])}</pre>"
        shown += details(f"{name}, {kind}", texts, f"{name}-{n}") if chosen else ""
    return shown


def _lengths(facts: dict[str, Facts]) -> Figure:
    longest = max(int(each.train.tokens.max()) for each in facts.values())
    bins = np.geomspace(1, longest + 1, 60)
    traces = []
    for (name, each), color in zip(facts.items(), cycle(COLORS)):
        tokens = each.train.tokens
        traces.append(_steps(f"{name}, documents", np.histogram(tokens, bins)[0], bins, color, DASHES[0]))
        traces.append(_steps(f"{name}, tokens", np.histogram(tokens, bins, weights=tokens)[0], bins, color, DASHES[2]))
    layout = _layout("tokens of a document", "%", log=True)
    return Figure("lengths", "Lengths of documents", "% of the documents, and of their tokens", traces, layout)


def _bytes(facts: dict[str, Facts]) -> Figure:
    ratios = {name: each.train.bytes / each.train.tokens for name, each in facts.items()}
    bins = np.linspace(0, max(float(np.quantile(ratio, 0.999)) for ratio in ratios.values()) * 1.05 + 1e-9, 80)
    traces = [
        _steps(name, np.histogram(ratio, bins)[0], bins, color, DASHES[0])
        for (name, ratio), color in zip(ratios.items(), cycle(COLORS))
    ]
    layout = _layout("bytes a token", "%")
    return Figure("bytes", "Bytes a token", "% of the documents; few: text unlike the tokenizer's", traces, layout)


def _split(facts: dict[str, Facts]) -> Figure:
    tokens = lambda documents, chosen: int(documents.tokens[chosen].sum())
    parts = {
        "trained on": [tokens(each.train, ~each.repeats) for each in facts.values()],
        "repeats another": [tokens(each.train, each.repeats) for each in facts.values()],
        "held out": [tokens(each.val, ~each.leaked) for each in facts.values()],
        "held out, but trained on": [tokens(each.val, each.leaked) for each in facts.values()],
    }
    traces, layout = stacked_bars(list(facts), parts, "%{x:,} tokens")
    layout["legend"] |= {"traceorder": "normal"}
    layout["xaxis"] |= {"title": {"text": "tokens", "standoff": 8}, "tickformat": "~s"}
    return Figure("split", "Trained on, repeated, held out", "tokens", traces, layout)


def _seen(facts: dict[str, Facts]) -> Figure:
    traces = []
    for (name, each), color in zip(facts.items(), cycle(COLORS)):
        for (packing, packed), dash in zip(each.packed.items(), cycle(DASHES)):
            at = np.unique(np.geomspace(1, len(packed.seen), POINTS).astype(int))
            traces.append(_line(f"{name}, {packing}", at, 100 * packed.seen[at - 1], color, dash))
    layout = _layout("tokens of its own document that a target sees, at least", "%", log=True)
    return Figure("seen", "What a target sees", "% of the targets, by packing", traces, layout)


def _shares(names: list[str], mixture: Mixture, length: int, tokens: int) -> Figure:
    edges = [min(begins * length, tokens) for begins in mixture.begins]
    at = [place for edge in zip(edges, [*edges[1:], tokens]) for place in edge]
    traces = []
    for i, (name, color) in enumerate(zip(names, cycle(COLORS))):
        share = [float(100 * stage.shares[i]) for stage in mixture.stages for _ in range(2)]
        traces.append(_line(name, at, share, color, DASHES[0]) | {"stackgroup": "shares"})
    return Figure("shares", "Shares", "% of the rows, by tokens seen", traces, _layout("tokens of the run", "%"))


def _epochs(facts: dict[str, Facts], mixture: Mixture, length: int, tokens: int) -> Figure:
    at = np.linspace(0, tokens // length, POINTS).astype(int).tolist()
    counts = [mixture.counts(rows) for rows in at]
    traces = []
    for i, ((name, each), color) in enumerate(zip(facts.items(), cycle(COLORS))):
        epochs = [count[i] / max(next(iter(each.packed.values())).rows, 1) for count in counts]
        traces.append(_line(name, [rows * length for rows in at], epochs, color, DASHES[0]))
    return Figure("epochs", "Epochs", "passes over the text, by tokens seen", traces, _layout("tokens of the run", ""))


def _steps(name: str, counts: np.ndarray, bins: np.ndarray, color: str, dash: str) -> dict[str, Any]:
    """Return a histogram, as % of all."""
    shares = 100 * counts / max(counts.sum(), 1)
    trace = _line(name, bins, [*shares, 0.0], color, dash)
    trace["line"] |= {"shape": "hv"}
    return trace | {"fill": "tozeroy", "fillcolor": f"{color}22"}


def _line(name: str, x: Any, y: Any, color: str, dash: str) -> dict[str, Any]:
    style = {"line": {"width": 1.5, "color": color, "dash": dash}, "hovertemplate": "%{y:.3~g}"}
    return {"type": "scatter", "mode": "lines", "name": name, "x": short(x), "y": short(y), **style}


def _layout(x: str, y: str, log: bool = False) -> dict[str, Any]:
    layout: dict[str, Any] = {**plot_layout(False), "showlegend": True}
    layout["xaxis"] |= {"title": {"text": x, "standoff": 8}, "type": "log" if log else "linear", "tickformat": "~s"}
    layout["yaxis"] |= {"title": {"text": y}, "rangemode": "tozero"}
    return layout

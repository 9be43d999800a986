"""What bench.accelerator measured, as one page with pictures that needs nothing else."""

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

import tools.report.page

STYLE = Path(tools.report.page.__file__).with_name("page.css")
SHOWN = ("tokens_per_second", "mfu", "peak_gib", "step_seconds", "compile_seconds")  # of a throughput, in the table


def page(found: dict[str, Any], order: list[str]) -> str:
    """The page of accelerator.json's contents; `order`: the parts' names."""
    where, parts = found["where"], {name: found["parts"][name] for name in order if name in found["parts"]}
    done = {name: part["result"] for name, part in parts.items() if "result" in part}
    title = f"{where['devices']} x {where['device']}, JAX {where['jax']}"
    said = "".join(f"<li>{escape(text)}</li>" for text in sentences(done))
    missing = [f"no time yet for {name}" for name in found["no_time_for"] if name not in parts]
    missing += [] if found["beside"] else ["no other program was given to measure beside (--beside)"]
    failed = {name: part for name, part in parts.items() if "failed" in part}
    said += "".join(f'<li class="heed">{escape(text)}</li>' for text in missing)
    said += "".join(
        f'<li class="heed">{escape(name)} failed: {escape(part["failed"])}</li>' for name, part in failed.items()
    )
    details = "".join(
        f"<details><summary>{escape(name)}, {part['seconds']:.0f} s</summary><pre>{escape(part['command'])}</pre>"
        f"<pre>{escape(_details(part))}</pre></details>"
        for name, part in parts.items()
    )
    figures = list(pictures(done))
    plots = "".join(f'<section><h3>{escape(name)}</h3><div class="plot"></div></section>' for name, _ in figures)
    data = json.dumps([traces for _, traces in figures]).replace("<", "\\u003c")  # no text ends the script
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE.read_text()}</style>
<script>{get_plotlyjs()}</script></head><body><h1>{escape(title)}</h1><ul>{said}</ul>
{_table(done)}<div class="plots">{plots}</div><h2>Commands, results and profiles</h2>{details}
<script>const margin = {{l: 60, r: 20, t: 10, b: 90}};
{data}.forEach((traces, i) => Plotly.newPlot(document.querySelectorAll(".plot")[i], traces,
  {{margin, yaxis: {{rangemode: "tozero"}}}}, {{displayModeBar: false, responsive: true}}));</script></body></html>
"""


def _details(part: dict[str, Any]) -> str:
    if "failed" in part:
        return "\n".join(part["last_lines"])
    facts = dict(part["result"])
    profile = facts.pop("profile", "")
    return json.dumps(facts, indent=1) + ("\n\n" + profile if profile else "")


def rates(done: dict[str, dict]) -> dict[str, float]:
    """Tokens a second of every part that has them."""
    return {name: result["tokens_per_second"] for name, result in done.items() if "tokens_per_second" in result}


def sentences(done: dict[str, dict]) -> Iterator[str]:
    """What a person should know, of what there is."""
    rate = rates(done)
    plain = next((name for name in rate if name.startswith("plain ")), "")
    full = next((name for name in rate if name.startswith("full ")), "")
    for name in [name for name in rate if name.startswith("full ") and "," not in name]:
        if name.replace("full", "plain") in rate:
            other = name.replace("full", "plain")
            yield f"{name}: {rate[name] / rate[other]:.3f} of {other}'s tokens a second"
    if (free := f"{full}, not deterministic") in rate:
        yield f"a deterministic step takes {rate[free] / rate[full] - 1:.1%} longer than one that is not ({full})"
    if "beside" in rate and plain:
        yield f"{plain} and {full or 'no full network'} over the program beside: " + " and ".join(
            f"{rate[name] / rate['beside']:.3f}" for name in (plain, full) if name
        )
    if "kill and resume" in done:
        result = done["kill and resume"]
        yield f"runs killed {result['faults']} times ended with the parameters of one that was not, to the bit"
    if "train.py" in rate and plain:
        yield f"train.py trains at {rate['train.py'] / rate[plain]:.3f} of bench.throughput's rate ({plain})"
    if (windows := f"{plain}, windows") in rate:
        yield f"sliding windows: {rate[windows] / rate[plain]:.3f} of full attention's tokens a second ({plain})"
    if "checkpoints" in done:
        result = done["checkpoints"]
        yield f"a save of {result['gigabytes']} GB holds the run up for {result['seconds_blocked']} s"
    if "inference" in done:
        result = done["inference"]
        yield f"sampling {result['prompts']} rows: {result['sampled_tokens_per_second']:,} tokens/s"
        yield f"evaluation: {result['evaluated_tokens_per_second']:,} tokens/s"
    if "diagnostics" in done:
        cost = done["diagnostics"]["cost"]["measuring"]
        yield f"a step that measures itself takes {cost:.3f} of the time of one that does not"


def _table(done: dict[str, dict]) -> str:
    head = "".join(f"<th>{escape(cell.replace('_', ' '))}</th>" for cell in ("", *SHOWN))
    rows = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{done[name].get(key, '')}</td>" for key in SHOWN) + "</tr>"
        for name in rates(done)
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def pictures(done: dict[str, dict]) -> Iterator[tuple[str, list[dict]]]:
    """Each picture's title, and plotly's traces."""
    if rate := rates(done):
        yield "Tokens a second", [{"type": "bar", "x": list(rate), "y": list(rate.values())}]
    for title, key in (("Model FLOPs utilisation", "mfu"), ("Peak memory, GiB on a device", "peak_gib")):
        known = {name: result[key] for name, result in done.items() if result.get(key) is not None}
        if known:
            yield title, [{"type": "bar", "x": list(known), "y": list(known.values())}]
    points = done.get("micro-batches", {}).get("points", [])
    for title, key in (("Tokens a second by rows of a micro-batch", "tokens_per_second"), ("GiB by rows", "peak_gib")):
        if points:
            line = {"x": [f"{point['rows']} rows" for point in points], "y": [point[key] for point in points]}
            yield title, [line | {"mode": "lines+markers"}]

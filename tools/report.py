"""Write a self-contained HTML page on one or more runs: python -m tools.report RUN [RUN...].

At its top is a card: what each run reached, and what it took. Then come plots, samples and options. It needs only the
records of each run, does not start JAX, and includes plotly's script, so it opens without a network.
"""

import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
from plotly.offline import get_plotlyjs

from options.command_line import parse_arguments
from options.schema import AnyPaths, FilePath, NotNegative
from system.errors import Exit, UserError
from system.exits import exit_code_of
from system.files import write_whole
from tools.card import as_text, card, read_stages, table
from tools.noise import add_noise_scales
from tools.recorded import AXES, Run, at, read_runs

COLORS = ("#4269d0", "#ff725c", "#3ca951", "#e5a50a", "#a463f2", "#6cc5b0", "#ff8ab7", "#9c6b4e", "#97bbf5", "#9498a0")
DASHES = ("solid", "dash", "dot", "dashdot")
FEW = 30  # a line of at most this many points has markers
LEAST_WAIT = 0.001  # share of the time; a plot of less would be empty
SMALL_SHARE = 0.05  # of waiting, which the axis shows at least: microseconds do not look large


@dataclass(frozen=True)
class Arguments:
    """Options of this command."""

    runs: Annotated[AnyPaths, tyro.conf.Positional]
    """Folders of runs, here or at gs://, each with a config.json."""
    out: FilePath = ""
    """The page. Default: report.html in the run's folder, next to the first folder of several runs, or here for one at
    gs://."""
    stages: FilePath = ""
    """The record of a speedrun's stages (stages.tsv of launch/speedrun.sh), whose times the card then shows."""
    price: NotNegative[float] = 0.0
    """US dollars a device and hour, for the card. 0: no dollars."""


class Plot(NamedTuple):
    """A plot of the report, and the places of its lines in metrics.jsonl."""

    id: str
    title: str
    unit: str
    lines: dict[str, str]
    """Names of lines and their dotted places. A star means every key there, and gives the line its name."""
    log: bool = False
    """True for a logarithmic y axis, which leaves out values below or at 0."""


GROUPS = "diagnostics.groups.*"
NOISE = {"batch": "valid_tokens", "noise scale": "diagnostics.noise_scale", "low": "diagnostics.noise_scale_low"}
NOISE |= {"high": "diagnostics.noise_scale_high"}
PLOTS = (
    Plot("loss", "Loss", "nats a token", {"training": "loss", "validation": "val_loss"}),
    Plot("bits", "Validation", "bits per byte", {"all": "val_bpb", "": "val_bpb_of.*"}),
    Plot("gradients", "Norms of gradients before the clip", "norm", {"all": "grad_norm", "": "grad_norms.*"}, log=True),
    Plot("rates", "Learning rates", "rate", {"": "learning_rate.*"}, log=True),
    Plot("epochs", "Epochs of each source", "passes over the text", {"": "epochs.*"}),
    Plot("noise", "Gradient noise scale, its interval and the batch", "tokens", NOISE, log=True),
    Plot("coherence", "Coherence of micro-batches", "cosine", {"cosine": "diagnostics.coherence_running"}),
    Plot("ratios", "Update over parameter", "ratio of norms", {"": f"{GROUPS}.update_ratio"}, log=True),
    Plot("snr", "Optimizer's signal over noise", "ratio", {"": f"{GROUPS}.snr"}, log=True),
    Plot("speed", "Throughput", "tokens a second", {"tokens": "tokens_per_second"}),
    Plot("mfu", "MFU", "share of the devices' peak", {"MFU": "mfu"}),
    Plot("waiting", "Waiting for data", "share of the time", {"share": "data_wait"}),
    Plot("memory", "Peak memory of a device", "bytes", {"peak": "peak_memory_bytes"}),
)
MEASURED = ("val_loss", "val_bpb", "loss", "tokens", "seconds", "tokens_per_second", "mfu", "peak_memory_bytes")


def add_ratios(lines: list[dict]) -> None:
    """Add `update_ratio`, the norm of an update over its parameters', to the diagnostics of groups."""
    for line in lines:
        for facts in (at(line, "diagnostics", "groups") or {}).values():
            if at(facts, "update_norm") and at(facts, "parameter_norm"):
                facts["update_ratio"] = facts["update_norm"] / facts["parameter_norm"]


def places(plot: Plot, runs: list[Run]) -> dict[str, list[str]]:
    """Return the names of a plot's lines, and the place of each."""
    found = {}
    for name, dotted in plot.lines.items():
        path = dotted.split(".")
        if "*" not in path:
            found[name] = path
            continue
        star = path.index("*")
        for key in dict.fromkeys(key for run in runs for key in run.names(*path[:star])):
            found[key] = [*path[:star], key, *path[star + 1 :]]
    return found


def traces(plot: Plot, runs: list[Run]) -> list[dict]:
    """Return a plot's lines for plotly (plotly.com/javascript/reference). With one run, or a line for each group, names
    have colors and runs have dashes; otherwise runs have colors and names have dashes."""
    found, drawn = places(plot, runs), []
    for j, (name, path) in enumerate(found.items()):
        for i, run in enumerate(runs):
            course = run.course(*path)
            if not course.steps:
                continue
            color, dash = (j, i) if len(runs) == 1 or len(found) > len(plot.lines) else (i, j)
            style = {"width": 1.5, "color": COLORS[color % len(COLORS)], "dash": DASHES[dash % len(DASHES)]}
            trace = {"type": "scatter", "mode": "lines+markers" if len(course.steps) <= FEW else "lines", "line": style}
            trace |= {"name": name if len(runs) == 1 else f"{run.name}: {name}", "hovertemplate": "%{y:.4~g}"}
            # The page moves x from steps to the axis that a reader chooses; `meta` is the run.
            drawn.append(trace | {"x": course.steps, "y": six_digits(course.values), "meta": i})
    return drawn


def shows_something(plot: Plot, lines: list[dict]) -> bool:
    """Return whether a plot's lines can be seen: not the batch without a noise scale, and not a wait of no time."""
    if plot.id == "noise":
        return any(not line["name"].endswith("batch") for line in lines)
    if plot.id == "waiting":
        return any(value >= LEAST_WAIT for line in lines for value in line["y"])
    return True


def six_digits(values: list[float]) -> list[float]:
    """Return rounded values, which halve the page's size without a visible change."""
    return [float(f"{value:.6g}") for value in values]


def log_tick(lines: list[dict]) -> str | int | None:
    """Return plotly's `dtick` of a logarithmic axis: a label for each power of ten or several, also for 2 and 5 (D2),
    or None for values so close that plotly's own choice is a linear one."""
    values = [value for line in lines for value in line["y"] if value > 0]
    powers = math.log10(max(values) / min(values)) if values else 0
    return None if powers < 0.8 else "D2" if powers < 2.5 else math.ceil(powers / 6)


def layout(plot: Plot, lines: list[dict]) -> dict[str, Any]:
    """Return plotly's layout of a plot with these lines."""
    line = {"gridcolor": "#e8e8e8", "linecolor": "#999999", "zeroline": False}
    y = {**line, "title": {"text": plot.unit, "standoff": 4}, "type": "log" if plot.log else "linear"}
    y["exponentformat"] = "power" if plot.log else "SI"
    y["dtick"] = log_tick(lines) if plot.log else None
    if plot.id in ("speed", "mfu", "waiting", "memory"):  # small changes do not look large
        y["rangemode"] = "tozero"
    if plot.id == "waiting":
        y["autorangeoptions"] = {"include": SMALL_SHARE}
    return {
        "margin": {"l": 68, "r": 12, "t": 8, "b": 44},
        "font": {"family": "inherit", "size": 12, "color": "#333333"},
        "hovermode": "x unified",
        "xaxis": line,
        "yaxis": y,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
    }


def facts(run: Run) -> dict[str, str]:
    """Return a run's results and machine, by name."""
    last_step = max((line["step"] for line in run.lines), default=0)
    shown = {"steps": f"{last_step:,} of {run.options['steps']:,}"}
    shown |= {name: as_text(values[-1]) for name in MEASURED if (values := run.course(name).values)}
    shown |= {f"seconds: {name}": as_text(value) for name, value in run.summary.get("seconds_by_activity", {}).items()}
    listed = {"devices": run.record["devices"], "versions": run.record["versions"]}
    shown |= {name: ", ".join(f"{key} {value}" for key, value in of.items()) for name, of in listed.items()}
    shown["dataset (fingerprint)"] = run.record["dataset"]
    shown["changes"] = "; ".join(", ".join(change) for change in run.record["changes"])
    return shown


def texts(title: str, shown: list[str]) -> str:
    """Return texts of a run that a click on the title shows. Arabic or Hebrew runs from right to left."""
    parts = "".join(f'<pre dir="auto">{escape(text)}</pre>' for text in shown)
    return f"<details><summary>{escape(title)}</summary>{parts}</details>"


def samples_and_jumps(run: Run) -> str:
    """Return a run's samples and the texts of the steps whose loss jumped, newest first."""
    parts = []
    for line in reversed(run.lines):
        if line.get("samples"):
            parts.append(texts(f"{run.name}, step {line['step']:,}: samples", line["samples"]))
        if spike := line.get("spike"):
            about = {name: value for name, value in spike.items() if name != "texts"}
            title = f"{run.name}, step {line['step']:,}: spike {json.dumps(about)}"
            parts.append(texts(title, spike.get("texts") or []))
    return "".join(parts)


CSS = """
body { max-width: 76rem; margin: 0 auto; padding: 2rem 1.5rem; font: 16px/1.5 system-ui, sans-serif; color: #222 }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem } h3 { font-size: 0.95rem; margin: 1rem 0 0 }
p, h3 { color: #555 } label { margin-right: 1rem }
table { border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto }
td { vertical-align: top; padding: 0.2rem 1.2rem 0.2rem 0; border-bottom: 1px solid #eee }
pre { padding: 0.5rem; background: #f6f6f4; font-size: 0.8rem; white-space: pre-wrap; overflow-wrap: anywhere }
summary { cursor: pointer; overflow-wrap: anywhere } img { max-width: 100%; margin: 1rem 0 }
.axis { position: sticky; top: 0; z-index: 5; background: #fff; padding: 0.5rem 0 }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(26rem, 1fr)); gap: 0.5rem 2rem }
.plots section { min-width: 0 } #loss-section { grid-column: 1 / -1 } .plot { height: 20rem }
"""
SCRIPT = """
function draw() {
  const axis = document.querySelector("input[name=axis]:checked").value;
  const places = report.axes.map((run) => new Map(run.step.map((step, i) => [step, run[axis][i]])));
  const end = report.axes.flatMap((run) => run[axis]).reduce((most, x) => Math.max(most, x), 0);
  for (const { id, traces, layout } of report.plots) {
    const moved = traces.map((trace) => ({ ...trace, x: trace.x.map((step) => places[trace.meta].get(step)) }));
    const xaxis = { ...layout.xaxis, title: { text: report.axis_names[axis] }, range: [-0.02 * end, 1.02 * end] };
    Plotly.react(id, moved, { ...layout, xaxis }, { displayModeBar: false, responsive: true });
  }
}
for (const input of document.querySelectorAll("input[name=axis]")) input.addEventListener("change", draw);
draw();
"""


def page(runs: list[Run], price: float = 0.0, stages: Mapping[str, float] | None = None) -> str:
    """Return the page, as HTML that fetches nothing. `price`, `stages`: of the card."""
    for run in runs:
        add_ratios(run.lines)
        add_noise_scales(run.lines)
    drawn = [(plot, lines) for plot in PLOTS if (lines := traces(plot, runs)) and shows_something(plot, lines)]
    axes = []
    for run in runs:
        steps = sorted({line["step"] for line in run.lines})
        axes.append({axis: six_digits(run.along(axis, steps)) for axis in AXES})
    plots = [{"id": plot.id, "traces": lines, "layout": layout(plot, lines)} for plot, lines in drawn]
    data = json.dumps({"plots": plots, "axes": axes, "axis_names": AXES}, allow_nan=False).replace("<", "\\u003c")
    title = escape(", ".join(run.name for run in runs))
    made = escape(f"Made {time.strftime('%Y-%m-%d %H:%M:%S')} from {', '.join(run.folder for run in runs)}")
    all_options = [{name: as_text(value) for name, value in run.options.items()} for run in runs]
    names = [run.name for run in runs]
    differing = f"<h2>Options that differ</h2>{table(names, all_options, differing=True)}" if len(runs) > 1 else ""
    radio = '<label><input type="radio" name="axis" value="{}" checked> {}</label>'  # the last one stays checked
    choice = "".join(radio.format(axis, name) for axis, name in AXES.items())
    sections = "".join(
        f'<section id="{plot.id}-section"><h3>{plot.title}</h3><div class="plot" id="{plot.id}"></div></section>'
        for plot, _ in drawn
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<link rel="icon" href="data:,"><style>{CSS}</style><script>{get_plotlyjs()}</script></head>
<body><h1>{title}</h1><p>{made}</p>{card(runs, price, stages or {})}
<h2>Plots</h2><div class="axis">against&ensp;{choice}</div><div class="plots">{sections}</div>
<h2>Samples and jumps of the loss</h2>{"".join(samples_and_jumps(run) for run in runs)}
<h2>Machine and measurements</h2>{table(names, [facts(run) for run in runs])}{differing}
<h2>Options</h2><details><summary>All options</summary>{table(names, all_options)}</details>
<script>const report = {data};{SCRIPT}</script></body></html>
"""


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    if not arguments.runs:
        raise UserError("name at least one run's folder: python -m tools.report runs/small")
    runs = read_runs(list(arguments.runs))
    stages = read_stages(arguments.stages) if arguments.stages else {}
    folder = Path() if "://" in arguments.runs[0] else Path(arguments.runs[0])
    out = Path(arguments.out or (folder if len(runs) == 1 else folder.parent) / "report.html")
    try:
        write_whole(out, page(runs, arguments.price, stages))
    except OSError as error:
        raise UserError(f"--out={out} cannot be written: {error}") from error
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
    return Exit.COMPLETE


if __name__ == "__main__":
    sys.exit(exit_code_of(main, "interrupted"))

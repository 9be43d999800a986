"""Build the plots of a report from the runs' lines.

The x of a course is the steps of its points. The page puts them on the axis that a reader chooses, by each run's table
of steps, tokens and seconds (`axes`).
"""

from itertools import cycle
from typing import Any, NamedTuple

from run.goodput import PARTS, goodput
from tools.report.plots import COLORS, DASHES, Figure, plot_layout, short, stacked_bars
from tools.report.runs import AXES, Course, Run, course_of
from tools.report.sentences import ratio

GRAY = "#777777"
NOISE = {
    "high": "band: its interval",
    "at least": "triangles: at least",
    "from AdamW's moments": "dots: roughly, from AdamW's moments",
    "batch": "dashed: the batch",
}
"""Lines of the noise scale's plot, and their style."""
FEW = 3  # a line of at most this many points has markers
LOGGED, MEASURED = "a logged step", "--diagnostics.every_steps=10"  # data that a plot needs


class Line(NamedTuple):
    """A line of a plot, from one run."""

    run: Run
    name: str
    course: Course
    color: str
    style: dict[str, Any] = {}  # noqa: RUF012
    """Options of plotly's trace, over the defaults; its `line` is merged with the default one."""
    legend: str = ""
    """The legend's name of this line; lines of one name are shown and hidden together. Empty: the line's `name`."""


def figures(runs: list[Run]) -> list[Figure]:
    """Return all plots, including those without a line."""
    return [*_of_training(runs), *_of_diagnostics(runs), *_of_speed(runs)]


def axes(run: Run) -> dict[str, list[float]]:
    """Return the position on each axis of every step that a line may have."""
    steps = sorted({line["step"] for line in run.lines})
    return {axis: short(run.along(axis, steps)) for axis in AXES}


def _of_training(runs: list[Run]) -> list[Figure]:
    loss, norms, bounds = [], [], []
    for run, color, dash in zip(runs, cycle(COLORS), cycle(DASHES)):
        legend = run.name if len(runs) > 1 else ""
        dots = {"mode": "lines+markers", "line": {"width": 2}, "marker": {"size": 6}}
        thin = {"line": {"width": 1}, "opacity": 0.8}
        loss += [
            Line(run, "validation", run.course("val_loss"), color if legend else COLORS[1], dots, legend),
            Line(run, "training", run.course("loss"), color, thin, legend),
        ]
        norm, bound = run.course("grad_norm"), run.options["optimizer.clip_norm"]
        norms.append(Line(run, "all", norm, "#000000", {"line": {"dash": dash}}))
        if bound:
            course = Course(norm.steps, [bound] * len(norm.steps))
            bounds.append(Line(run, "bound of the clip", course, GRAY, {"line": {"width": 1}}))
    norms += _groups(runs, "grad_norms") + bounds
    rates, epochs = _groups(runs, "learning_rate"), _groups(runs, "epochs")
    by_group = _by(runs, "group")
    about = "thin: training" + "; dots: validation" * any(run.course("val_loss").steps for run in runs)
    errors = lambda run: {"type": "data", "array": short(run.course("core_stderr").values), "thickness": 1}
    core = [line._replace(style={"mode": "lines+markers", "error_y": errors(line.run)}) for line in _each(runs, "core")]
    about_core = "guessing is 0, all right is 1; bars: standard errors"
    tasks, about_tasks = _groups(runs, "core_tasks"), f"guessing is 0; {_by(runs, 'task')}"
    return [
        _figure("loss", "Loss", "nats a token", about, loss, LOGGED),
        _figure("bits", "Validation", "bits per byte", "", _each(runs, "val_bpb"), "an evaluation"),
        _figure("gradients", "Norms of gradients", "norm", f"before the clip, {by_group}", norms, LOGGED, log=True),
        _figure("rates", "Learning rates", "rate", by_group, rates, LOGGED, log=True),
        _figure("epochs", "Epochs", "passes over the text", _by(runs, "source"), epochs, LOGGED),
        _figure("core", "CORE", "CORE", about_core, core, "--eval.tasks=core"),
        _figure("tasks", "CORE's tasks", "centred accuracy", about_tasks, tasks, "--eval.tasks=core"),
    ]


def _of_diagnostics(runs: list[Run]) -> list[Figure]:
    noise = [line for run, color in zip(runs, cycle(COLORS)) for line in _noise(run, color, len(runs) > 1)]
    coherence = _each(runs, "diagnostics", "coherence_running")
    groups = lambda name: _groups(runs, "diagnostics", "groups", inner=name)
    ratios = lambda place: [
        line._replace(course=ratio(line.run, place, line.name))
        for line in _groups(runs, "diagnostics", place, inner="update_norm")
    ]
    gradients = _groups(runs, "diagnostics", "blocks", inner="gradient_norm")
    drawn = {line.name for line in noise if line.course.steps}
    about_noise = "; ".join(text for name, text in NOISE.items() if name in drawn)
    about_cosine = "of a micro-batch's gradient and the sum of those before it"
    by_group, by_block = _by(runs, "group"), _by(runs, "block")
    ratio_unit = "update over parameter"
    return [
        _figure("noise", "Noise scale", "tokens", about_noise, noise, MEASURED, log=True),
        _figure("coherence", "Coherence", "cosine", about_cosine, coherence, MEASURED),
        _figure("ratios", "Update over parameter", ratio_unit, by_group, ratios("groups"), MEASURED, log=True),
        _figure("updates", "Norms of updates", "norm", by_group, groups("update_norm"), MEASURED, log=True),
        _figure("snr", "Optimizer's signal over noise", "ratio", by_group, groups("snr"), MEASURED, log=True),
        _figure("unchanged", "Unchanged by a step", "share", by_group, groups("unchanged_share"), MEASURED),
        _figure("blocks", "Norms of gradients", "norm", by_block, gradients, MEASURED, log=True),
        _figure("block-ratios", "Update over parameter", ratio_unit, by_block, ratios("blocks"), MEASURED, log=True),
    ]


def _noise(run: Run, color: str, several: bool) -> list[Line]:
    """Return the lines of a run in the plot of the noise scale. An interval without an upper end has no band."""
    course = lambda name: run.course("diagnostics", name)
    low, high, scale, moments = (course(f"noise_scale{end}") for end in ("_low", "_high", "", "_moments"))
    batch = run.course("valid_tokens") if low.steps or scale.steps or moments.steps else Course([], [])
    # A log axis has no place for 0: such a lower end is drawn below all others.
    floor = min((value for value in (*low.values, *scale.values, *high.values) if value > 0), default=1.0) / 2
    lower = dict(zip(low.steps, (value if value > 0 else floor for value in low.values)))
    upper = dict(zip(*high))
    both = lower.keys() & upper
    hidden = {"hoverinfo": "skip", "hovertemplate": None, "legendgroup": run.name, "showlegend": False}
    edge = hidden | {"line": {"width": 0}}
    band = edge | {"fill": "tonexty", "fillcolor": f"{color}22"}
    triangles = {"mode": "markers", "marker": {"symbol": "triangle-up", "size": 7, "color": color}}
    dots = {"mode": "markers", "marker": {"size": 4, "color": color}}
    open_ended = course_of(pair for pair in lower.items() if pair[0] not in both)
    legend = run.name if several else ""
    return [
        Line(run, "low", course_of((step, lower[step]) for step in sorted(both)), color, edge),
        Line(run, "high", course_of((step, upper[step]) for step in sorted(both)), color, band),
        Line(run, "noise scale", scale, color, {}, legend),
        Line(run, "from AdamW's moments", moments, color, dots, legend),
        Line(run, "at least", open_ended, color, triangles, legend),
        Line(run, "batch", batch, color if several else GRAY, {"line": {"dash": "dash"}}, legend),
    ]


def _of_speed(runs: list[Run]) -> list[Figure]:
    memory = _each(runs, "peak_memory_bytes", scale=2**-30)
    plots = [
        _figure("speed", "Throughput", "tokens a second", "", _each(runs, "tokens_per_second"), LOGGED),
        _figure("mfu", "MFU", "share of the devices' peak", "", _each(runs, "mfu"), "the peak of its device"),
        _figure("waiting", "Waiting for data", "share of the time", "", _each(runs, "data_wait"), LOGGED),
        _figure("memory", "Peak memory of a device", "GiB", "", memory, "a device that reports it"),
    ]
    for plot in plots:  # from zero, so that small changes do not look large
        plot.layout["yaxis"]["rangemode"] = "tozero"
    spent = [goodput(run.events) for run in runs]
    parts = {
        part: short([100 * seconds[part] / (sum(seconds.values()) or 1) for seconds in spent])
        for part in ("steps", *(part for part in PARTS if part != "steps"))
    }
    traces, layout = stacked_bars([run.name for run in runs], parts, "%{x:.1f}%")
    traces = [trace for trace in traces if any(trace["x"])]  # each part keeps its color on every page
    layout["xaxis"] |= {"title": {"text": "% of the wall time"}, "range": [0, 100]}
    layout["yaxis"] |= {"fixedrange": True}
    return [
        *plots,
        Figure("goodput", "Where the time went", "over all starts", traces, layout, "an event with seconds"),
    ]


def _figure(id: str, title: str, unit: str, about: str, lines: list[Line], missing: str, log: bool = False) -> Figure:
    """Return a plot of those lines that have points, over the training. `about` explains what is drawn."""
    runs = list(dict.fromkeys(line.run.name for line in lines))
    drawn = [line._replace(legend=line.legend or line.name) for line in lines if line.course.steps]
    traces: list[dict] = []
    shown: set[str] = set()
    for line in drawn:
        of_run = f", {line.run.name}" if len(runs) > 1 and line.name != line.run.name else ""
        trace = {
            "type": "scatter",
            "mode": "lines+markers" if len(line.course.steps) <= FEW else "lines",
            "name": line.legend,
            "legendgroup": line.legend,
            "showlegend": line.legend not in shown,
            "x": line.course.steps,
            "y": short(line.course.values),
            "meta": runs.index(line.run.name),
            "hovertemplate": f"%{{y:.4~g}}<extra>{line.name}{of_run}</extra>",
        }
        style = {"width": 1.5, "color": line.color} | line.style.get("line", {})
        traces.append(trace | line.style | {"line": style})
        shown |= {line.legend} if traces[-1]["showlegend"] else set()
    layout: dict[str, Any] = plot_layout(log) | {"showlegend": len(shown) > 1}
    layout["yaxis"] |= {"title": {"text": unit, "standoff": 4}}
    zero = dict.fromkeys(line.legend for line in drawn if not any(line.course.values))
    zeros = f"0 throughout: {', '.join(zero)}" if zero else ""
    return Figure(id, title, "; ".join(filter(None, [about, zeros])), traces, layout, missing)


def _each(runs: list[Run], *path: str, scale: float = 1.0) -> list[Line]:
    """Return one line for each run."""
    scaled = lambda course: Course(course.steps, [scale * value for value in course.values])
    return [Line(run, run.name, scaled(run.course(*path)), color) for run, color in zip(runs, cycle(COLORS))]


def _groups(runs: list[Run], *path: str, inner: str | None = None) -> list[Line]:
    """Return one line for each run and group: a color per group, a dash per run."""
    groups = list(dict.fromkeys(group for run in runs for group in run.names(*path)))
    colors = dict(zip(groups, cycle(COLORS)))
    if all(group.isdecimal() for group in groups):  # blocks, in their order: from light to dark
        lightness = lambda i: 80 - 55 * i / max(1, len(groups) - 1)
        colors = {group: f"hsl(222, 60%, {lightness(i):.0f}%)" for i, group in enumerate(groups)}
    within = [inner] if inner else []
    return [
        Line(run, group, run.course(*path, group, *within), colors[group], {"line": {"dash": dash}})
        for group in groups
        for run, dash in zip(runs, cycle(DASHES))
    ]


def _by(runs: list[Run], part: str) -> str:
    """Return the meaning of colors and dashes in a plot by groups or blocks."""
    dashes = "; ".join(f"{dash}: {run.name}" for run, dash in zip(runs, cycle(DASHES)))
    return f"by {part}" + f"; {dashes}" * (len(runs) > 1)

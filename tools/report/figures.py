"""The plots of a report: what plotly.js draws, as plain dicts (plotly.com/javascript/reference).

The x of a course is the steps of its points: the page puts them on the axis that is asked for, by each run's table of
steps, tokens and seconds (`axes`).
"""

from itertools import cycle
from typing import Any, NamedTuple

from run.goodput import PARTS
from tools.report.runs import AXES, Course, Run, number
from tools.report.sentences import ratio

COLORS = ("#4269d0", "#ff725c", "#3ca951", "#e5a50a", "#a463f2", "#6cc5b0", "#ff8ab7", "#9c6b4e", "#97bbf5", "#9498a0")
DASHES = ("solid", "dash", "dot", "dashdot")
GRID, TEXT, GRAY = "#e8e8e8", "#333333", "#777777"
FEW = 3  # points of a line, up to which they are marked
LOGGED, MEASURED = "a logged step", "--diagnostics.every_steps=10"  # what a plot needs


class Line(NamedTuple):
    """A line of a plot, of one run."""

    run: Run
    name: str
    course: Course
    color: str
    style: dict[str, Any] = {}  # noqa: RUF012
    """Of plotly's trace, over the defaults."""
    legend: str = ""
    """What the legend calls this line and all others of the same, which it shows and hides together; else its name."""


class Figure(NamedTuple):
    """A plot, or why there is none."""

    id: str
    title: str
    about: str
    """What colors, marks and dashes mean."""
    traces: list[dict]
    layout: dict[str, Any]
    missing: str = ""
    """What would have to be known for it; said where there are no traces."""


def figures(runs: list[Run]) -> list[Figure]:
    """All plots, those without a line included."""
    return [*_of_training(runs), *_of_diagnostics(runs), *_of_speed(runs)]


def axes(run: Run) -> dict[str, list[float]]:
    """Where each step that a line may have lies on each axis."""
    steps = sorted({line["step"] for line in run.lines})
    return {axis: _short(run.along(axis, steps)) for axis in AXES}


def _of_training(runs: list[Run]) -> list[Figure]:
    loss = []
    for run, color in zip(runs, cycle(COLORS)):
        validation = color if len(runs) > 1 else COLORS[1]
        thin = {"line": {"width": 1, "color": color}, "opacity": 0.8}
        dots = {"mode": "lines+markers", "line": {"width": 2, "color": validation}, "marker": {"size": 6}}
        legend = run.name if len(runs) > 1 else ""
        loss.append(Line(run, "validation", run.course("val_loss"), validation, dots, legend))
        loss.append(Line(run, "training", run.course("loss"), color, thin, legend))
    norms = [
        Line(run, "all", run.course("grad_norm"), "#000000", {"line": {"width": 1.5, "color": "#000000", "dash": dash}})
        for run, dash in zip(runs, cycle(DASHES))
    ]
    bounds = [
        Line(run, "bound of the clip", Course(steps, [bound] * len(steps)), GRAY, {"line": {"width": 1, "color": GRAY}})
        for run in runs
        if (bound := number(run.options, "optimizer.clip_norm")) and (steps := run.course("grad_norm").steps)
    ]
    norms += _groups(runs, "grad_norms") + bounds
    rates = _groups(runs, "learning_rate")
    epochs = _groups(runs, "epochs")
    about = "thin: training" + "; dots: validation" * any(run.course("val_loss").steps for run in runs)
    return [
        _figure("loss", "Loss", "nats a token", about, loss, LOGGED),
        _figure("bits", "Validation", "bits per byte", "", _each(runs, "val_bpb"), "an evaluation"),
        _figure(
            "gradients", "Norms of gradients", "norm", f"before the clip, {_by(runs, 'group')}", norms, LOGGED, True
        ),
        _figure("rates", "Learning rates", "rate", _by(runs, "group"), rates, LOGGED, log=True),
        _figure("epochs", "Epochs", "times gone through", _by(runs, "source"), epochs, LOGGED),
        *_of_benchmarks(runs),
    ]


def _of_benchmarks(runs: list[Run]) -> list[Figure]:
    errors = lambda run: {"type": "data", "array": _short(run.course("core_stderr").values), "thickness": 1}
    core = [line._replace(style={"mode": "lines+markers", "error_y": errors(line.run)}) for line in _each(runs, "core")]
    about = "guessing is 0, all right is 1; bars: standard errors"
    tasks = f"guessing is 0; {_by(runs, 'task')}"
    return [
        _figure("core", "CORE", "CORE", about, core, "--eval.tasks=core"),
        _figure("tasks", "CORE's tasks", "centred accuracy", tasks, _groups(runs, "core_tasks"), "--eval.tasks=core"),
    ]


def _of_diagnostics(runs: list[Run]) -> list[Figure]:
    noise, coherence = [], []
    for run, color in zip(runs, cycle(COLORS)):
        legend = run.name if len(runs) > 1 else ""
        course = lambda name, run=run: run.course("diagnostics", name)
        low, high, scale = (course(f"noise_scale{end}") for end in ("_low", "_high", ""))
        known = low.steps or scale.steps or course("noise_scale_moments").steps
        batch = run.course("valid_tokens") if known else Course([], [])
        low = _above_zero(low, [*scale.values, *high.values])
        both = set(low.steps) & set(high.steps)  # an interval without an upper end has no band
        edge = {"line": {"width": 0}, "hoverinfo": "skip", "hovertemplate": None, "legendgroup": run.name}
        band = edge | {"fill": "tonexty", "fillcolor": f"{color}22"}
        ends = {"mode": "markers", "marker": {"symbol": "triangle-up", "size": 7, "color": color}}
        dots = {"mode": "markers", "marker": {"size": 4, "color": color}}
        dashed = {"line": {"width": 1.5, "dash": "dash", "color": color if legend else GRAY}}
        noise += [
            Line(run, "low", _only(low, both), color, edge | {"showlegend": False}),
            Line(run, "high", _only(high, both), color, band | {"showlegend": False}),
            Line(run, "noise scale", scale, color, {}, legend),
            Line(run, "from AdamW's moments", course("noise_scale_moments"), color, dots, legend),
            Line(run, "at least", _only(low, set(low.steps) - both), color, ends, legend),
            Line(run, "batch", batch, color, dashed, legend),
        ]
        coherence.append(Line(run, "coherence", course("coherence_running"), color, {}, legend))
    groups = lambda name: _groups(runs, "diagnostics", "groups", inner=name)
    ratios = lambda place: [
        line._replace(course=ratio(line.run, place, line.name))
        for line in _groups(runs, "diagnostics", place, inner="update_norm")
    ]
    gradients = _groups(runs, "diagnostics", "blocks", inner="gradient_norm")
    meaning = {
        "high": "band: its interval",
        "at least": "triangles: at least",
        "from AdamW's moments": "dots: roughly, from AdamW's moments",
        "batch": "dashed: the batch",
    }
    drawn = lambda lines: "; ".join(
        text for name, text in meaning.items() if any(line.name == name and line.course.steps for line in lines)
    )
    about_cosine = "of a micro-batch's gradient and the sum of those before it"
    by_group, by_block = _by(runs, "group"), _by(runs, "block")
    ratio_unit = "update over parameter"
    return [
        _figure("noise", "Noise scale", "tokens", drawn(noise), noise, MEASURED, log=True),
        _figure("coherence", "Coherence", "cosine", about_cosine, coherence, MEASURED),
        _figure("ratios", "Update over parameter", ratio_unit, by_group, ratios("groups"), MEASURED, log=True),
        _figure("updates", "Norms of updates", "norm", by_group, groups("update_norm"), MEASURED, log=True),
        _figure("snr", "Optimizer's signal over noise", "ratio", by_group, groups("snr"), MEASURED, log=True),
        _figure("unchanged", "Unchanged by a step", "share", by_group, groups("unchanged_share"), MEASURED),
        _figure("blocks", "Norms of gradients", "norm", by_block, gradients, MEASURED, log=True),
        _figure("block-ratios", "Update over parameter", ratio_unit, by_block, ratios("blocks"), MEASURED, log=True),
    ]


def _of_speed(runs: list[Run]) -> list[Figure]:
    spent = [run.goodput for run in runs]
    names = [run.name for run in runs]
    bars = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "y": names,
            "x": _short([100 * each[part] / (sum(each.values()) or 1) for each in spent]),
            "marker": {"color": color},
            "hovertemplate": "%{x:.1f}%",
        }
        for part, color in zip(("steps", *(part for part in PARTS if part != "steps")), cycle(COLORS))
        if any(each[part] for each in spent)
    ]
    layout = plot_layout(False) | {"barmode": "stack", "hovermode": "closest", "showlegend": True}
    layout["xaxis"] |= {"title": {"text": "% of the wall time"}, "range": [0, 100]}
    layout["yaxis"] |= {"type": "category", "automargin": True, "fixedrange": True}
    memory = _each(runs, "peak_memory_bytes", scale=2**-30)
    plots = [
        _figure("speed", "Throughput", "tokens a second", "", _each(runs, "tokens_per_second"), LOGGED),
        _figure("mfu", "MFU", "share of the devices' peak", "", _each(runs, "mfu"), "the peak of its device"),
        _figure("waiting", "Waiting for data", "share of the time", "", _each(runs, "data_wait"), LOGGED),
        _figure("memory", "Peak memory of a device", "GiB", "", memory, "a device that reports it"),
    ]
    for plot in plots:  # what is small against itself shall not look large
        plot.layout["yaxis"]["rangemode"] = "tozero"
    return [*plots, Figure("goodput", "Where the time went", "over all starts", bars, layout, "an event with seconds")]


def _figure(id: str, title: str, unit: str, about: str, lines: list[Line], missing: str, log: bool = False) -> Figure:
    """Return a plot of lines over the training's course, of those that have points. `about` explains what is drawn."""
    runs = list(dict.fromkeys(line.run.name for line in lines))
    traces: list[dict] = []
    shown: set[str] = set()
    for line in lines:
        if not line.course.steps:
            continue
        legend = line.legend or line.name
        of = f", {line.run.name}" if len(runs) > 1 and line.name != line.run.name else ""
        trace = {
            "type": "scatter",
            "mode": "lines+markers" if len(line.course.steps) <= FEW else "lines",
            "name": legend,
            "legendgroup": legend,
            "showlegend": legend not in shown,
            "x": line.course.steps,
            "y": _short(line.course.values),
            "meta": runs.index(line.run.name),
            "line": {"width": 1.5, "color": line.color},
            "hovertemplate": f"%{{y:.4~g}}<extra>{line.name}{of}</extra>",
        }
        traces.append(trace | line.style)
        shown |= {legend} if traces[-1]["showlegend"] else set()
    layout: dict[str, Any] = plot_layout(log) | {"showlegend": len(shown) > 1}
    layout["yaxis"] |= {"title": {"text": unit, "standoff": 4}}
    zero = dict.fromkeys(
        line.legend or line.name for line in lines if line.course.steps and not any(line.course.values)
    )
    zeros = f"0 throughout: {', '.join(zero)}" if zero else ""
    return Figure(id, title, "; ".join(filter(None, [about, zeros])), traces, layout, missing)


def plot_layout(log: bool) -> dict[str, Any]:
    """Of plotly, for every plot of a page."""
    axis = {"gridcolor": GRID, "linecolor": "#999999", "zeroline": False}
    return {
        "margin": {"l": 68, "r": 12, "t": 8, "b": 44},
        "font": {"family": "inherit", "size": 12, "color": TEXT},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "x unified",
        "hoverlabel": {"font": {"size": 12}},
        "xaxis": {**axis, "title": {"standoff": 8}},
        "yaxis": {**axis, "type": "log", "tickformat": "~g"} if log else {**axis, "type": "linear"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "font": {"size": 11}, "tracegroupgap": 0},
        "uirevision": "kept",  # zoom and hidden lines stay when a page that is followed is drawn anew
    }


def _each(runs: list[Run], *path: str, scale: float = 1.0) -> list[Line]:
    """One line a run."""
    courses = [run.course(*path) for run in runs]
    scaled = [Course(course.steps, [scale * value for value in course.values]) for course in courses]
    return [Line(run, run.name, course, color) for run, course, color in zip(runs, scaled, cycle(COLORS))]


def _groups(runs: list[Run], *path: str, inner: str | None = None) -> list[Line]:
    """One line a run and group: a color a group, a dash a run."""
    groups = list(dict.fromkeys(group for run in runs for group in run.names(*path)))
    colors = dict(zip(groups, cycle(COLORS)))
    if all(group.isdecimal() for group in groups):  # blocks, in their order: from light to dark
        lightness = lambda i: 80 - 55 * i / max(1, len(groups) - 1)
        colors = {group: f"hsl(222, 60%, {lightness(i):.0f}%)" for i, group in enumerate(groups)}
    return [
        Line(
            run,
            group,
            run.course(*path, group, *([inner] if inner else [])),
            colors[group],
            {"line": {"width": 1.5, "color": colors[group], "dash": dash}},
        )
        for group in groups
        for run, dash in zip(runs, cycle(DASHES))
    ]


def _by(runs: list[Run], part: str) -> str:
    """What colors and dashes mean in a plot by groups or blocks."""
    dashes = "; ".join(f"{dash}: {run.name}" for run, dash in zip(runs, cycle(DASHES)))
    return f"by {part}" + f"; {dashes}" * (len(runs) > 1)


def _above_zero(course: Course, others: list[float]) -> Course:
    """Return the course with values that a log axis has no place for at the lower end of the others."""
    floor = min((value for value in [*course.values, *others] if value > 0), default=1.0) / 2
    return Course(course.steps, [value if value > 0 else floor for value in course.values])


def _only(course: Course, steps: set[int]) -> Course:
    kept = [(step, value) for step, value in zip(*course) if step in steps]
    return Course([step for step, _ in kept], [value for _, value in kept])


def _short(values: list[float]) -> list[float]:
    """Six digits of each, which no eye tells from the number itself: half of the page's size."""
    return [float(f"{value:.6g}") for value in values]

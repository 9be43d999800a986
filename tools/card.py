"""The card at the top of a report: what each stage of a network reached, and what it took. Without JAX."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from system.errors import UserError
from tools.recorded import Run

PANEL = (5.0, 3.2)  # inches of a run's panel
SHOWN = 2  # samples of a run on the card; the page has all of them below
BENCHMARKS = {"core": "CORE", "chatcore": "ChatCORE", "chatcore4": "ChatCORE without HumanEval"}
LOSSES = {"loss": "training", "val_loss": "validation"}
ANSWERS = {"reward": "reward", "greedy_accuracy": "greedy accuracy", "pass_at_1": "pass@1"}
"""What a panel of reinforcement shows: its loss is weighed by advantages, and cannot be compared."""


def stage_of(run: Run) -> str:
    """Return which stage a run is, by its record."""
    if run.course("reward").steps:
        return "reinforcement"
    return "fine-tuning" if run.options["init_from"] else "pretraining"


def with_interval(value: float, interval: Sequence[float] | None) -> str:
    """Return a figure, and its interval of 95% if there is one."""
    return f"{value:.4f}" + (f" ({interval[0]:.4f} to {interval[1]:.4f})" if interval else "")


def duration(seconds: float) -> str:
    """Return seconds for people: in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def newest(run: Run, name: str) -> tuple[float, Sequence[float] | None] | None:
    """Return the newest figure of this name in a run's lines, and its interval; None if no line has it."""
    for line in reversed(run.lines):
        if isinstance(value := line.get(name), int | float):
            interval = line.get(f"{name}_interval")
            return value, interval and (interval["low"], interval["high"])
    return None


def benchmark(run: Run, name: str) -> str:
    """Return a benchmark's figure: of evaluate.py's newest step and most items, else of training's last evaluation."""
    measured = [json.loads(path.read_bytes()) for path in run.files.glob(f"{name}/step_*/{name}.json")]
    if measured:
        best = max(measured, key=lambda of: (of["step"], sum(task["items"] for task in of["tasks"].values())))
        return with_interval(best[name], best[f"{name}_interval"])
    found = newest(run, name)
    return with_interval(*found) if found else ""


def figures(run: Run) -> dict[str, str]:
    """Return what a run reached, by name."""
    rows = {"stage": stage_of(run)}
    if tokens := run.course("tokens").values:
        rows["tokens"] = f"{tokens[-1]:,.0f}"
    if found := newest(run, "val_bpb"):
        error = newest(run, "val_bpb_stderr")
        rows["bits per byte, held out"] = f"{found[0]:.4f}" + (f" ± {error[0]:.4f}" if error else "")
    rows |= {title: figure for name, title in BENCHMARKS.items() if (figure := benchmark(run, name))}
    if found := newest(run, "greedy_accuracy"):
        rows["greedy accuracy"] = with_interval(*found)
    draws = {name for line in run.lines for name in line if name.startswith("pass_at_") and name[8:].isdigit()}
    for k in sorted(int(name[8:]) for name in draws):
        if found := newest(run, f"pass_at_{k}"):
            rows[f"pass@{k}"] = with_interval(*found)
    return rows


def spent(run: Run, price: float) -> dict[str, str]:
    """Return what a run took, by name; with dollars if there is a price."""
    rows = {"time, with evaluations and saves": duration(run.seconds)}
    return rows | ({"dollars": f"{cost(run.seconds, [run], price):,.2f}"} if price else {})


def cost(seconds: float, runs: list[Run], price: float) -> float:
    """Return the dollars of these seconds on the machine of the runs, at `price` dollars a device and hour."""
    return seconds / 3600 * max(run.record["devices"]["count"] for run in runs) * price


def read_stages(path: str) -> dict[str, float]:
    """Return the seconds of each stage in a record of launch/speedrun.sh, over all its starts. Raise UserError if it is
    none."""
    seconds: dict[str, float] = {}
    try:
        for line in Path(path).expanduser().read_text().splitlines():
            stage, taken, *_ = line.split("\t")
            seconds[stage] = seconds.get(stage, 0.0) + float(taken)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--stages={path} is not the record of stages that launch/speedrun.sh keeps: {error}"
        ) from error
    return seconds


def as_text(value: Any) -> str:
    """Return a value as JSON; text stays unquoted, and numbers have five digits."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.5g}"
    return value if isinstance(value, str) else json.dumps(value)


def table(names: Sequence[str], columns: Sequence[Mapping[str, str]], differing: bool = False) -> str:
    """Return a table with a column for each name. `differing`: only rows whose values differ."""
    rows = [["", *names]]
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name, "") for column in columns]
        if any(values) and (len(set(values)) > 1 or not differing):
            rows.append([name, *values])
    cells = ["".join(f'<td dir="auto">{escape(cell)}</td>' for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def picture(runs: list[Run]) -> str:
    """Return a PNG of the losses of all runs, a panel each, as HTML. Reinforcement has its rewards there."""
    from matplotlib.figure import Figure  # a second to import
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(PANEL[0] * len(runs), PANEL[1]), layout="constrained")
    for axes, run in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs):
        stage = stage_of(run)
        for name, label in (ANSWERS if stage == "reinforcement" else LOSSES).items():
            course = run.course(name)
            marked = "-" if name in ("loss", "reward") else "o-"
            axes.plot(
                run.along("tokens", course.steps), course.values, marked, linewidth=1.2, markersize=4, label=label
            )
        axes.set(title=f"{run.name}: {stage}", xlabel="tokens")
        axes.set_ylabel("share of answers" if stage == "reinforcement" else "nats a token")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    encoded = base64.b64encode(content.getvalue()).decode()
    return f'<img alt="The loss of each stage" src="data:image/png;base64,{encoded}">'


def samples(run: Run) -> str:
    """Return a run's newest samples, as HTML."""
    shown = next((line["samples"] for line in reversed(run.lines) if line.get("samples")), [])[:SHOWN]
    parts = "".join(f'<pre dir="auto">{escape(text)}</pre>' for text in shown)
    return f"<h3>{escape(run.name)} writes</h3>{parts}" if shown else ""


def costs(seconds: Mapping[str, float], runs: list[Run], price: float) -> str:
    """Return a table with the time of each stage and of all, and their dollars, as HTML."""
    seconds = {**seconds, "all": sum(seconds.values())}
    columns = {"time": {stage: duration(taken) for stage, taken in seconds.items()}}
    if price:
        columns["dollars"] = {stage: f"{cost(taken, runs, price):,.2f}" for stage, taken in seconds.items()}
    return table(list(columns), list(columns.values()))


def card(runs: list[Run], price: float, stages: Mapping[str, float]) -> str:
    """Return the card of these runs as HTML, with the seconds of a speedrun's stages if they are known."""
    reached, taken = [figures(run) for run in runs], [spent(run, price) for run in runs]
    order = dict.fromkeys([name for rows in (*reached, *taken) for name in rows], "")
    rows = [order | of | took for of, took in zip(reached, taken)]
    drawn = picture(runs) if len(runs) > 1 else ""
    times = f"<h3>Time of each stage, over all its starts</h3>{costs(stages, runs, price)}" if stages else ""
    return f"{table([run.name for run in runs], rows)}{drawn}{times}{''.join(map(samples, runs))}"

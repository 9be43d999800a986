"""Draw the stages: memory against speed, loss against rate, noise scale against tokens, loss against batch."""

import io
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from configs.files import write_whole
from configs.schema import Config
from hosts.machines import GIB, HEADROOM
from tools.tune.statistics import better_half, difference, mean
from tools.tune.tune_json import Record


def draw(config: Config, record: Record, limit: float) -> list[str]:
    """Draw a picture for each recorded stage, next to tune.json. Return their names."""
    panels = {"memory": _memory, "noise": _noise, "rate": _rate, "branch": _branch}
    return [name for name, panel in panels.items() if panel(config, record, limit)]


def _picture(record: Record, name: str, title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # a second to import

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)

    def save() -> bool:
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
        picture = io.BytesIO()
        figure.savefig(picture, dpi=150)
        write_whole(Path(record.path).with_name(f"{name}.png"), picture.getbuffer())
        return True

    return axes, save


def _memory(config: Config, record: Record, limit: float) -> bool:
    sizes, times = record.pieces_of("fit"), record.pieces_of("time")
    timed = {name: mean(times[name]["seconds"]).value for name in times if name in sizes}
    if not timed:
        return False
    title = f"{config.name}: memory against speed\nlabels: rows-remat-loss_chunks-fsdp"
    axes, save = _picture(record, "memory", title, "tokens/s", "GiB a device")
    speeds = {name: config.batch.tokens_per_step / seconds for name, seconds in timed.items()}
    for name, speed in speeds.items():
        place = speed, sizes[name]["bytes"] / GIB
        axes.plot(*place, "o", color="tab:blue")
        axes.annotate(name, place, textcoords="offset points", xytext=(5, 5))
    top = max(sizes[name]["bytes"] for name in timed)
    if HEADROOM * limit < 3 * top:
        axes.axhline(HEADROOM * limit / GIB, color="tab:red", label="what may be taken")
    axes.margins(0.2)
    axes.set_ylim(bottom=0)
    return save()


def _noise(config: Config, record: Record, limit: float) -> bool:
    pieces = {int(step): piece for step, piece in record.pieces_of("noise").items() if piece["value"] is not None}
    if not pieces:
        return False
    axes, save = _picture(record, "noise", f"{config.name}: noise scale", "tokens of the run", "tokens")
    for step, piece in sorted(pieces.items()):
        value, low, high = (float(piece[name]) for name in ("value", "low", "high"))
        at, top = step * config.batch.tokens_per_step, high if math.isfinite(high) else 10 * max(value, low)
        axes.plot([at, at], [max(low, 1.0), top], color="tab:blue", marker="^" if math.isinf(high) else "_")
        if math.isfinite(value) and value > 0:
            axes.plot(at, value, "o", color="tab:blue")
    axes.axhline(config.batch.tokens_per_step, color="tab:red", label="the config's batch")
    axes.plot([], [], "o", color="tab:blue", label="B, with its interval of 95%")
    axes.set_xlim(left=0)
    axes.set_yscale("log", base=2)
    return save()


def _rate(config: Config, record: Record, limit: float) -> bool:
    rungs: dict[int, dict[float, list[float]]] = defaultdict(dict)
    for name, losses in _losses(record, "rate"):
        steps, _, factor = name.partition("/x")
        rungs[int(steps)][float(factor)] = losses
    labels = {f"{steps} steps, {steps / config.steps:.1%} of the run's": rungs[steps] for steps in sorted(rungs)}
    return _curves(record, "rate", f"{config.name}: loss against rate", "the config's rates times", labels)


def _branch(config: Config, record: Record, limit: float) -> bool:
    rules: dict[str, dict[float, list[float]]] = defaultdict(dict)
    for name, losses in _losses(record, "branch"):
        factor, _, rule = name[1:].partition("-")
        for each in ("root", "linear") if float(factor) == 1 else (rule,):
            rules[f"rates by the {each} rule"][float(factor) * config.batch.tokens_per_step] = losses
    title = f"{config.name}: loss against batch, from one checkpoint"
    return _curves(record, "branch", title, "tokens a step", rules, config.batch.tokens_per_step)


def _losses(record: Record, stage: str) -> list[tuple[str, list[float]]]:
    """Return the losses of a stage's trials, by name. JSON has "inf" for numbers that are not finite."""
    trials = [(name, piece) for name, piece in record.pieces_of(stage).items() if "losses" in piece]
    return [(name, [float(loss) for loss in piece["losses"]]) for name, piece in trials]


def _curves(record: Record, name: str, title: str, x: str, curves: dict[str, dict], own: float | None = None) -> bool:
    """Draw losses by factor, with intervals of the difference to the best, which decides. `own`: the config's."""
    if not curves:
        return False
    axes, save = _picture(record, name, title, x, "held-out loss (nats a token)")
    for label, losses in curves.items():
        sound = {factor: each for factor, each in sorted(losses.items()) if all(map(math.isfinite, each))}
        if sound:
            best = sound[better_half(sound)[0]]
            behind = [difference(each, best) for each in sound.values()]
            bars = [[more.value - more.low for more in behind], [more.high - more.value for more in behind]]
            heights = [float(np.mean(best)) + more.value for more in behind]
            axes.errorbar(list(sound), heights, bars, marker="o", capsize=3, label=label)
    if own is not None:
        axes.axvline(own, color="tab:red", linewidth=1, label="the config's batch")
    axes.set_xscale("log", base=2)
    return save()

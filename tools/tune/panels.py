"""The panels: memory against speed, loss against rate, noise scale against tokens, loss against batch."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from configs.files import write_whole
from configs.schema import Config
from tools.programs.device_memory import GIB
from tools.tune.fit import HEADROOM
from tools.tune.statistics import Estimate, better_half, difference, mean
from tools.tune.tune_json import Record


def draw(config: Config, record: Record, limit: float) -> list[str]:
    """Draws the panels of the stages on record, each a picture beside tune.json. Returns their names."""
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
    sizes, times = record.of("fit"), record.of("time")
    timed = {name: mean(times[name]["seconds"]).value for name in times if name in sizes}
    if not timed:
        return False
    title = f"{config.name}: memory against speed\nlabels: rows-remat-loss_chunks-fsdp"
    axes, save = _picture(record, "memory", title, "tokens/s", "GiB a device")
    speeds = {name: config.batch.tokens_per_step / seconds for name, seconds in timed.items()}
    middle = (min(speeds.values()) + max(speeds.values())) / 2
    for name, speed in speeds.items():
        place = speed, sizes[name]["bytes"] / GIB
        inwards = {"xytext": (-5, 5), "ha": "right"} if speed > middle else {"xytext": (5, 5), "ha": "left"}
        axes.plot(*place, "o", color="tab:blue")
        axes.annotate(name, place, textcoords="offset points", **inwards)
    top = max(sizes[name]["bytes"] for name in timed)
    if HEADROOM * limit < 3 * top:
        axes.axhline(HEADROOM * limit / GIB, color="tab:red", label="what may be taken")
    for name in sizes.keys() - timed.keys():
        if sizes[name]["bytes"]:
            axes.axhline(sizes[name]["bytes"] / GIB, color="grey", linestyle=":", linewidth=1)
            axes.annotate(f"{name}, not timed", (0.02, sizes[name]["bytes"] / GIB), xycoords=("axes fraction", "data"))
    axes.margins(0.2)
    axes.set_ylim(bottom=0)
    return save()


def _noise(config: Config, record: Record, limit: float) -> bool:
    found = {int(step): of for step, of in record.of("noise").items() if of["value"] is not None}
    if not found:
        return False
    axes, save = _picture(record, "noise", f"{config.name}: noise scale", "tokens of the run", "tokens")
    for step, of in sorted(found.items()):
        value, low, high = (float(of[name]) for name in ("value", "low", "high"))
        at, top = step * config.batch.tokens_per_step, high if math.isfinite(high) else 10 * max(value, low)
        axes.plot([at, at], [max(low, 1.0), top], color="tab:blue", marker="^" if math.isinf(high) else "_")
        if math.isfinite(value) and value > 0:
            axes.plot(at, value, "o", color="tab:blue")
    axes.axhline(config.batch.tokens_per_step, color="tab:red", label="the config's batch")
    axes.plot([], [], "o", color="tab:blue", label="B, with its interval of 95%")
    axes.set_xlim(left=0)
    axes.set_yscale("log", base=2)
    return save()


def _curve(axes: Any, losses: dict[float, list[float]], label: str) -> None:
    """Losses by factor; the bars are of the difference to the best, which is what decides."""
    sound = {factor: of for factor, of in sorted(losses.items()) if all(map(math.isfinite, of))}
    if not sound:
        return
    best = sound[better_half(sound)[0]]
    at = float(np.mean(best))
    behind = [difference(of, best) if of is not best else Estimate(0.0, 0.0, 0.0) for of in sound.values()]
    bars = [[more.value - more.low for more in behind], [more.high - more.value for more in behind]]
    axes.errorbar(list(sound), [at + more.value for more in behind], bars, marker="o", capsize=3, label=label)


def _rate(config: Config, record: Record, limit: float) -> bool:
    rungs: dict[int, dict[float, list[float]]] = {}
    for name, piece in record.of("rate").items():
        if "losses" in piece:
            steps, _, factor = name.partition("/x")
            rungs.setdefault(int(steps), {})[float(factor)] = [float(loss) for loss in piece["losses"]]
    if not rungs:
        return False
    labels = ("the config's rates times", "held-out loss (nats a token)")
    axes, save = _picture(record, "rate", f"{config.name}: loss against rate", *labels)
    for steps, losses in sorted(rungs.items()):
        _curve(axes, losses, f"{steps} steps, {steps / config.steps:.1%} of the run's")
    axes.set_xscale("log", base=2)
    return save()


def _branch(config: Config, record: Record, limit: float) -> bool:
    rules: dict[str, dict[float, list[float]]] = {}
    for name, piece in record.of("branch").items():
        if "losses" in piece:
            factor, _, rule = name[1:].partition("-")
            losses = [float(loss) for loss in piece["losses"]]
            for of in ("root", "linear") if float(factor) == 1 else (rule,):
                rules.setdefault(of, {})[float(factor) * config.batch.tokens_per_step] = losses
    if not rules:
        return False
    labels = ("tokens a step", "held-out loss (nats a token)")
    axes, save = _picture(record, "branch", f"{config.name}: loss against batch, from one checkpoint", *labels)
    for rule, losses in rules.items():
        _curve(axes, losses, f"rates by the {rule} rule")
    axes.axvline(config.batch.tokens_per_step, color="tab:red", linewidth=1, label="the config's batch")
    axes.set_xscale("log", base=2)
    return save()

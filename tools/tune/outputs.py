"""Write what the stages found: tuned.py, a config for train.py, and a picture of each stage that ran."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from configs.files import write_picture, write_whole
from configs.schema import Config, options, with_options
from hosts.machines import GIB, HEADROOM
from tools.tune.learning import with_batch
from tools.tune.speed import rows_that_divide
from tools.tune.statistics import behind_best, mean
from tools.tune.tune_json import STAGES, Record
from training.schedule import with_rates


def write_tuned(config: Config, record: Record, command: str, devices: Sequence[Any]) -> None:
    """Write tuned.py next to tune.json, for these devices: the options of speed by `time`, otherwise
    by `fit`; the factor of the rates; and the batch that `branch` chose. It lists every option that differs from the
    schema's default; tuned ones separately."""
    decided = record.options(*STAGES)
    factor, rule, rates = decided.pop("batch", 1.0), decided.pop("rule", "root"), decided.pop("rate", 1.0)
    tuned = with_batch(with_rates(with_options(config, decided), rates), factor, rule)
    tuned = rows_that_divide(tuned, devices) or tuned
    name = f"{config.name}-tuned"
    default, before, after = (options(each) for each in (Config(name=name), config, tuned))
    same = {key: value for key, value in after.items() if value == before[key] and value != default[key]}
    decisions = "\n".join(f"{made.stage} ({made.kind}): {made.says}" for made in record.decisions.values())
    says = f"{command}\n\n{decisions}".replace('"""', "'''")
    listed = "".join(
        f"    {key!r}: {value!r},\n" for key, value in same.items() if key not in ("name", "run_dir", "resume")
    )
    changed = "".join(
        f"    {key!r}: {value!r},  # it was {before[key]!r}\n" for key, value in after.items() if value != before[key]
    )
    text = f'''r"""{config.name}, as tools.tune chose it ({time.strftime("%Y-%m-%d")}).

{says}
"""

# ruff: noqa: E501
from configs.schema import Config, with_options

CONFIG = {{
{listed}}}
TUNED = {{
{changed}}}


def get_config() -> Config:
    return with_options(Config(name={name!r}), CONFIG | TUNED)
'''
    write_whole(record.path.with_name("tuned.py"), text)


def draw(config: Config, record: Record, limit: float) -> list[str]:
    """Draw a picture for each recorded stage, next to tune.json. Return their names."""
    from matplotlib.figure import Figure  # a second to import

    drawn = []
    for name, panel in {"memory": _memory, "noise": _noise, "rate": _rate, "branch": _branch}.items():
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(alpha=0.3)
        panel(axes, config, record, limit)
        if axes.has_data():
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize="small")
            write_picture(record.path.with_name(f"{name}.png"), figure)
            drawn.append(name)
    return drawn


def _memory(axes: Any, config: Config, record: Record, limit: float) -> None:
    """Draw memory against speed."""
    sizes = {name: piece["bytes"] for name, piece in record.pieces_of("fit").items()}
    timed = {name: mean(piece["seconds"]).value for name, piece in record.pieces_of("time").items() if name in sizes}
    title = f"{config.name}: memory against speed\nlabels: rows-remat-loss_chunks-fsdp"
    axes.set(title=title, xlabel="tokens/s", ylabel="GiB a device")
    for name, seconds in timed.items():
        place = config.batch.tokens_per_step / seconds, sizes[name] / GIB
        axes.plot(*place, "o", color="tab:blue")
        axes.annotate(name, place, textcoords="offset points", xytext=(5, 5))
    if timed and HEADROOM * limit < 3 * max(sizes[name] for name in timed):
        axes.axhline(HEADROOM * limit / GIB, color="tab:red", label="what may be taken")
    axes.margins(0.2)
    axes.set_ylim(bottom=0)


def _noise(axes: Any, config: Config, record: Record, limit: float) -> None:
    """Draw the noise scale against the tokens."""
    pieces = {int(step): piece for step, piece in record.pieces_of("noise").items() if piece["value"] is not None}
    axes.set(title=f"{config.name}: noise scale", xlabel="tokens of the run", ylabel="tokens")
    for step, piece in sorted(pieces.items()):
        value, low, high = (float(piece[name]) for name in ("value", "low", "high"))
        at, top = step * config.batch.tokens_per_step, high if math.isfinite(high) else 10 * max(value, low)
        axes.plot([at, at], [max(low, 1.0), top], color="tab:blue", marker="^" if math.isinf(high) else "_")
        if math.isfinite(value) and value > 0:
            axes.plot(at, value, "o", color="tab:blue")
    if pieces:
        axes.axhline(config.batch.tokens_per_step, color="tab:red", label="the config's batch")
        axes.plot([], [], "o", color="tab:blue", label="B, with its interval of 95%")
        axes.set_xlim(left=0)
        axes.set_yscale("log", base=2)


def _rate(axes: Any, config: Config, record: Record, limit: float) -> None:
    """Draw the loss against the rate."""
    curves: dict[str, dict[float, list[float]]] = defaultdict(dict)
    trials = [(name.split("/x"), losses) for name, losses in _losses(record, "rate")]
    for (steps, factor), losses in sorted(trials, key=lambda trial: int(trial[0][0])):
        curves[f"{steps} steps, {int(steps) / config.steps:.1%} of the run's"][float(factor)] = losses
    axes.set(title=f"{config.name}: loss against rate", xlabel="the config's rates times")
    _draw_curves(axes, curves)


def _branch(axes: Any, config: Config, record: Record, limit: float) -> None:
    """Draw the loss against the batch."""
    curves: dict[str, dict[float, list[float]]] = defaultdict(dict)
    for name, losses in _losses(record, "branch"):
        factor, _, rule = name[1:].partition("-")
        for each in ("root", "linear") if float(factor) == 1 else (rule,):
            curves[f"rates by the {each} rule"][float(factor) * config.batch.tokens_per_step] = losses
    axes.set(title=f"{config.name}: loss against batch, from one checkpoint", xlabel="tokens a step")
    _draw_curves(axes, curves)
    if curves:
        axes.axvline(config.batch.tokens_per_step, color="tab:red", linewidth=1, label="the config's batch")


def _losses(record: Record, stage: str) -> list[tuple[str, list[float]]]:
    """Return the losses of a stage's trials, by name. JSON has "inf" for numbers that are not finite."""
    trials = [(name, piece) for name, piece in record.pieces_of(stage).items() if "losses" in piece]
    return [(name, [float(loss) for loss in piece["losses"]]) for name, piece in trials]


def _draw_curves(axes: Any, curves: dict[str, dict[float, list[float]]]) -> None:
    """Draw losses by factor, with intervals of the difference to the best, which decides."""
    axes.set_ylabel("held-out loss (nats a token)")
    axes.set_xscale("log", base=2)
    for label, losses in curves.items():
        sound = {factor: each for factor, each in sorted(losses.items()) if all(map(math.isfinite, each))}
        if sound:
            best, behind = behind_best(sound)
            bars = [
                [more.value - more.low for more in behind.values()],
                [more.high - more.value for more in behind.values()],
            ]
            heights = [float(np.mean(sound[best])) + more.value for more in behind.values()]
            axes.errorbar(list(sound), heights, bars, marker="o", capsize=3, label=label)

"""Choose a run's micro-batch, batch and rates by measuring: python -m tools.tune --config=FILE.

Short runs of train.py answer three questions: which rows and `remat` are fast with little memory; how large a batch may
be, by the gradient noise scale; and whether half or twice the rates are better. Each has a table and a picture in the
folder `out`. The last lines are the options to use. The same command resumes: a run that is complete is not repeated.
docs/planning.md shows an example.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from options.command_line import parse, parse_own, refuse_mistakes
from options.schema import MEASURED, Config, FilePath, NotNegative, Role, options, roles, with_options
from options.validation import require_steps
from system.errors import Exit, UserError
from system.exits import exit_code_of
from system.files import is_there, write_picture, write_whole


@dataclass(frozen=True)
class Arguments:
    """Options of this command, not of the run."""

    out: FilePath = ""
    """The folder for the short runs, the pictures and tune.md; `runs/NAME-tune` unless given."""
    trial: NotNegative[int] = 0
    """Steps of a short run, at least 16 (for the noise scale twice as many). 0: 1% of the run's, at least two warmups.
    Rates are not tried if their trials take more than half of the run's steps."""


if __name__ == "__main__":
    refuse_mistakes(parse_own, __doc__, Arguments)  # before the imports, which take seconds

import numpy as np
from scipy.special import stdtrit  # JAX depends on SciPy

from hosts.machines import GIB
from hosts.runtime import ROOT, code_digest, versions
from run.folder import RunFolder
from run.record import figures_by_step
from tools.noise import NoiseScale, noise_scale_of

REMATS = ("none", "products", "block")
SIZES = 3  # numbers of rows that are tried with each `remat`
SPEED_STEPS, WARM = 8, 2  # steps of a run that measures speed; the first ones are left out
AS_FAST = 0.95  # share of the fastest run's tokens per second
UNITS = 8  # the fewest gradients of a step, micro-batches x replicas, that the noise scale compares
WINDOWS = (1 / 3, 2 / 3, 1.0)  # shares of the noise run's steps; the noise scale is of the later half before each
MOST_WASTE = 0.2  # more tokens that a larger batch may need
FACTORS, SEEDS = (0.5, 1.0, 2.0), 3
MOST_OF_RUN, LEAST_STEPS = 0.5, 16  # share of the run's steps for all trials of rates; steps of a trial
OUT_OF_MEMORY = re.compile("RESOURCE_EXHAUSTED|out of memory|more memory than")  # in the log of a run
# Options of every short run. They change no loss.
SHORT = MEASURED | {"eval.prompts": (), "eval.every_steps": 10**9}
DEVICES = "import jax; devices = jax.devices(); print(len(devices), devices[0].device_kind)"


@dataclass(frozen=True)
class Runs:
    """The short runs of train.py: the config and its file, their folder, and the devices' number and kind."""

    config: Config
    file: str
    out: Path
    devices: int
    kind: str

    @property
    def replicas(self) -> int:
        """Return the devices that the rows of a batch are divided over."""
        mesh = self.config.mesh
        return self.devices // mesh.tensor if mesh.data == -1 else mesh.data * mesh.fsdp

    def train(self, name: str, values: dict[str, Any], fresh: bool = False, may_fail: bool = False) -> dict:
        """Train with these options instead of the config's, unless a run of this name, with the same options, code,
        versions and devices, is complete. Return its record: the folder, whether it fits the memory, the peak memory in
        bytes, the held-out loss, and the seconds. `fresh`: begin an interrupted run again. `may_fail`: a run that gives
        up (code 1) has an infinite loss; otherwise exit."""
        config = with_options(self.config, SHORT | values)
        every = {name: list(value) if isinstance(value, tuple) else value for name, value in options(config).items()}
        given = {name for name, role in roles().items() if Role.FILE not in role} - {"epochs", "ratio"}
        words = [
            f"--{name}={json.dumps(v) if isinstance(v, list) else v}" for name, v in every.items() if name in given
        ]
        same = (code_digest(), versions(), self.devices, self.kind, words)
        folder = self.out / f"{name}-{hashlib.sha256(repr(same).encode()).hexdigest()[:8]}"
        path = folder / "tune.json"
        if not is_there(path):
            if fresh:
                shutil.rmtree(folder, ignore_errors=True)
            words = [f"--config={self.file}", *words, f"--name={folder.name}", f"--run_dir={folder}"]
            record = run_train(words, folder.with_suffix(".log"), may_fail)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(record))
        record = json.loads(path.read_text())
        metrics = RunFolder(folder).metrics()
        loss = figures_by_step(metrics, "val_loss").get(config.steps, math.inf)
        memory = max((line.get("peak_memory_bytes") or 0 for line in metrics), default=0)
        record |= {"folder": folder, "loss": loss, "memory": memory or record["memory"]}
        print(f"{folder.name}: {record['seconds']:.0f} s{'' if record['fits'] else ', out of memory'}", flush=True)
        return record


def run_train(words: list[str], log: Path, may_fail: bool) -> dict:
    """Run train.py. Return whether its memory sufficed, the process's peak memory, and the seconds. Exit with its code
    if it did not end well."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, ROOT / "train.py", *words], stdout=file, stderr=subprocess.STDOUT)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.wait()  # it saves
            raise
    code, text = os.waitstatus_to_exitcode(status), log.read_text(errors="replace")
    fits = code != -9 and not OUT_OF_MEMORY.search(text)  # Linux kills with signal 9 when the memory runs out
    if fits and code and not (may_fail and code == Exit.FAILED):
        print(f"{text[-1500:]}\ntrain.py ended with {code}: {log}", file=sys.stderr)
        raise SystemExit(code if code > 0 else Exit.FAILED)
    memory = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"fits": fits, "memory": memory, "seconds": time.monotonic() - began}


class Point(NamedTuple):
    """A micro-batch: its tokens per second (the median over steps), and its peak memory in bytes. On a CPU that is the
    process's, with the compiler's."""

    rows: int
    remat: str
    speed: float
    memory: float


def frontier(points: list[Point]) -> list[Point]:
    """Return the points that no other exceeds in speed with as little memory, by memory."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.memory, -point.speed)):
        if not best or point.speed > best[-1].speed:
            best.append(point)
    return best


def knee(points: list[Point]) -> Point:
    """Return the point with the least memory that is nearly as fast as the fastest."""
    fastest = max(point.speed for point in points)
    return next(point for point in frontier(points) if point.speed >= AS_FAST * fastest)


def halvings(rows: int) -> list[int]:
    """Return `rows`, half of it, and so on, while even."""
    return [rows] if rows % 2 else [rows, *halvings(rows // 2)]


def choose_micro_batch(runs: Runs) -> tuple[dict[str, Any], str]:
    """Answer which micro-batch: its options, and the answer as text. What does not fit is left out."""
    batch, points = runs.config.batch, []
    share = batch.tokens_per_step // batch.sequence_length // runs.replicas
    for remat in REMATS:
        for rows in halvings(share):
            values = {"batch.rows_per_device": rows, "model.remat": remat}
            short = {"steps": SPEED_STEPS, "log.every_steps": 1, "eval.tokens": batch.sequence_length}
            run = runs.train(f"micro-batch-{rows}-{remat}", values | short, fresh=True)
            if run["fits"]:
                measured = RunFolder(run["folder"]).figures("tokens_per_second")
                speeds = [speed for step, speed in measured.items() if step > WARM]
                points.append(Point(rows, remat, float(np.median(speeds)), run["memory"]))
            if sum(point.remat == remat for point in points) == SIZES:
                break
    if not points:
        raise UserError("no micro-batch fits the memory; use a smaller network, or more devices with mesh.fsdp")
    chosen, best = knee(points), frontier(points)
    lines = ["| rows | remat | tokens/s | GiB | |", "| --- | --- | --- | --- | --- |"]
    for point in sorted(points):
        note = "chosen" if point == chosen else "frontier" if point in best else ""
        lines.append(f"| {point.rows} | {point.remat} | {point.speed:,.0f} | {point.memory / GIB:.2f} | {note} |")
    lines += ["", f"Chosen: the least memory with at least {AS_FAST:.0%} of the fastest one's tokens/s."]
    draw_micro_batch(points, chosen, runs.out / "micro-batch.png")
    return {"batch.rows_per_device": chosen.rows, "model.remat": chosen.remat}, "\n".join(lines)


class Window(NamedTuple):
    """Diagnostics of the steps from `first` to `last`; the SNR is of the matrices."""

    first: int
    last: int
    noise: NoiseScale | None
    coherence: float
    snr: float


def windows(lines: list[dict]) -> list[Window]:
    """Return the diagnostics of the later half of the steps measured up to each of WINDOWS."""
    measured = [line for line in lines if "diagnostics" in line]
    found = []
    for share in WINDOWS:
        until = measured[: round(share * len(measured))]
        part = until[len(until) // 2 :]
        facts = [line["diagnostics"] for line in part]
        of_steps = [(of["coherence_running"], of["groups"]["matrices"]["snr"]) for of in facts]
        coherence, snr = np.mean(np.array(of_steps, float), axis=0)
        found.append(Window(part[0]["step"], part[-1]["step"], noise_scale_of(part), float(coherence), float(snr)))
    return found


def batch_for(batch: int, least: int, noise: NoiseScale | None) -> int:
    """Return the batch to use, in tokens: `batch` times a power of two. A step of b tokens needs 1 + b / B times the
    tokens of very small steps, B being the noise scale (arXiv:1812.06162). The batch doubles while that is at most 1.2
    with 95% confidence, and halves, in multiples of `least`, while it exceeds 2 afterwards with the same confidence."""
    if noise is None:
        return batch
    while 2 * batch <= MOST_WASTE * noise.low:
        batch *= 2
    while batch % (2 * least) == 0 and batch // 2 >= noise.high:
        batch //= 2
    return batch


def choose_batch(runs: Runs, rows: int, trial: int) -> tuple[int, str]:
    """Answer which batch: its tokens, and the answer as text."""
    config, batch = runs.config, runs.config.batch.tokens_per_step
    least = config.batch.sequence_length * runs.replicas
    share = batch // least
    if share * runs.replicas == 1:
        return batch, "A step of one row on one device has one gradient, and shows no noise: the batch stays."
    sizes = [size for size in halvings(share) if size <= rows]
    units = next((size for size in sizes if share // size * runs.replicas >= UNITS), sizes[-1])
    values = {"steps": 2 * trial, "batch.rows_per_device": units, "diagnostics.every_steps": 1}
    # Without the warmdown: the beginning of the complete run.
    values |= {"optimizer.schedule.kind": "constant", "eval.tokens": config.batch.sequence_length}
    found = windows(RunFolder(runs.train("noise", values)["folder"]).metrics())
    lines = ["| steps | noise scale, tokens (95%) | coherence | SNR of the matrices |", "| --- | --- | --- | --- |"]
    for part in found:
        shown = "not known" if part.noise is None else "{:,.0f} [{:,.0f}, {:,.0f}]".format(*part.noise)
        lines.append(f"| {part.first} to {part.last} | {shown} | {part.coherence:.3f} | {part.snr:.2f} |")
    noise = found[-1].noise
    chosen = batch_for(batch, least, noise)
    says = "The noise scale is not known, so the batch stays."
    if noise:
        says = (
            f"The critical batch is {noise.value:,.0f} tokens [{noise.low:,.0f}, {noise.high:,.0f}]. The config's "
            f"batch needs {1 + batch / noise.value:.2f} times the tokens of tiny steps. Use {chosen:,} tokens a step."
        )
    draw_noise(found, batch, runs.out / "batch.png")
    return chosen, "\n".join([*lines, "", says])


def difference(theirs: list[float], ours: list[float]) -> tuple[float, float, float]:
    """Return the mean of theirs - ours, paired by seed, and its 95% interval by Student's t; infinite if a run
    failed."""
    differences = np.array(theirs) - np.array(ours)
    if not np.isfinite(differences).all():
        return math.inf, math.inf, math.inf
    mean = float(differences.mean())
    reach = float(stdtrit(len(differences) - 1, 0.975) * differences.std(ddof=1)) / len(differences) ** 0.5
    return mean, mean - reach, mean + reach


def rate_for(losses: dict[float, list[float]]) -> tuple[float, str]:
    """Return the factor of the rates to use, and the reason. Others replace the config's, 1, only if they are lower,
    and better with 95% confidence. The best rate falls as runs grow longer (arXiv:2409.19913), so lower rates that win
    in trials win later too; higher ones may not."""
    less = {factor: difference(of, losses[1.0]) for factor, of in losses.items()}
    better = [factor for factor, (_, _, high) in less.items() if high < 0]
    if not better:
        return 1.0, "The intervals of other rates include zero, or they are worse: the rates stay."
    factor = min(better, key=lambda factor: less[factor])
    won = f"{factor:g} times the rates are better by {-less[factor][0]:.3f} nats"
    if factor < 1:
        return factor, f"{won}: use them."
    return 1.0, f"{won}. The best rate falls as runs grow longer: the rates stay."


def choose_rates(runs: Runs, values: dict[str, Any], trial: int) -> tuple[float, str]:
    """Answer which rates at the chosen micro-batch and batch (`values`): the factor of the config's, and the answer as
    text. Rates follow the root of the batch's factor."""
    config = with_options(runs.config, values)
    scale = (config.batch.tokens_per_step / runs.config.batch.tokens_per_step) ** 0.5
    steps = max(LEAST_STEPS, round(trial / scale**2))
    if (all_steps := steps * len(FACTORS) * SEEDS) > MOST_OF_RUN * config.steps:
        return scale, (
            f"The trials would take {all_steps:,} steps, more than {MOST_OF_RUN:.0%} of the run's {config.steps:,}: "
            "the rates stay, but for the batch's factor."
        )
    short = values | {"steps": steps, "eval.tokens": min(config.eval.tokens, 8 * config.batch.tokens_per_step)}
    losses: dict[float, list[float]] = {factor: [] for factor in FACTORS}
    for seed in range(SEEDS):
        for factor in FACTORS:
            own = short | rates(runs.config, factor * scale) | {"seed": seed}
            losses[factor].append(runs.train(f"rate-{factor:g}-{seed}", own, may_fail=True)["loss"])
    if not np.isfinite(losses[1.0]).all():
        raise UserError("the config's own rates fail in a short run; give lower ones")
    factor, says = rate_for(losses)
    lines = [f"| rates times | held-out loss, {SEEDS} seeds | minus the config's (95%) |", "| --- | --- | --- |"]
    for name, of in losses.items():
        shown = "" if name == 1 else "{:+.4f} [{:+.4f}, {:+.4f}]".format(*difference(of, losses[1.0]))
        lines.append(f"| {name * scale:.3g} | {', '.join(f'{loss:.4f}' for loss in of)} | {shown} |")
    draw_rates({name * scale: of for name, of in losses.items()}, runs.out / "rate.png")
    return factor * scale, "\n".join([*lines, "", f"After {steps} of {config.steps:,} steps: {says}"])


def rates(config: Config, factor: float) -> dict[str, float]:
    """Return every group's peak rate times `factor`, by its option."""
    every = options(config.optimizer, "optimizer.").items()
    return {name: rate * factor for name, rate in every if name.endswith(".peak_rate") and isinstance(rate, float)}


def new_axes(**labels: str) -> tuple[Any, Any]:
    """Return a figure and its axes."""
    from matplotlib.figure import Figure  # a second to import

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(**labels)
    axes.grid(alpha=0.3)
    return figure, axes


def draw_micro_batch(points: list[Point], chosen: Point, path: Path) -> None:
    """Draw speed against memory."""
    figure, axes = new_axes(xlabel="GiB", ylabel="tokens/s", title="labels are rows, the red ring is chosen")
    best = frontier(points)
    axes.plot([point.memory / GIB for point in best], [point.speed for point in best], color="grey", label="frontier")
    for remat, style in zip(REMATS, ("oC0", "sC1", "^C2")):
        of = [point for point in points if point.remat == remat]
        axes.plot([point.memory / GIB for point in of], [point.speed for point in of], style, label=f"remat={remat}")
    axes.plot(chosen.memory / GIB, chosen.speed, "or", fillstyle="none", markersize=14, markeredgewidth=2)
    for point in points:
        axes.annotate(str(point.rows), (point.memory / GIB, point.speed), (8, 6), textcoords="offset points")
    axes.margins(0.12)
    axes.legend(fontsize="small", loc="lower right")
    write_picture(path, figure)


def draw_noise(found: list[Window], batch: int, path: Path) -> None:
    """Draw the noise scale against steps, and the config's batch."""
    figure, axes = new_axes(xlabel="steps", ylabel="tokens", title="gradient noise scale, 95% intervals", yscale="log")
    for part in found:
        if part.noise and math.isfinite(part.noise.high):
            axes.plot([part.last] * 2, [max(part.noise.low, 1), part.noise.high], "_-", color="C0")
            axes.plot(part.last, part.noise.value, "o", color="C0")
    axes.axhline(batch, color="red", label="the config's batch")
    axes.legend(fontsize="small")
    write_picture(path, figure)


def draw_rates(losses: dict[float, list[float]], path: Path) -> None:
    """Draw each seed's loss against the factor of the rates."""
    figure, axes = new_axes(xlabel="the config's rates times", ylabel="held-out loss", title="rates", xscale="log")
    for seed in range(SEEDS):
        axes.plot(list(losses), [of[seed] for of in losses.values()], "o-", label=f"seed {seed}")
    axes.set_xticks(list(losses), [f"{factor:.3g}" for factor in losses])
    axes.minorticks_off()
    axes.legend(fontsize="small")
    write_picture(path, figure)


def tune(runs: Runs, trial: int, command: list[str]) -> None:
    """Answer the questions in turn, print the answers, and write them into tune.md. `command`: train.py's, as given."""
    config, before = runs.config, options(runs.config)
    chosen, text = choose_micro_batch(runs)
    report = [f"# {config.name}, {runs.devices} x {runs.kind}\n", f"## Micro-batch\n\n{text}\n"]
    print(report[-1], flush=True)
    batch, text = choose_batch(runs, chosen["batch.rows_per_device"], trial)
    report.append(f"## Batch\n\n{text}\n")
    print(report[-1], flush=True)
    steps = max(1, round(config.steps * config.batch.tokens_per_step / batch))  # the same tokens
    chosen |= {"batch.tokens_per_step": batch, "steps": steps}
    factor, text = choose_rates(runs, chosen, trial)
    chosen |= rates(config, factor)
    words = [f"--{name}={value}" for name, value in chosen.items() if value != before[name]]
    report.append(f"## Rates\n\n{text}\n\n## Use\n\n    {shlex.join([*command, *words])}\n")
    print(f"{report[-1]}\nin {runs.out}: tune.md and its pictures")
    write_whole(runs.out / "tune.md", "\n".join(report))


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--config", "--out", "--trial"):
        ours.add_argument(name)
    given, words = ours.parse_known_args()
    require_steps(config)
    enough = max(config.steps // 100, 2 * config.optimizer.schedule.warmup_steps)
    trial = max(LEAST_STEPS, arguments.trial or min(config.steps, enough))
    asked = subprocess.run([sys.executable, "-c", DEVICES], capture_output=True, text=True)
    if asked.returncode:
        raise UserError(f"JAX finds no device:\n{asked.stderr[-1500:]}")
    count, kind = asked.stdout.strip().rpartition("\n")[2].split(" ", 1)
    runs = Runs(config, given.config, Path(arguments.out or f"runs/{config.name}-tune"), int(count), kind)
    tune(runs, trial, ["python", "train.py", f"--config={given.config}", *words])
    return Exit.COMPLETE


if __name__ == "__main__":
    sys.exit(exit_code_of(main, "interrupted; the same command continues"))

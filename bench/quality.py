"""What each option gives: python -m bench.quality --out=runs/quality. Writes a table and a plot.

configs/plain.py for 2 M tokens: as it is; with each of nanochat's later features alone; with all; and with Muon; three
seeds each, the same data. Each run is train.py's, so the same command goes on where it was stopped. Tokens/s are
measured apart, one network after the other, when all runs are done.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from configs import plain, small
from configs.command_line import parse_arguments
from configs.schema import FilePath, UserError, options
from hosts.runtime import run_command
from run.metrics import read_metrics

# The options of the network in which configs/small.py differs from configs/plain.py, each alone.
FEATURES = {
    name: (f"--model.{name}" if value is True else f"--model.{name}={value}",)
    for name, value in options(small.get_config().model).items()
    if value != getattr(plain.get_config().model, name)
}
ALL = tuple(option for options in FEATURES.values() for option in options)
MUON = ("--optimizer.matrices.kind=muon",)
VARIANTS = {
    "plain": (),
    **FEATURES,
    "all": ALL,
    "muon": MUON,
    "value_embeddings and muon": FEATURES["value_embeddings"] + MUON,
    "all and muon": ALL + MUON,
}


@dataclass(frozen=True)
class Arguments:
    """What each option gives."""

    out: FilePath = "runs/quality"
    """A folder for the runs, the table and the plot."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Which of them."""
    steps: int = 488
    """Of 4,096 tokens."""
    seeds: int = 3
    """Runs of each."""
    jobs: int = 2
    """Runs at a time, each on one core."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the activations."""


def run(arguments: Arguments, name: str, seed: int, core: int) -> None:
    """One run, unless it is complete."""
    run_dir = run_dir_of(arguments, name, seed)
    if (run_dir / "summary.json").exists():
        return
    settings = (f"--steps={arguments.steps}", f"--eval.every_steps={arguments.steps}", "--eval.tokens=262144")
    command = [sys.executable, "train.py", "--config=configs/plain.py", f"--run_dir={run_dir}", f"--seed={seed}"]
    command += [*settings, f"--model.dtype={arguments.dtype}", *VARIANTS[name]]
    if arguments.jobs > 1:
        command = ["taskset", "-c", str(core), *command]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    print(f"{name}, seed {seed}: {json.loads((run_dir / 'summary.json').read_text())['val_bpb']:.4f}", flush=True)


def run_dir_of(arguments: Arguments, name: str, seed: int) -> Path:
    return Path(arguments.out) / f"{name.replace(' ', '-')}-{seed}"


def tokens_per_second(options: Sequence[str]) -> int:
    """Of the training step, alone on the machine."""
    command = [sys.executable, "-m", "bench.throughput", "--config=configs/plain.py", *options]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(said.splitlines()[-1])["tokens_per_second"]


def curve(arguments: Arguments, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and the mean over seeds of the training loss, each over five lines of ten steps."""
    lines = [
        [line for line in read_metrics(run_dir_of(arguments, name, seed)) if "loss" in line]
        for seed in range(arguments.seeds)
    ]
    losses = np.mean([[line["loss"] for line in run] for run in lines], axis=0)
    smooth = np.convolve(losses, np.ones(5) / 5, mode="valid")
    return np.array([line["tokens"] for line in lines[0]])[4:], smooth


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    cores = sorted(os.sched_getaffinity(0))
    if unknown := set(arguments.variants) - set(VARIANTS):
        raise UserError(f"--variants: {sorted(unknown)} are not among {list(VARIANTS)}")
    work = [(name, seed) for seed in range(arguments.seeds) for name in arguments.variants]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        free = list(cores[: arguments.jobs])

        def on_a_core(job: tuple[str, int]) -> None:
            core = free.pop()
            try:
                run(arguments, *job, core)
            finally:
                free.append(core)

        list(pool.map(on_a_core, work))

    out, rows = Path(arguments.out), []
    speeds = {
        name: tokens_per_second([f"--model.dtype={arguments.dtype}", *VARIANTS[name]]) for name in arguments.variants
    }
    for name in arguments.variants:
        summaries = [
            json.loads((run_dir_of(arguments, name, seed) / "summary.json").read_text())
            for seed in range(arguments.seeds)
        ]
        scores = [summary["val_bpb"] for summary in summaries]
        rows.append((name, statistics.mean(scores), max(scores) - min(scores), speeds[name]))
    table = ["| | val_bpb, mean | spread | tokens/s |", "| --- | --- | --- | --- |"]
    table += [f"| {name} | {mean:.4f} | {spread:.4f} | {speed:,} |" for name, mean, spread, speed in rows]
    (out / "table.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))

    figure = Figure(figsize=(11, 4.5))
    for axes, over in zip(figure.subplots(1, 2), ("tokens", "seconds")):
        axes.set_prop_cycle(color=[colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2))])
        for name in arguments.variants:
            tokens, losses = curve(arguments, name)
            bold = name in ("plain", "all") or "muon" in name
            x = tokens / 1e6 if over == "tokens" else tokens / speeds[name]
            axes.plot(x, losses, label=name, linewidth=2 if bold else 0.8)
        axes.set_xlabel("million tokens" if over == "tokens" else "seconds of training, from tokens/s")
        axes.set_ylabel("training loss, nats a token")
        axes.set_ylim(top=6)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "quality.png", dpi=120)
    return 0


if __name__ == "__main__":
    run_command(main)

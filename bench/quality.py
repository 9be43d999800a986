"""Measure the effect of each option of the network: python -m bench.quality --out=runs/quality. It writes table.md.

configs/plain.py trains on 2 M tokens: unchanged; with each of nanochat's later features alone; with all; and with Muon;
three seeds each, the same data. train.py makes each run, so the same command resumes. Tokens/s are measured after all
runs, one network at a time.
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

from configs import plain, small
from configs.command_line import parse_arguments
from configs.schema import FilePath, UserError, options
from hosts.runtime import run_command

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
    """The effect of each option."""

    out: FilePath = "runs/quality"
    """A folder for the runs and the table."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    """Which of them."""
    steps: int = 488
    """Steps of each run, of 4,096 tokens."""
    seeds: int = 3
    """Runs of each."""
    jobs: int = 2
    """Runs at a time, each on one core."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the activations."""


def run(arguments: Arguments, name: str, seed: int, core: int) -> None:
    """Train one run, unless it is complete."""
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
    """Return the training step's tokens/s, with nothing else running."""
    command = [sys.executable, "-m", "bench.throughput", "--config=configs/plain.py", *options]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])["tokens_per_second"]


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

    table = ["| | val_bpb, mean | spread | tokens/s |", "| --- | --- | --- | --- |"]
    for name in arguments.variants:
        speed = tokens_per_second([f"--model.dtype={arguments.dtype}", *VARIANTS[name]])
        folders = [run_dir_of(arguments, name, seed) for seed in range(arguments.seeds)]
        scores = [json.loads((folder / "summary.json").read_text())["val_bpb"] for folder in folders]
        spread = max(scores) - min(scores)
        table.append(f"| {name} | {statistics.mean(scores):.4f} | {spread:.4f} | {speed:,} |")
    (Path(arguments.out) / "table.md").write_text("\n".join(table) + "\n")
    print("\n".join(table))
    return 0


if __name__ == "__main__":
    run_command(main)

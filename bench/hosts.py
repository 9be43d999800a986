"""Time the phases of a run of several processes on this machine: python -m bench.hosts --processes 2 4 8 16.

Each process has one CPU device, and counts as a node of its own. A run starts, trains and saves. Then its last process
is killed, and after the others have ended, all are started again. The run then restores, evaluates and completes. All
share this machine's cores, so seconds that grow no faster than the processes are the sharing's.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from hosts.runtime import run_command
from options.command_line import parse_arguments
from options.schema import FilePath, Positive
from run.folder import RunFolder
from system.errors import UserError

LIMIT = 1800  # seconds for one phase
OPTIONS = (
    "--model.depth=2 --model.width=128 --model.heads=2 --model.kv_heads=2 --model.head_dim=64 --model.vocab_size=4096 "
    "--steps=20 --batch.sequence_length=64 --batch.tokens_per_step=1024 --batch.rows_per_device=1 --log.every_steps=1 "
    "--checkpoint.every_steps=5 --eval.every_steps=10 --eval.tokens=16384 --eval.prompts="
)


@dataclass(frozen=True)
class Arguments:
    """Times the phases of a run of several processes on this machine."""

    processes: tuple[Positive[int], ...] = (2, 4, 8, 16)
    """Numbers of processes, each a run of its own."""
    out: FilePath = "runs/hosts"
    """A folder for the runs."""
    config: FilePath = "configs/plain.py"
    """The run."""
    options: str = OPTIONS
    """Its options, as typed."""


def start(arguments: Arguments, run_dir: Path, count: int) -> list[subprocess.Popen]:
    """Start the processes of a run."""
    command = [sys.executable, "train.py", f"--config={arguments.config}", f"--run_dir={run_dir}"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    variables |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count)}
    with run_dir.with_suffix(".log").open("a") as log:
        return [
            subprocess.Popen(
                [*command, *shlex.split(arguments.options)],
                env=variables | {"JAX_PROCESS_ID": str(number)},
                stdout=log,
                stderr=log,
            )
            for number in range(count)
        ]


def seconds_until(happened: Callable[[], bool], processes: list[subprocess.Popen]) -> float:
    """Return the seconds until an event. Raise UserError if a process fails before, or after LIMIT."""
    began = time.monotonic()
    while not happened():
        if any(process.poll() for process in processes) or time.monotonic() > began + LIMIT:
            for process in processes:
                process.kill()
            raise UserError(f"the run did not go on: {[process.wait() for process in processes]}; read its log")
        time.sleep(0.05)
    return time.monotonic() - began


def logged(folder: RunFolder, number: int) -> list[dict[str, Any]]:
    """Return the lines of steps that the run's start of this number, from 1, has logged."""
    begun = [event["time"] for event in folder.events.read() if event["event"] == "start"]
    if len(begun) < number:
        return []
    return [line for line in folder.metrics() if "loss" in line and line["time"] > begun[number - 1]]


def phases(arguments: Arguments, count: int) -> dict[str, float]:
    """Return the seconds of a run's phases with this number of processes."""
    run_dir = Path(arguments.out) / str(count)
    folder = RunFolder(run_dir)
    processes = start(arguments, run_dir, count)
    to_first_step = seconds_until(lambda: bool(logged(folder, 1)), processes)
    seconds_until(lambda: any(event["event"] == "saved" for event in folder.events.read()), processes)
    killed, others = processes[-1], processes[:-1]
    killed.send_signal(signal.SIGKILL)
    began = time.monotonic()
    for process in others:
        process.wait(LIMIT)
    to_last_end = time.monotonic() - began

    processes = start(arguments, run_dir, count)
    to_next_step = seconds_until(lambda: bool(logged(folder, 2)), processes)
    seconds_until(lambda: all(process.poll() == 0 for process in processes), processes)
    events = folder.events.read()
    newest = max(i for i, event in enumerate(events) if event["event"] == "start")
    spent, lines = events[-1]["seconds"], logged(folder, 2)
    evaluations = sum("val_loss" in line and line["step"] > events[newest]["step"] for line in folder.metrics())
    return {
        "launch to first step": to_first_step,
        "a step": median(after["seconds"] - before["seconds"] for before, after in pairwise(lines)),
        "a save": spent["saves"] / sum(event["event"] == "saved" for event in events[newest:]),
        "an evaluation": spent["evaluation"] / evaluations,
        "kill to the last end": to_last_end,
        "a restore": spent["restore"],
        "launch to the next step": to_next_step,
    }


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    out = Path(arguments.out)
    if out.exists():
        raise UserError(f"{out} is there already; give another --out, or delete it")
    out.mkdir(parents=True)
    for count in arguments.processes:
        seconds = {name: round(value, 3) for name, value in phases(arguments, count).items()}
        load = round(os.getloadavg()[0], 1)
        print(json.dumps({"processes": count, **seconds, "load": load}), flush=True)
    return 0


if __name__ == "__main__":
    run_command(main)

"""What saving costs: python -m bench.checkpoints --config=configs/small.py --steps_between=50. One JSON line.

How long a save holds the run up, how long it is written for after that, and how long it takes to read and verify; next
to it, the bare copy of the state off the device. With `steps_between`, the time of so many steps with a save before
them, over that of as many without.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bench.measure import random_batch
from configs.command_line import parse
from configs.schema import CheckpointConfig, Config, FilePath, NotNegative, Positive, UserError
from hosts.runtime import run_command
from model.shapes import parameter_shapes
from run.checkpoint import Checkpoints
from run.checksums import checksums
from training.build import build


@dataclass(frozen=True)
class Arguments:
    """What is measured."""

    saves: Positive[int] = 5
    """Saves whose medians are printed."""
    steps_between: NotNegative[int] = 0
    """Steps timed with and without a save; 0: none, the state alone is saved."""
    folder: FilePath = ""
    """Where to save. Empty: a temporary folder."""


def seconds_of(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(config: Config, arguments: Arguments, folder: str) -> dict:
    """Medians over the saves."""
    built = build(config)
    state = built.create_state()
    checkpoints = Checkpoints(folder, CheckpointConfig(keep=2))
    if arguments.steps_between:
        batch = random_batch(built)
        train_step = built.train_step.lower(state, batch).compile()

    def steps() -> None:
        nonlocal state
        for _ in range(arguments.steps_between):
            state, _ = train_step(state, batch)
        jax.block_until_ready(state)

    shapes = parameter_shapes(built.config.model)
    copied, summed, blocked, written, quiet, saving = [], [], [], [], [], []
    for i in range(arguments.saves + 1):
        copied.append(seconds_of(lambda: jax.tree.map(lambda leaf: np.array(leaf, copy=True), state)))
        summed.append(seconds_of(lambda: checksums(state._replace(step=None), shapes)))
        if arguments.steps_between:
            quiet.append(seconds_of(steps))
        start = time.perf_counter()
        checkpoints.save(i + 1, state, {"shapes": shapes})
        blocked.append(time.perf_counter() - start)
        if arguments.steps_between:
            steps()
            saving.append(time.perf_counter() - start)
        if checkpoints.failing():
            raise UserError(f"--folder={folder}: {checkpoints.failure}")
        written.append(time.perf_counter() - start)
    restore = seconds_of(lambda: checkpoints.restore(arguments.saves + 1, built.abstract_state))
    median = lambda seconds: statistics.median(seconds[1:])  # the first compiles
    result = {
        "config": config.name,
        "device": built.mesh.devices.flat[0].device_kind,
        "devices": built.mesh.size,
        "gigabytes": round(sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 1e9, 3),
        "seconds_copy": round(median(copied), 4),
        "seconds_checksums": round(median(summed), 4),
        "seconds_blocked": round(median(blocked), 4),
        "seconds_restored_and_verified": round(restore, 2),
    }
    if not arguments.steps_between:
        return result | {"seconds_until_written": round(median(written), 2)}
    ratios = [a / b for a, b in zip(saving, quiet)]
    result |= {"steps_between": arguments.steps_between, "seconds_of_steps": round(median(quiet), 3)}
    return result | {"slower": round(median(ratios) - 1, 4)}


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(measure(config, arguments, arguments.folder or temporary)))
    return 0


if __name__ == "__main__":
    run_command(main)

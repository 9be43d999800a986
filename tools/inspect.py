"""Read and verify all checkpoints of a run, and show its seconds by activity: python -m tools.inspect RUN."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from options.command_line import parse_arguments, refuse_mistakes
from options.schema import AnyPath, MeshConfig
from system.errors import Exit, StorageLost
from system.files import first_line, in_bucket


@dataclass(frozen=True)
class Arguments:
    """Print a run's checkpoints (step, MB, bits per byte, age, whether the checksums match), and seconds by activity.
    Exit code 3 if a checkpoint is damaged."""

    run_dir: Annotated[AnyPath, tyro.conf.Positional]
    """Folder of the run, here or at gs://."""


if __name__ == "__main__":
    refuse_mistakes(parse_arguments, __doc__, Arguments)  # before the imports, which take seconds

import jax
from etils import epath

from hosts.runtime import run_command, start_jax
from run.checkpoint import Checkpoints
from run.config_json import config_of_run
from run.folder import folder_to_read
from run.record import seconds_by_activity
from training.build import build


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir():
        yield from _files(path) if path.is_dir() else [path]


def _size(path: epath.Path) -> int:
    """Return a file's bytes. On a disk, path.stat() fails if the owner has no name here (google/etils#790)."""
    return path.stat().length if in_bucket(path) else os.stat(path).st_size


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    start_jax()
    folder = folder_to_read(arguments.run_dir)
    _, config = config_of_run(folder)
    checkpoints = Checkpoints(folder)
    abstract = build(replace(config, mesh=MeshConfig()), jax.devices()[:1]).abstract_state
    damaged = False
    val_bpb = folder.figures()
    print(f"{'step':>10} {'MB':>9} {'val_bpb':>9} {'hours old':>10}")
    for step in checkpoints.steps:
        megabytes = sum(_size(path) for path in _files(checkpoints.folder / str(step))) / 1e6
        try:
            facts = checkpoints.restore(step, abstract)[1]
            hours = (time.time() - facts["time"]) / 3600
            bits = f"{val_bpb[step]:.4f}" if step in val_bpb else "-"
            verdict = f"{bits:>9} {hours:10.1f}  verified"
        except StorageLost:
            raise
        except Exception as error:
            verdict, damaged = f"{'':9} {'':10}  DAMAGED: {first_line(error)}", True
        print(f"{step:>10} {megabytes:9.1f} {verdict}")
    for activity, seconds in seconds_by_activity(folder.events.read()).items():
        print(f"{activity:>10} {seconds:9.1f} s")
    return Exit.UNREADABLE if damaged else Exit.COMPLETE


if __name__ == "__main__":
    run_command(main)

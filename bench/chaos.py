"""Kills a run again and again until it completes: python -m bench.chaos --kills=100. Exits 1 where that changed it.

A small run is made once without trouble, then again, as often as it takes, under SIGKILL: at random moments, and at the
most delicate ones: in compilation, while a checkpoint is written, while it is made whole, while an old one is deleted.
At the end parameters, metrics and TensorBoard's series must be those of the untouched run, and nothing half made may be
left.
"""

if __name__ == "__main__":
    from configs.interrupt import end_at_interrupt

    end_at_interrupt()

import json
import random
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from configs.command_line import parse_arguments
from configs.schema import FilePath, NotNegative, UserError
from run.metrics import read_metrics
from run.runtime import run_command

TIMES = ("seconds", "tokens_per_second", "mfu", "data_wait", "time")


@dataclass(frozen=True)
class Arguments:
    """Kills a run again and again until it completes, and compares it with one that was left alone."""

    out: FilePath = "runs/chaos"
    """A folder for the runs."""
    config: FilePath = "configs/small.py"
    """The run."""
    options: str = (
        "--steps=400 --model.depth=1 --model.width=64 --model.heads=1 --model.kv_heads=1 --batch.sequence_length=64 "
        "--batch.tokens_per_step=512 --checkpoint.every_steps=10 --checkpoint.keep_every=100 --eval.every_steps=100 "
        "--eval.tokens=4096 --log.every_steps=5"
    )
    """What makes it short, as it is typed. Checkpoints are frequent, so that kills find them."""
    kills: NotNegative[int] = 100
    """SIGKILLs, the last run being let go on to its end after them."""
    seed: NotNegative[int] = 0
    """Seed of the moments."""


def start(arguments: Arguments, run_dir: Path) -> subprocess.Popen:
    options = shlex.split(arguments.options)
    command = [sys.executable, "train.py", f"--config={arguments.config}", f"--run_dir={run_dir}", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def moments(run_dir: Path, generator: random.Random) -> dict[str, Callable[[float], bool]]:
    """When to kill, as a question that is asked all the time, given the seconds since the start."""
    checkpoints = run_dir / "checkpoints"
    newest = max([int(path.name) for path in checkpoints.glob("*") if path.name.isdigit()], default=0)
    several = newest + 10 * generator.randint(1, 3)
    delay = generator.uniform(0, 8)
    return {
        "at a random moment": lambda seconds: seconds > delay,
        "before the first step": lambda seconds: (run_dir / "lock").exists() and seconds > delay / 2,
        "after a few checkpoints": lambda seconds: (checkpoints / str(several)).exists(),
        "while a checkpoint is written": lambda seconds: any(checkpoints.glob(f"{several}.orbax*/*")),
        "while it is made whole": lambda seconds: any(checkpoints.glob(f"{several}.orbax*/commit_success.txt")),
        "while an old one is deleted": lambda seconds: seconds > 2 and any(checkpoints.glob("*.deleted")),
    }


def state_of(run_dir: Path) -> dict:
    """All that a kill must not change."""
    lines = [{key: value for key, value in line.items() if key not in TIMES} for line in read_metrics(run_dir)]
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    series = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in ("loss", "val_bpb")}
    digest = json.loads((run_dir / "summary.json").read_text())["params_sha256"]
    left = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    return {"params_sha256": digest, "metrics": lines, "tensorboard": series, "checkpoints": left}


def torment(arguments: Arguments, run_dir: Path, generator: random.Random, record: Counter[str]) -> None:
    """One run, killed until it completes, or until there were kills enough."""
    while True:
        kinds = moments(run_dir, generator)
        kind = generator.choice(sorted(kinds))
        enough = record.total() >= arguments.kills
        process, begin = start(arguments, run_dir), time.monotonic()
        while process.poll() is None and (enough or not kinds[kind](time.monotonic() - begin)):
            time.sleep(0.05 if enough else 0.002)
        if process.poll() is None:
            process.kill()
            record[kind] += 1
        said = process.communicate()[0]
        if process.returncode > 0:
            raise RuntimeError(f"after {record.total()} kills {run_dir} ended with {process.returncode}:\n{said}")
        if process.returncode == 0:
            return


def main() -> int:
    arguments = parse_arguments(__doc__, Arguments)
    generator, out = random.Random(arguments.seed), Path(arguments.out)
    if out.exists():
        raise UserError(f"{out} is there already; give another --out, or delete it")
    nothing: Counter[str] = Counter()
    torment(replace(arguments, kills=0), out / "untouched", generator, nothing)
    expected = state_of(out / "untouched")
    record: Counter[str] = Counter()
    runs, differ = 0, []
    while record.total() < arguments.kills:
        torment(arguments, out / f"killed-{runs}", generator, record)
        found = state_of(out / f"killed-{runs}")
        differ += [f"{name} of killed-{runs}" for name in expected if expected[name] != found[name]]
        runs += 1
    result = {"kills": record.total(), **record, "runs": runs, "differ": differ}
    print(json.dumps({**result, "params_sha256": expected["params_sha256"]}))
    return 1 if differ else 0


if __name__ == "__main__":
    run_command(main)

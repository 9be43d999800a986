"""Make a repository with a train.py that ends as planned, for tests of launchers.

`plan` contains, for each start, the exit code of each process: a number, `wait` (until SIGTERM, then 143), or `kill`
(itself). The last start is repeated. Each start of a process writes a line.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

BUCKET = "--checkpoint.folder=gs://bucket/tiny"
TRAIN = """
import json, os, pathlib, signal, sys, time

stops = []
signal.signal(signal.SIGTERM, lambda *_: stops.append(1))  # before anyone can see that it has started
folder = pathlib.Path(@FOLDER@)
number = int(os.environ.get("STAND_IN_PROCESS") or os.environ.get("JAX_PROCESS_ID", "0"))
mine = folder / f"starts.{number}"
past = len(mine.read_text().splitlines()) if mine.exists() else 0
about = {"arguments": sys.argv[1:], "cwd": os.getcwd(), "pid": os.getpid()}
about |= {name: value for name, value in os.environ.items() if name.startswith(("JAX_", "GIVEN_"))}
with mine.open("a") as file:
    print(json.dumps(about), file=file)
print(f"start {past} of process {number}", flush=True)
run_dir = [word.split("=")[1] for word in sys.argv if word.startswith("--run_dir=")]
if run_dir:
    pathlib.Path(run_dir[0]).mkdir(parents=True, exist_ok=True)
plan = json.loads((folder / "plan").read_text())
code = plan[min(past, len(plan) - 1)][number]
if code == "wait":
    until = time.time() + 600  # it does not outlive a test that was killed for long
    while not stops and time.time() < until:
        time.sleep(0.01)
    print(f"saved by process {number}", flush=True)
    code = 143
if code == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(code)
"""
CONFIG = """
from configs.schema import BatchConfig, Config, DataConfig

def get_config():
    batch = BatchConfig(sequence_length=32, tokens_per_step=2048, rows_per_device=2)
    return Config(name="tiny", data=DataConfig(source="gs://bucket/text"), batch=batch)
"""


class StandIn:
    """The repository at `root`. `folder` contains the plan and notes of its runs."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        root.mkdir()
        folder.mkdir()
        (root / "train.py").write_text(TRAIN.replace("@FOLDER@", repr(str(folder))))
        (root / "tiny.py").write_text(CONFIG)
        (root / ".gitignore").write_text(".venv\n")
        subprocess.run(["git", "init", "--quiet", root], check=True)
        self.setup = f"mkdir -p .venv/bin && ln -sf {sys.executable} .venv/bin/python"
        """A command that links .venv to this test's own Python."""

    def plan(self, *starts: list) -> None:
        (self.folder / "plan").write_text(json.dumps(starts))

    def starts(self, process: int = 0) -> list[dict]:
        """Return the arguments and environment of each start of a process."""
        path = self.folder / f"starts.{process}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def counts(self) -> list[int]:
        """Return how often each of two processes has started."""
        return [len(self.starts(process)) for process in range(2)]


def wait_for(happened: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.time() + seconds
    while not happened():
        assert time.time() < deadline, "it did not happen"
        time.sleep(0.02)


def put_on_path(folder: Path, commands: dict[str, str], monkeypatch) -> None:
    """Write shell scripts, by their names, and put them first on PATH."""
    folder.mkdir(exist_ok=True)
    for name, script in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

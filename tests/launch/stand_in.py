"""Make a repository with launch/ and a train.py that ends as planned: a code per start, and the last one repeated."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "launch"
TRAIN = """
import os, pathlib, signal, sys, time
caught = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: caught.append(number))
starts = pathlib.Path("starts." + os.environ.get("JAX_PROCESS_ID", "0"))
past = starts.read_text().splitlines() if starts.exists() else []
starts.write_text("\\n".join([*past, " ".join([os.environ.get("API_KEY", "-"), *sys.argv[1:]]), ""]))
plan = pathlib.Path("plan").read_text().split()
step = plan[min(len(past), len(plan) - 1)]
if step.startswith("save"):
    run = next(word for word in sys.argv if word.startswith("--run_dir=")).partition("=")[2]
    pathlib.Path(run, "checkpoints", str(len(past))).mkdir(parents=True)
if step.startswith("signal"):
    os.kill(os.getpid(), int(step[6:]))
while step == "deaf" or (step == "wait" and not caught):
    time.sleep(0.01)
sys.exit(128 + caught[0] if step == "wait" else int(step.removeprefix("save")))
"""


class StandIn:
    """A committed repository at `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(LAUNCH, root / "launch")
        (root / "train.py").write_text(TRAIN)
        (root / ".gitignore").write_text(".venv\nstarts.*\nplan\nruns\n")
        (root / ".venv/bin").mkdir(parents=True)
        (root / ".venv/bin/python").symlink_to(sys.executable)
        me = ("-c", "user.name=me", "-c", "user.email=me@here")
        for words in (("init", "--quiet"), ("add", "."), (*me, "commit", "--quiet", "--message=all")):
            subprocess.run(["git", *words], cwd=root, check=True)

    def plan(self, text: str) -> None:
        (self.root / "plan").write_text(text)

    def starts(self, process: int = 0) -> list[str]:
        """Return the secret and the arguments of each start of a process."""
        path = self.root / f"starts.{process}"
        return path.read_text().splitlines() if path.exists() else []

    def loop(self, *words: str, **environment: str) -> subprocess.Popen:
        environment = {"PAUSE": "0", **environment}
        return subprocess.Popen(
            [self.root / "launch/loop.sh", *words],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def wait_for(happened: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.time() + seconds
    while not happened():
        assert time.time() < deadline, "it did not happen"
        time.sleep(0.02)

"""Time the phases of a stand-in for train.py, and of a small run."""

import json
import sys
from pathlib import Path

import pytest

import bench.hosts
from tests.commands import CONFIG, ROOT

STAND_IN = """
import json, os, sys, time
from pathlib import Path
folder = Path(sys.argv[2].removeprefix("--run_dir="))
folder.mkdir(exist_ok=True)
again = (folder / "events.jsonl").exists()
if os.environ["JAX_PROCESS_ID"] != "0":
    time.sleep(0.5 if again else 60)
    sys.exit()

def write(name, **line):
    with (folder / name).open("a") as file:
        file.write(json.dumps(line | {"time": time.time()}) + chr(10))

first = 5 if again else 0
time.sleep(0.2)
write("events.jsonl", event="start", step=first)
for step in range(first + 1, first + 6):
    write("metrics.jsonl", step=step, loss=1.0, seconds=0.25 * step)
write("metrics.jsonl", step=first + 5, val_loss=1.0)
write("events.jsonl", event="saved", step=first + 5)
time.sleep(0.5)
if not again:
    sys.exit(42)
write("events.jsonl", event="stop", step=10, seconds={"saves": 3.0, "evaluation": 2.0, "restore": 1.0})
"""
PHASES = ["launch to first step", "a step", "a save", "an evaluation", "kill to the last end", "a restore"]
PHASES += ["launch to the next step"]


def phases_printed(monkeypatch, capfd, *words: str) -> dict[str, float]:
    """Return the line that the command prints for two processes."""
    monkeypatch.setattr(sys, "argv", ["bench.hosts", "--processes", "2", *words])
    assert bench.hosts.main() == 0, capfd.readouterr()
    return json.loads(capfd.readouterr().out.splitlines()[-1])


def test_phases_are_those_of_the_start_after_the_kill(tmp_path: Path, monkeypatch, capfd):
    (tmp_path / "train.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)
    seconds = phases_printed(monkeypatch, capfd, "--out=runs")
    assert [*seconds] == ["processes", *PHASES, "load"]
    expected = {"a step": 0.25, "a save": 3.0, "an evaluation": 2.0, "a restore": 1.0}
    assert expected.items() <= seconds.items() and seconds["processes"] == 2
    assert 0 < seconds["kill to the last end"] < 30  # the killed process would have slept for 60
    with pytest.raises(bench.hosts.UserError, match="runs is there already"):
        bench.hosts.main()


@pytest.mark.slow
def test_the_phases_of_two_processes_are_timed(tmp_path: Path, monkeypatch, capfd):
    (tmp_path / "tiny.py").write_text(CONFIG)
    options = f"{bench.hosts.OPTIONS} --data.source={ROOT}/configs --eval.tokens=2048".replace("4096", "1024")
    monkeypatch.chdir(ROOT)
    words = (f"--out={tmp_path}/hosts", f"--config={tmp_path}/tiny.py", f"--options={options}")
    seconds = phases_printed(monkeypatch, capfd, *words)
    assert all(seconds[name] > 0 for name in PHASES)

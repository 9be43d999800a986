"""Run the commands in this process, and read what they leave."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

import data.prepare.__main__
import evaluate
import export
import reinforce
import sample
import tools.inspect as inspect_run
import train
from interchange import convert
from run.folder import RunFolder
from tests.hosts.exit_codes import exit_code
from tests.repository import ROOT

CONFIG = """
from configs.schema import *

def get_config():
    return Config(
        name="tiny",
        steps=120,
        model=ModelConfig(depth=2, width=32, heads=2, kv_heads=1, head_dim=16, vocab_size=300, dtype="float32"),
        data=DataConfig(source="text", val_fraction=0.2),
        batch=BatchConfig(sequence_length=32, tokens_per_step=512, rows_per_device=2),
        checkpoint=CheckpointConfig(every_steps=20),
        eval=EvalConfig(every_steps=40, tokens=2000, prompts=("the ",), sample_tokens=8),
        log=LogConfig(every_steps=4),
    )
"""
COMMANDS: dict[str, Callable[[], int]] = {
    "train": train.main,
    "reinforce": lambda: train.main("", reinforce.REINFORCEMENT),
    "sample": sample.main,
    "evaluate": evaluate.main,
    "export": export.main,
    "prepare": data.prepare.__main__.main,
    "inspect_run": inspect_run.main,
    "convert": convert.main,
}
TIMES = {"seconds", "tokens_per_second", "data_wait", "time", "seconds_by_activity", "peak_memory_bytes"}
PREEMPTED = 143  # the exit code after SIGTERM


def write_folder(folder: Path, config: str = CONFIG) -> Path:
    """Write a config, tiny.py, and text to train on."""
    (folder / "tiny.py").write_text(config)
    (folder / "text").mkdir()
    words = (ROOT / "tests" / "words.txt").read_text().split()  # train.py itself changes
    for i in range(30):
        (folder / "text" / f"{i}.txt").write_text(" ".join(words[i:] + words[:i]))
    return folder


def lines_of(run_dir: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without measured times."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in RunFolder(run_dir).metrics()]


def summary(run_dir: Path) -> dict:
    """Return what summary.json says of a complete run."""
    return json.loads((run_dir / "summary.json").read_text())


def run(command: str, monkeypatch: pytest.MonkeyPatch, *arguments: str, devices: int = 2) -> int:
    """Run a command in this process on some of its devices, and return its exit code."""
    with monkeypatch.context() as patch:
        some = jax.devices()[:devices]
        patch.setattr(jax, "devices", lambda *_: some)
        patch.setattr(sys, "argv", [f"{command}.py", *arguments])
        return exit_code(COMMANDS[command])


def killed_after(step: int, run_dir: Path, copy: Path | str) -> Path:
    """Return a copy of a complete run, as if it had been killed once `step` was saved."""
    killed = Path(shutil.copytree(run_dir, copy))
    (killed / "summary.json").unlink()
    for path in (killed / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    return killed


def assert_as_untouched(run_dir: Path, untouched: Path) -> None:
    """Require the metrics and the parameters of a run that nothing disturbed."""
    assert lines_of(run_dir) == lines_of(untouched)
    assert summary(run_dir)["params_sha256"] == summary(untouched)["params_sha256"]

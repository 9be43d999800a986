"""Run the three stages through the one loop of train.py: each is killed, and resumes to the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT, assert_as_untouched, summary, write_folder
from tests.run.short_runs import FEW_ANSWERS, WITH_ROOM_FOR_ANSWERS

# The reward of an untrained network's answers differs, and the process dies once a checkpoint is complete.
SCRIPT = """
import os, runpy, signal, sys
import run.saver
import reinforcement.tasks
reinforcement.tasks.Sums.reward = lambda self, problem, text: float(len(text) % 2 == 0)
wait, last = run.saver.Saver.wait, int(os.environ["DIES_AFTER"])
def die_after(self):
    wait(self)
    if last and last in self.steps:
        os.kill(os.getpid(), signal.SIGKILL)
run.saver.Saver.wait = die_after
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OFTEN = ("--steps=6", "--checkpoint.every_steps=2", "--eval.every_steps=3", "--log.every_steps=1")
STAGES = {
    "pretraining": ("train.py", "--config=tiny.py"),
    "fine-tuning": ("train.py", f"--config={ROOT}/configs/chat.py", "--init_from=base", "--data.source=chats"),
    "reinforcement": ("reinforce.py", "--config=few.py", "--init_from=base"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with configs, text, conversations, and a network to start from."""
    folder = write_folder(tmp_path_factory.mktemp("stages"), WITH_ROOM_FOR_ANSWERS)
    (folder / "few.py").write_text(FEW_ANSWERS)
    words = (ROOT / "tests/words.txt").read_text().split()
    message = lambda role, start: {"role": role, "content": " ".join(words[start : start + 3])}
    chats = [[message("user", i), message("assistant", 2 * i)] for i in range(200)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    start(folder, 0, "train.py", "--config=tiny.py", "--run_dir=base", "--steps=2")
    made = ("--source=chats.jsonl", "--conversations", "--out=chats", "--tokenizer=base/tokenizer")
    command = [sys.executable, "-m", "data.prepare", *made, "--val_fraction=0.2"]
    subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    return folder


def start(folder: Path, dies_after: int, program: str, *words: str) -> None:
    """Run a command on one device to its end, or until the checkpoint of a step is complete."""
    environment = os.environ | {"DIES_AFTER": str(dies_after), "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-c", SCRIPT, str(ROOT / program), *words]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ended.returncode == (-9 if dies_after else 0), ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_killed_resumes_to_the_same_bits(folder, stage):
    program, *words = STAGES[stage]
    options = (*words, *OFTEN, "--batch.rows_per_device=2", "--model.dtype=float32")
    start(folder, 0, program, *options, f"--run_dir={stage}-whole")
    for last in (2, 4, 0):
        start(folder, last, program, *options, f"--run_dir={stage}")
    assert_as_untouched(folder / stage, folder / f"{stage}-whole")
    assert summary(folder / stage)["params_sha256"] != summary(folder / "base")["params_sha256"]

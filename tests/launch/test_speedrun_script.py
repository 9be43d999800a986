"""Run launch/speedrun.sh with stand-ins for its commands, killed at each of them; and in full, at a tiny size."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import evaluate
from data.prepare.__main__ import Arguments as PrepareArguments
from options.arguments import StartArguments
from options.command_line import parse_arguments, parse_own
from run.folder import RunFolder
from tests.evaluation import core_bundle
from tests.repository import ROOT, copy_checkout
from tools import depth, report

STAND_IN = f"""#!/bin/sh
# Stands for Python, launch/loop.sh, make, hf, curl and unzip. It leaves what they leave.
name=$(basename "$0")
[ "$1" = -c ] && exec {sys.executable} "$@"
echo "$name $*" >> commands
count=$(wc -l < commands)
out= run_dir= tasks=
for word in "$@"; do
    case $word in
        --out=*|--output=*) out=${{word#*=}} ;;
        --run_dir=*) run_dir=${{word#*=}} ;;
        --tasks=*) tasks=${{word#*=}} ;;
        --local-dir=*) mkdir -p "${{word#*=}}" ;;
        -d) mkdir -p datasets/eval_bundle; touch datasets/eval_bundle/core.yaml ;;
    esac
done
[ "$count" = "$KILL_AT" ] && kill -KILL 0
[ "$count" = "$FAIL_AT" ] && exit 42
case "$name $*" in
    *tools.depth*) echo "12 1321205760 0.70" ;;
    *data.prepare*)
        mkdir -p "$out"
        case $out in */mmlu) tokens=200 ;; */gsm8k) tokens=50 ;; *) tokens=1000 ;; esac
        echo "{{\\"train\\": {{\\"tokens\\": $tokens}}}}" > "$out/dataset.json" ;;
    *tools.report*) touch "$out" ;;
    *evaluate.py*) mkdir -p "$run_dir/$tasks" ;;
    loop.sh*|*reinforce.py*) mkdir -p "$run_dir"; touch "$run_dir/summary.json" ;;
esac
"""


class Clone:
    """A folder with the script, and stand-ins for the commands that it calls."""

    def __init__(self, folder: Path):
        self.folder = folder
        for path in (".venv/bin/python", ".venv/bin/hf", "launch/loop.sh", "bin/make", "bin/curl", "bin/unzip"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(STAND_IN)
            (folder / path).chmod(0o755)
        shutil.copy(ROOT / "launch/speedrun.sh", folder / "launch")

    def start(self, **variables: str) -> subprocess.CompletedProcess:
        """Run the script to its end, and forget the commands of earlier starts."""
        (self.folder / "commands").write_text("")
        environment = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "HOME": str(self.folder), **variables}
        return subprocess.run(
            [self.folder / "launch/speedrun.sh"],
            env=environment,
            start_new_session=True,
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def commands(self) -> list[str]:
        """Return the commands of the last start, in order."""
        return (self.folder / "commands").read_text().splitlines()


MODES = {
    "tiny": {"TINY": "1"},
    "depth": {"DEPTH": "12", "REINFORCE": "1", "PRICE": "3"},
    "dollars": {"DOLLARS": "2", "PRICE": "3", "RUN_CODE": "1", "PRETRAIN_OPTIONS": "--ratio=8 --mesh.fsdp=2"},
}


def of_stages(commands: list[str]) -> list[str]:
    """Return the commands without those that every start repeats."""
    return [command for command in commands if command != "make setup" and "tools.depth" not in command]


@pytest.mark.parametrize("mode", MODES)
def test_a_script_that_was_killed_anywhere_continues_at_that_stage(mode, tmp_path):
    whole = Clone(tmp_path / "whole")
    done = whole.start(**MODES[mode])
    assert done.returncode == 0, done.stderr
    expected = whole.commands
    for count in range(1, len(expected) + 1):
        clone = Clone(tmp_path / str(count))
        assert clone.start(**MODES[mode], KILL_AT=str(count)).returncode == -signal.SIGKILL
        assert clone.start(**MODES[mode]).returncode == 0
        again, left = (of_stages(commands) for commands in (clone.commands, expected[count - 1 :]))
        assert again[len(again) - len(left) :] == left, count
        # Of what was done before, only a stage's own downloads are repeated.
        assert all(command.startswith(("hf ", "curl ")) for command in again[: len(again) - len(left)]), count
    repeated = whole.start(**MODES[mode])
    assert repeated.returncode == 0 and not any("loop.sh" in command for command in whole.commands)


def test_the_commands_have_options_that_exist(tmp_path, monkeypatch):
    """With the real parsers. The shares of the mixture are tokens times epochs."""
    clone, commands = Clone(tmp_path), []
    for variables in MODES.values():
        assert clone.start(**variables).returncode == 0
        commands += clone.commands
    parsers = {
        "-m data.prepare": PrepareArguments,
        "evaluate.py": evaluate.Arguments,
        "-m tools.report": report.Arguments,
    }
    kinds = {"-m tools.depth": depth.Arguments, "loop.sh": StartArguments, "reinforce.py": StartArguments}
    seen = set()
    monkeypatch.chdir(ROOT)
    for command in commands:
        words = command.split()
        name = " ".join(words[1:3]) if words[1] == "-m" else words[0] if words[0] == "loop.sh" else words[1]
        own = [word for word in words if word.startswith("--")]
        if name in parsers:
            others = [word for word in words[3:] if not word.startswith("--") and name == "-m tools.report"]
            parse_arguments("", parsers[name], [*others, *own])
        elif name in kinds:
            monkeypatch.setattr(sys, "argv", [name, *own])
            parse_own("", kinds[name])
        seen.add(name)
    assert seen >= parsers.keys() | kinds.keys()
    mixture = next(command for command in commands if "smoltalk,600:" in command)
    assert "--data.source=1000:" in mixture and ",200:" in mixture and "--epochs=1.4400" in mixture
    assert any("--max_files=26 " in command for command in commands)  # 1.3 B tokens
    pretraining = [command for command in commands if "loop.sh" in command and "nanochat.py" in command]
    assert "--ratio=8 --mesh.fsdp=2" in pretraining[-1] and "--ratio" not in pretraining[0]
    assert any("--tasks=chatcore " in command and "--run_code" in command for command in commands)


def test_the_record_has_each_stage_s_seconds_and_a_failure_ends_with_its_code(tmp_path):
    clone = Clone(tmp_path)
    failed = clone.start(TINY="1", FAIL_AT="2")
    assert failed.returncode == 42 and "pretraining: 0 s, exit code 42" in failed.stdout.replace(" 1 s", " 0 s")
    done = clone.start(TINY="1")
    lines = [line.split("\t") for line in (tmp_path / "runs/speedrun-tiny/stages.tsv").read_text().splitlines()]
    codes = {stage: [code for name, _, code, _ in lines if name == stage] for stage, *_ in lines}
    assert codes["pretraining"] == ["42", "0"] and codes["fine-tuning"] == codes["reinforcement"] == ["0"]
    assert all(int(seconds) < 60 for _, seconds, _, _ in lines)
    assert done.stdout.count("left out, since its questions are not here") == 3
    # Another command is another stage: train.py says what may change.
    assert clone.start(TINY="1", FINETUNE_OPTIONS="--seed=1").returncode == 0
    assert any("--seed=1" in command for command in clone.commands)
    assert not any("small.py" in command for command in clone.commands)


@pytest.mark.parametrize(
    "variables", [{}, {"TINY": "1", "DEPTH": "4"}, {"DEPTH": "4", "HOURS": "1"}, {"DOLLARS": "100"}], ids=str
)
def test_a_request_that_is_none_or_two_is_refused(tmp_path, variables):
    clone = Clone(tmp_path)
    refused = clone.start(**variables)
    assert refused.returncode == 2 and refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1
    assert not clone.commands and not (tmp_path / "runs").exists()


TINY = {
    "TINY": "1",
    "PRICE": "3",
    "PRETRAIN_OPTIONS": "--data.source=configs --model.depth=1 --model.width=32 --model.heads=4 --model.kv_heads=4 "
    "--model.head_dim=8 --model.vocab_size=512 --batch.tokens_per_step=512 --eval.tokens=1024 --steps=100 "
    "--checkpoint.every_steps=20",
    "FINETUNE_OPTIONS": "--steps=2 --eval.tokens=1024",
    "REINFORCE_OPTIONS": "--steps=1 --reinforce.samples=2",
    "EVALUATE_OPTIONS": "--items=2",
}


@pytest.mark.slow
def test_a_tiny_run_that_is_killed_in_pretraining_ends_with_a_card(tmp_path, monkeypatch):
    copy_checkout(tmp_path)
    monkeypatch.setattr(core_bundle, "TASKS", core_bundle.TASKS[:1])
    core_bundle.make_bundle(tmp_path / "eval_bundle")
    offline = {"PIP_NO_INDEX": "1", "UV_OFFLINE": "1", "CORE_BUNDLE": "eval_bundle"}
    # `make test EXTRA=tpu` hands on its variables, with which the script's `make` would install more.
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "EXTRA")}
    command, environment = [tmp_path / "launch/speedrun.sh"], inherited | TINY | offline
    out = tmp_path / "runs/speedrun-tiny"
    with (tmp_path / "log").open("wb") as log:
        started = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        while not any(RunFolder(out / "base").finished_steps()[1:]) and started.poll() is None:
            time.sleep(0.1)
        os.killpg(started.pid, signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert not (out / "base/summary.json").exists()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    starts = [json.loads(line) for line in (out / "base/events.jsonl").read_text().splitlines()]
    assert [event["step"] > 0 for event in starts if event["event"] == "start"] == [False, True]
    card = (out / "report.html").read_text()
    for figure in ("bits per byte, held out", "CORE", "pass@2", "tiny-reinforced", "Time of each stage", "dollars"):
        assert figure in card, figure
    again = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert again.returncode == 0 and again.stdout.count("done before") == 6, again.stdout

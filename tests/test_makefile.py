"""Interrupt each target of the Makefile at each of its commands, and repeat it. Stand-ins leave what commands leave."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.repository import ROOT

POSIX = ("awk", "basename", "cat", "cp", "head", "mkdir", "mv", "sh", "sleep", "stat", "touch")
PASS = """#!/bin/sh
# STOP is the point at which a person presses Ctrl-C, which reaches all processes of the terminal.
point=$(cat points)
pass() { point=$((point + 1)); echo $point > points; if [ $point = "$STOP" ]; then kill -INT 0; sleep 60; fi; }
"""
COMMAND = f"""{PASS}
# Python, uv, docker, and what is installed. Each has a point in its middle and one at its end.
run=runs/none
for word in "$@"; do
    case "$word" in
        --config=*) run=runs/$(basename "${{word#*=}}" .py) ;;
        --name=*) run=runs/${{word#*=}} ;;
        --source=*) source=${{word#*=}} ;;
        --out=*) out=${{word#*=}} ;;
    esac
done
install_python() {{ mkdir -p .venv/bin; pass; cp "$1.version" .venv/bin/python.version; cp "$1" .venv/bin/python; }}
case "$*" in
    "-c "*) pass; cat "$0.version" ;;
    "-m venv "*) install_python "$0" ;;
    "venv "*) install_python "$4" ;;
    "-m pip --version") pass ;;
    "-m pip install "*|"pip install "*)
        pass
        for name in ruff pyright lint-imports zensical; do cp "$0" .venv/bin/$name; done ;;
    "-m reinforcement.tasks") echo first; pass; echo last ;;
    "-m data.prepare "*)  # refuses a source whose content or time changed
        version="$(stat -c %y "$source") $(cat "$source")"; mkdir -p "$out"
        if [ -f "$out/version" ] && [ "$(cat "$out/version")" != "$version" ]; then exit 2; fi
        echo "$version" > "$out/version"; cat "$source" > "$out/shard"; pass
        touch "$out/dataset.json" ;;
    train.py*|reinforce.py*) mkdir -p $run; pass; touch $run/summary.json ;;
    *) pass ;;
esac
pass
"""
RM = f"""{PASS}
# rm -rf PATHS, one after the other. A folder loses one of its files first.
shift
for path in "$@"; do
    if [ -d "$path" ]; then {shutil.which("rm")} -f "$path/bin/ruff"; pass; fi
    {shutil.which("rm")} -rf "$path"
done
"""


class Clone:
    """A folder with the Makefile, and stand-ins for the commands that it calls."""

    def __init__(self, folder: Path, uv: bool = False, installed: Path | None = None):
        """Take the set-up of the folder `installed`, if it has one."""
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy2(ROOT / name, folder)
        if installed and (installed / ".venv").exists():
            shutil.copytree(installed / ".venv", folder / ".venv")
        (folder / "points").write_text("0")
        for name in POSIX:
            (folder / "bin" / name).symlink_to(shutil.which(name) or name)
        commands = {"python3.12": COMMAND, "python3.13": COMMAND, "docker": COMMAND, "git": PASS, "rm": RM}
        for name, text in (commands | ({"uv": COMMAND} if uv else {})).items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
            (folder / "bin" / f"{name}.version").write_text(name)

    def make(self, *words: str, stop: int = 0) -> int:
        """Run a target, with Ctrl-C at the point `stop` (0: never). Return the exit code."""
        environment = {"PATH": f"{self.folder}/bin", "HOME": str(self.folder), "STOP": str(stop)}
        (self.folder / "points").write_text("0")
        command = [shutil.which("make") or "make", *words]
        return subprocess.run(command, cwd=self.folder, env=environment, start_new_session=True, timeout=60).returncode

    @property
    def points(self) -> int:
        """Return the number of points that the last `make` passed."""
        return int((self.folder / "points").read_text())

    def files(self) -> dict[str, str]:
        """Return the files that were left, with their contents."""
        left = (path for path in self.folder.rglob("*") if path.is_file() and path.name not in ("points", "version"))
        return {str(path.relative_to(self.folder)): path.read_text(errors="replace") for path in left}


TARGETS = ["setup", "setup with uv", "train", "chat", "reinforce", "test", "check", "docs", "image"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_that_was_interrupted_anywhere_is_completed_by_repeating_it(target, tmp_path):
    target, _, installer = target.partition(" with ")
    whole = Clone(tmp_path / "whole", uv=installer == "uv")
    assert whole.make(target) == 0
    expected = whole.files()
    assert whole.make(target) == 0 and whole.files() == expected
    installed = None if target == "setup" else whole.folder
    clones = (Clone(tmp_path / str(number), installer == "uv", installed) for number in range(99))
    counted = next(clones)
    assert counted.make(target) == 0 and counted.files() == expected
    for stop, clone in zip(range(1, counted.points + 1), clones):
        assert clone.make(target, stop=stop) != 0, stop
        assert clone.make(target) == 0, stop
        assert clone.files() == expected, stop


def test_a_set_up_that_is_interrupted_while_it_deletes_another_python_s_is_not_taken_for_complete(tmp_path):
    whole, deleted = Clone(tmp_path / "whole"), 0
    assert whole.make("setup") == 0  # by Python 3.13
    other = ("setup", "PYTHON=python3.12", "EXTRA=tpu")
    counted = Clone(tmp_path / "counted", installed=whole.folder)
    assert counted.make(*other) == 0
    for stop in range(1, counted.points + 1):
        clone = Clone(tmp_path / str(stop), installed=whole.folder)
        assert clone.make(*other, stop=stop) != 0
        deleted += not (clone.folder / ".venv/bin/ruff").exists()
        assert clone.make("setup") == 0 and (clone.folder / ".venv/bin/ruff").exists(), stop
    assert deleted

"""Ctrl-C and garbage while a command's modules are imported."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    path
    for path in ROOT.rglob("*.py")
    if ".venv" not in path.parts and "tests" not in path.parts and "\n    run_command(main)\n" in path.read_text()
)
START = "import os, signal\nfrom configs.interrupt import *\nfrom configs.interrupt import raise_at_interrupt\n"
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)\n"


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("end_at_interrupt()\n" + INTERRUPT, 130, "interrupted before it started\n"),
        ("end_at_interrupt()\nraise_at_interrupt()\n" + INTERRUPT, -signal.SIGINT, "KeyboardInterrupt"),
        ("signal.signal(signal.SIGINT, signal.SIG_IGN)\nend_at_interrupt()\n" + INTERRUPT, 0, ""),
    ],
    ids=["while importing", "after it", "ignored, as under nohup"],
)
def test_an_interrupt(program, code, said):
    start = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + START
    done = subprocess.run([sys.executable, "-c", start + program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and (done.stderr == said or done.stderr.strip().endswith(said or "\0"))


def test_help_that_nobody_reads_to_its_end_leaves_no_traceback():
    read = f"{sys.executable} tune.py --help | head -n 1"
    done = subprocess.run(["bash", "-c", read], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "usage: python tune.py [-h] [OPTIONS]\n" and done.stderr == ""


def test_help_names_a_module_as_it_is_started():
    words = [sys.executable, "-m", "tools.goodput"]
    assert "python -m tools.goodput --help" in subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stderr


def test_garbage_is_not_looked_for_in_what_was_imported():
    program = "assert not gc.isenabled()\nraise_at_interrupt()\nassert gc.isenabled() and gc.get_freeze_count()"
    subprocess.run([sys.executable, "-c", f"import gc\n{START}end_at_interrupt()\n{program}"], cwd=ROOT, check=True)


def test_every_command_starts_with_it():
    assert len(COMMANDS) > 12
    for path in COMMANDS:
        first = ast.unparse(ast.parse(path.read_text()).body[1])
        assert first == (
            "if __name__ == '__main__':\n    from configs.interrupt import end_at_interrupt\n    end_at_interrupt()"
        ), path

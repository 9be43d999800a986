"""Test that programs of a network run within their limits."""

import socket

import pytest

from evaluation import execution
from evaluation.execution import succeeds

REFUSED = """
try:
    {program}
except (OSError, MemoryError) as error:
    assert "PermissionError" in repr(error) or "MemoryError" in repr(error)
else:
    raise AssertionError
"""
"""A program that is right if another fails by its limits."""


@pytest.mark.parametrize(
    ("program", "right"),
    [
        ("import math, collections\nassert math.gcd(12, 18) == 6", True),
        ("print('noise' * 1000)\nimport sys\nprint('noise', file=sys.stderr)", True),
        ("open(__import__('os').__file__).read()", True),
        ("assert False", False),
        ("def f(:", False),
        ("\0", False),
        ("\ud800", False),
        ("raise SystemExit(1)", False),
        ("input()", False),
        ("import sys\nsys.stdout.write('x')\nraise KeyboardInterrupt", False),
    ],
)
def test_a_program_is_right_if_it_ends_without_an_exception(program, right):
    assert succeeds(program) == right


@pytest.mark.parametrize(
    "program",
    [
        "open('here', 'w')",
        "import os; os.open('here', os.O_CREAT | os.O_RDWR)",
        "import os; os.mkdir('here')",
        "import os; os.remove(KEPT)",
        "import os; os.rename(KEPT, KEPT + '2')",
        "import shutil, os; shutil.rmtree(os.path.dirname(KEPT))",
        "import pathlib; pathlib.Path(KEPT).unlink()",
        "import os; os.system('true')",
        "import os; os.fork()",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.kill(os.getppid(), 0)",
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.create_connection(('127.0.0.1', PORT))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:PORT')",
        "x = bytearray(2**30)",
    ],
)
def test_a_program_cannot_write_start_processes_connect_or_fill_the_memory(program, tmp_path):
    kept = tmp_path / "folder" / "kept"
    kept.parent.mkdir()
    kept.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = program.replace("KEPT", repr(str(kept))).replace("PORT", str(server.getsockname()[1]))
        assert not succeeds(program)
        assert succeeds(REFUSED.format(program=program))
    assert kept.read_text() == "kept"


def test_an_endless_loop_ends():
    assert not succeeds("while True: pass", seconds=1.0)


def test_the_environment_of_the_command_is_not_the_program_s(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert succeeds("import os; assert 'HF_TOKEN' not in os.environ")


def test_the_memory_is_a_limit_of_the_program_alone():
    assert execution.MEMORY < 2**30 and succeeds("x = bytearray(2**20)")

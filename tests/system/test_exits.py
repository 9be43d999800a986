"""Test the exit code and the message of each exception: the whole table."""

import errno
import inspect
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import system.errors
from system.errors import (
    CODES,
    Damaged,
    Exit,
    FailedElsewhere,
    NoCheckpoint,
    OutputClosed,
    StartAgain,
    StorageLost,
    TrainingAborted,
    UserError,
)
from system.exits import INTERRUPTED, PEER_LOST, Ending, ending_of, exit_code_of, shared_kind

ROOT = Path(__file__).parents[2]
AGAIN = "error: why; start all again"

OURS = {
    UserError: (2, "error: why"),
    StorageLost: (42, AGAIN),
    StartAgain: (42, AGAIN),
    NoCheckpoint: (3, "error: why"),
    Damaged: (3, "error: why"),
    TrainingAborted: (1, "error: why"),
    FailedElsewhere: (1, "error: why"),
    OutputClosed: (1, ""),
}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WITHOUT_ROOM = (1, "error: runs/x cannot be written: no space")
ASKED = [
    (KeyboardInterrupt(), 130, INTERRUPTED),
    (KeyboardInterrupt("nothing was planned"), 130, "nothing was planned"),
    (SystemExit(), 0, ""),
    (SystemExit(143), 143, ""),
    (SystemExit("a text"), 1, "a text"),
]


def test_the_table_has_every_exception_of_ours():
    defined = inspect.getmembers(
        system.errors, lambda member: inspect.isclass(member) and issubclass(member, Exception)
    )
    assert {kind for _, kind in defined} == CODES.keys() == OURS.keys()


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("kind", OURS)
def test_an_exception_of_ours_has_one_code_alone_or_together_and_keeps_it_when_all_raise_it(kind, alone):
    assert ending_of(kind("why"), alone) == OURS[kind]
    assert shared_kind(kind("why")) is kind


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [*((OSError(number, "no space", "runs/x"), *WITHOUT_ROOM) for number in NO_ROOM), *ASKED],
)
def test_a_full_disk_and_what_a_person_or_the_system_asked_for_print_no_traceback(error, code, message, alone):
    assert ending_of(error, alone) == (code, message)


@pytest.mark.parametrize(
    ("error", "together", "alone", "shared"),
    [
        (OSError(errno.ESTALE, "stale", "runs/x"), 42, 42, StorageLost),
        (ValueError("UNAVAILABLE: of tensorstore"), 42, 42, StorageLost),
        (BrokenPipeError(errno.EPIPE, "of another file than the output"), 42, 42, StorageLost),
        (PermissionError(errno.EACCES, "denied", "runs/x"), 1, 1, FailedElsewhere),
        (OSError(errno.ENOSPC, "no space", "runs/x"), 1, 1, FailedElsewhere),
        (ZeroDivisionError("a defect"), 1, 1, FailedElsewhere),
        (RuntimeError("a defect"), 1, 1, FailedElsewhere),
        # All devices take part in an operation: if one process alone has its error, another one is gone.
        (jax.errors.JaxRuntimeError("INTERNAL: an operation failed"), 1, 42, FailedElsewhere),
        (ValueError("an array of another process"), 1, 42, FailedElsewhere),
    ],
)
def test_an_error_that_is_not_ours_has_a_code_alone_together_and_on_the_other_processes(error, together, alone, shared):
    assert ending_of(error).code == together == CODES[shared] == CODES[shared_kind(error)]
    assert shared_kind(error) is shared
    of_lost_peer = Ending(Exit.PEER_LOST, PEER_LOST)
    assert ending_of(error, alone=True) == (of_lost_peer if alone != together else ending_of(error))


def test_an_error_that_is_not_ours_prints_its_traceback(capsys):
    def main() -> int:
        raise ZeroDivisionError("a defect")

    assert exit_code_of(main, "") == Exit.FAILED
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and "in main" in said and said.endswith("ZeroDivisionError: a defect\n")


def test_a_command_without_jax_ends_as_the_others_do_and_says_after_ctrl_c_what_it_kept(capsys):
    def interrupted() -> int:
        raise KeyboardInterrupt

    def lost() -> int:
        raise StorageLost("why")

    assert exit_code_of(lambda: 0, "") == Exit.COMPLETE
    assert exit_code_of(lost, "") == Exit.PEER_LOST
    assert exit_code_of(interrupted, "interrupted; the same command continues") == Exit.INTERRUPTED
    assert capsys.readouterr().err == f"{AGAIN}\ninterrupted; the same command continues\n"


WITHOUT_READER = """
import sys
from system.exits import exit_code_of
sys.exit(exit_code_of(lambda: print("an output") or 0, ""))
"""


def test_a_command_whose_output_nobody_reads_says_nothing():
    reader, pipe = os.pipe()
    os.close(reader)
    with open(pipe, "w") as output:
        command = [sys.executable, "-c", WITHOUT_READER]
        ended = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")

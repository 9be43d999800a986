"""How a command ends."""

import errno
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from configs.exit_codes import Exit
from configs.schema import UserError
from run.runtime import NoCheckpoint, Stop, run_command

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("raised", "code", "says"), [(UserError("do this"), 2, "error: do this\n"), (None, 0, "")])
def test_exit_codes(raised, code, says, capsys):
    def main():
        if raised:
            raise raised
        return 0

    with pytest.raises(SystemExit) as end:
        run_command(main)
    assert end.value.code == code and capsys.readouterr().err == says


def test_what_started_a_command_starts_it_again_after_two_codes():
    assert [int(code) for code in Exit if code.start_again] == [42, 143]
    assert [int(code) for code in Exit] == [0, 1, 2, 3, 42, 130, 143]


def test_a_peer_that_does_not_come_is_code_42():
    script = "from run.runtime import *\ndef main(): raise PeerLost('process 3 has not come')\nrun_command(main)"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 42 and ended.stderr == "error: process 3 has not come; start all again\n"


def test_ctrl_c_outside_of_training(capsys):
    # Python's own handler: a shell's background jobs ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(SystemExit) as end:
        run_command(lambda: os.kill(os.getpid(), signal.SIGINT) or 0)
    signal.signal(signal.SIGINT, before)
    assert end.value.code == 130 and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_without_a_traceback(number, capsys):
    def main():
        raise OSError(number, "no space", "runs/x/config.json")

    with pytest.raises(SystemExit) as end:
        run_command(main)
    assert end.value.code == 1
    assert capsys.readouterr().err == "error: runs/x/config.json cannot be written: no space\n"


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_a_request_while_steps_are_taken_and_what_it_was_outside(sign, code):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Stop() as stop, stop.heeded():
        assert not stop.after(1)
        os.kill(os.getpid(), sign)
        assert stop.after(2) and stop.code == stop.agreed_code() == code
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_no_readable_checkpoint_is_code_3(capsys):
    def main():
        raise NoCheckpoint("all are damaged")

    with pytest.raises(SystemExit) as end:
        run_command(main)
    assert end.value.code == 3 and capsys.readouterr().err == "error: all are damaged\n"


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_training_ends_it_at_once_even_where_a_callback_swallows_the_exception(sign, code):
    def main():
        with Stop() as stop:
            with suppress(KeyboardInterrupt, SystemExit):  # as JAX's callbacks do
                os.kill(os.getpid(), sign)
            with stop.heeded():
                pytest.fail("the run went on")

    with pytest.raises(SystemExit) as end:
        run_command(main)
    assert end.value.code == code


def test_a_second_ctrl_c_ends_the_process_and_says_what_is_lost():
    script = (
        "import os, signal, time\n"
        "from run.runtime import Stop\n"
        "with Stop() as stop, stop.heeded():\n"
        "    for _ in range(2):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 130 and "steps after the newest whole checkpoint are lost" in ended.stderr

"""Test how a command ends."""

import errno
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from configs.exit_codes import Exit
from configs.files import append_whole, write_whole
from configs.schema import UserError
from hosts.runtime import NoCheckpoint, run_command
from hosts.stop import Stop

ROOT = Path(__file__).parents[2]
FULL = (errno.ENOSPC, errno.EDQUOT)


def exit_code(main) -> int:
    """Return the exit code of a command."""
    with pytest.raises(SystemExit) as end:
        run_command(main)
    return end.value.code


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (None, 0, ""),
        (UserError("do this"), 2, "error: do this\n"),
        (NoCheckpoint("all are damaged"), 3, "error: all are damaged\n"),
        *((OSError(number, "no space", "runs/x"), 1, "error: runs/x cannot be written: no space\n") for number in FULL),
    ],
)
def test_exit_codes(raised, code, says, capsys):
    assert exit_code(Mock(return_value=0, side_effect=raised)) == code and capsys.readouterr().err == says


def test_launchers_restart_a_command_after_two_codes():
    assert [int(code) for code in Exit if code.start_again] == [42, 143]
    assert [int(code) for code in Exit] == [0, 1, 2, 3, 42, 130, 143]


def test_a_peer_that_never_joins_is_code_42():
    script = "from hosts.runtime import *\ndef main(): raise PeerLost('process 3 has not come')\nrun_command(main)"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 42 and ended.stderr == "error: process 3 has not come; start all again\n"


def test_ctrl_c_outside_of_training(capsys):
    # Python's own handler: background jobs of a shell ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    code = exit_code(lambda: os.kill(os.getpid(), signal.SIGINT) or 0)
    signal.signal(signal.SIGINT, before)
    assert code == 130 and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("write", [write_whole, append_whole])
def test_a_file_without_room_is_named_and_keeps_its_content(write, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    (tmp_path / "file").write_text("before")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space") as error:
        write(tmp_path / "file", "after")
    assert error.value.filename == str(tmp_path / "file")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "before")]


def test_a_line_that_fits_in_part_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("before\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len("before\n") + 70, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_whole(tmp_path / "file", "x" * 99 + "\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "file").read_text() == "before\n"


@pytest.mark.parametrize(("text", "shown"), [("Event loop is closed", 0), ("another", 1)])
def test_writes_left_by_a_failed_save_print_no_traceback(text, shown):
    """tensorstore prints errors of its callback in a thread of its own, as this does."""
    program = f"""
import asyncio, time, tensorstore
from hosts.runtime import start_jax
start_jax()
loop = asyncio.new_event_loop()
facts = dict(driver="zarr", kvstore="memory://", metadata=dict(dtype="<f4", shape=[3]), create=True)
async def begun():
    await tensorstore.open(facts)
async def end_before_it():
    def refuse(*_, **__):
        raise RuntimeError({text!r})
    asyncio.ensure_future(begun())
    await asyncio.sleep(0)
    loop.call_soon_threadsafe = refuse
loop.run_until_complete(end_before_it())
time.sleep(1)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.count("Traceback") == shown, done.stderr


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_a_request_during_steps_and_unchanged_outside(sign, code):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Stop() as stop, stop.heeded():
        assert not stop.after(1)
        os.kill(os.getpid(), sign)
        assert stop.after(2) and stop.code == stop.agreed_code() == code
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_before_training_ends_it_even_if_a_callback_swallows_the_exception(sign, code):
    def main():
        with Stop() as stop:
            with suppress(KeyboardInterrupt, SystemExit):  # like JAX's callbacks
                os.kill(os.getpid(), sign)
            with stop.heeded():
                pytest.fail("the run went on")

    assert exit_code(main) == code


def test_a_second_ctrl_c_ends_the_process_and_reports_the_loss():
    script = (
        "import os, signal, time\n"
        "from hosts.stop import Stop\n"
        "with Stop() as stop, stop.heeded():\n"
        "    for _ in range(2):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 130 and "steps after the newest checkpoint are lost" in ended.stderr

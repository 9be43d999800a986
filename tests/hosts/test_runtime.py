"""Test how a command starts and ends."""

import errno
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest

from hosts.runtime import (
    report_unless_loop_is_closed,
    require_known_flags,
    require_platform,
    start_jax,
)
from system.errors import NoCheckpoint, StorageLost, UserError
from system.files import append_whole, cache_dir, write_whole
from tests.hosts.exit_codes import exit_code

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (None, 0, ""),
        (UserError("do this"), 2, "error: do this\n"),
        (NoCheckpoint("all are damaged"), 3, "error: all are damaged\n"),
        (StorageLost("the store"), 42, "error: the store; start all again\n"),
        (OSError(errno.ENOSPC, "no space", "runs/x"), 1, "error: runs/x cannot be written: no space\n"),
        (OSError(errno.EDQUOT, "no space", "runs/x"), 1, "error: runs/x cannot be written: no space\n"),
        # A traceback: where nothing retries, a disk that fails is lost, and anything else is a fault of the code.
        (OSError(errno.ESTALE, "stale", "runs/x"), 42, "Traceback (.|\n)*stale: 'runs/x'\n"),
        (OSError(errno.EIO, "no answer", "runs/x"), 42, "Traceback (.|\n)*no answer: 'runs/x'\n"),
        (ZeroDivisionError("a bug"), 1, "Traceback (.|\n)*ZeroDivisionError: a bug\n"),
    ],
)
def test_exit_codes(raised, code, says, capsys):
    assert exit_code(Mock(return_value=0, side_effect=raised)) == code
    assert re.fullmatch(says, capsys.readouterr().err)


def test_ctrl_c_outside_of_training(capsys):
    # Python's own handler: background jobs of a shell ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    code = exit_code(lambda: os.kill(os.getpid(), signal.SIGINT) or 0)
    signal.signal(signal.SIGINT, before)
    assert code == 130 and "Traceback" not in capsys.readouterr().err


LOG = """
import sys
from system.messages import LOGGER, ignore_output_errors, show_messages
from system.files import StorageLost
from hosts.runtime import run_command
from hosts.watchdog import end_as_hung
def main():
    if sys.argv[1] != "output":
        ignore_output_errors("stdout")
    show_messages()
    LOGGER.info("step 1")
    print("stopped")
    if sys.argv[1] == "away":
        raise StorageLost("the store")
    if sys.argv[1] == "hang":
        end_as_hung("no step after 1 has ended")
    return 143
run_command(main)
"""


@pytest.mark.parametrize(
    ("act", "code", "log"),
    [("stop", 143, "without a reader"), ("away", 42, "full"), ("hang", 42, "without a reader"), ("output", 1, "full")],
)
def test_a_log_that_is_lost_changes_no_exit_code_but_an_output_does(log, act, code):
    reader, pipe = os.pipe()
    os.close(reader)
    with open("/dev/full" if log == "full" else pipe, "w") as file:
        command = [sys.executable, "-c", LOG, act]
        assert subprocess.run(command, cwd=ROOT, stdout=file, stderr=file).returncode == code


BLOCKED_THREADS = """
import threading
from concurrent.futures import ThreadPoolExecutor
import hosts.runtime
hosts.runtime.EXIT_SECONDS = 1
def main():
    for_ever = threading.Event().wait  # as a read from a disk that hangs
    threading.Thread(target=for_ever).start()
    ThreadPoolExecutor(1).submit(for_ever)
    print("saved")
    return 143
hosts.runtime.run_command(main)
"""


def test_threads_that_wait_for_a_disk_keep_no_command_that_has_ended():
    command = [sys.executable, "-c", BLOCKED_THREADS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (143, "saved\n"), ended.stderr


@pytest.mark.parametrize(
    ("encoding", "closed", "out", "err", "module", "start"),
    [
        ("ascii", "", "\\xe9 \\u65e5\n", "\\xe9 \\u65e5\n", "hosts.runtime", "run_command"),
        ("latin-1", "2>&-", "é \\u65e5\n", "", "system.exits", "exit_code_of"),
        ("utf-8", ">&- 2>&- <&-", "", "", "hosts.runtime", "run_command"),
    ],
)
def test_a_text_that_the_output_cannot_show_changes_no_exit_code(encoding, closed, out, err, module, start):
    program = (
        f"import sys\nfrom {module} import {start}\ndef main():\n    print('é 日')\n"
        f"    print('é 日', file=sys.stderr)\n    return 0\nsys.exit({start}(main, *sys.argv[1:]))"
    )
    message = ["interrupted"] * (start == "exit_code_of")
    command = ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, "-c", program, *message]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    texts = ended.stdout.decode(encoding), ended.stderr.decode(encoding)
    assert (ended.returncode, *texts) == (0, out, err)


@pytest.mark.parametrize(
    ("platforms", "file", "backend", "raised", "says"),
    [
        ("cuda", "", AssertionError(), UserError, "JAX_PLATFORMS=cuda: JAX finds no such device"),
        ("cuda", "", RuntimeError("Unable to initialize backend 'cuda': NOT_FOUND"), UserError, "NOT_FOUND"),
        ("tpu", "", RuntimeError("Unable to initialize backend 'tpu': ABORTED: in use"), RuntimeError, "ABORTED"),
        ("", "accel0", ["cpu"], UserError, "accel0 is here: JAX finds no such device .*JAX_PLATFORMS=cpu"),
        ("", "nvidia0", ["cpu"], UserError, "nvidia0 is here: JAX finds no such device .*JAX_PLATFORMS=cpu"),
        ("cpu", "accel0", ["cpu"], None, ""),
        ("", "nvidia0", ["gpu"], None, ""),
        ("", "", ["cpu"], None, ""),
    ],
)
def test_an_accelerator_that_is_not_here_or_not_used_is_a_mistake(platforms, file, backend, raised, says, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr("hosts.runtime.glob", lambda pattern: [f"/dev/{file}"] if file and file[:5] in pattern else [])
    monkeypatch.setattr("jax.default_backend", Mock(side_effect=backend))
    with pytest.raises(raised, match=says) if raised else nullcontext():
        require_platform()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--xla_backend_optimization_level=0", ""),
        ("--xla_nothing=1 --xla_force_host_platform_device_count=2", "Unknown flag in XLA_FLAGS: --xla_nothing=1;"),
        ("--xla_backend_optimization_level=high", "Couldn't interpret value high for flag xla_backend_optimization"),
    ],
)
def test_flags_that_xla_does_not_know_are_a_mistake(flags, says):
    with pytest.raises(UserError, match=f"XLA_FLAGS={flags}: {says}") if says else nullcontext():
        require_known_flags(flags)


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


@pytest.mark.parametrize("given", [None, "/of/the/user", ""])
def test_compiled_programs_are_kept_where_the_user_said(given, monkeypatch):
    """JAX reads JAX_COMPILATION_CACHE_DIR into this option when it is imported."""
    name, before = "jax_compilation_cache_dir", jax.config.jax_compilation_cache_dir
    for other in ("join", "show_messages", "require_platform"):
        monkeypatch.setattr(f"hosts.runtime.{other}", Mock(return_value=0))
    monkeypatch.setattr("sys.unraisablehook", sys.unraisablehook)
    jax.config.update(name, given)
    try:
        start_jax()
        assert jax.config.jax_compilation_cache_dir == (str(cache_dir() / "compiled") if given is None else given)
    finally:
        jax.config.update(name, before)


def test_writes_left_by_a_failed_save_print_no_traceback(monkeypatch):
    printed = Mock()
    monkeypatch.setattr("sys.__unraisablehook__", printed)
    for text in ("Event loop is closed", "another"):
        report_unless_loop_is_closed(SimpleNamespace(exc_value=RuntimeError(text)))
    assert [str(call.args[0].exc_value) for call in printed.call_args_list] == ["another"]

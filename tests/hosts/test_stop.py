"""Test how a run stops: by a signal, or by steps that do not end."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from hosts.clock import Timeline
from hosts.stop import Stop
from hosts.watchdog import Watchdog
from options.schema import HangConfig
from tests.hosts.exit_codes import exit_code

ROOT = Path(__file__).parents[2]
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]


@pytest.fixture(autouse=True)
def not_under_nohup():
    """Let SIGHUP have its default action, as it has without nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("sign", "code"), SIGNALS)
def test_a_signal_is_a_request_during_steps_and_unchanged_outside(sign, code):
    before = [signal.getsignal(number) for number, _ in SIGNALS]
    with Stop(HangConfig()) as stop:
        with stop.deferred_signals():
            assert not stop.ask()
            os.kill(os.getpid(), sign)
            assert stop.ask() and stop.code == stop.agreed_code() == code
        os.kill(os.getpid(), signal.SIGTERM)  # while the summary is written
    assert [signal.getsignal(number) for number, _ in SIGNALS] == before


def test_a_closed_terminal_changes_nothing_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Stop(HangConfig()) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
    assert stop.code is None


@pytest.mark.parametrize(("sign", "code"), SIGNALS)
def test_a_signal_before_training_ends_it_even_if_a_callback_swallows_the_exception(sign, code):
    def main():
        with Stop(HangConfig()) as stop:
            with suppress(KeyboardInterrupt, SystemExit):  # like JAX's callbacks
                os.kill(os.getpid(), sign)
            with stop.deferred_signals():
                pytest.fail("the run went on")

    assert exit_code(main) == code


class Watched:
    """A watchdog with a manual clock."""

    def __init__(self, monkeypatch, **options):
        self.time, self.reasons = 0.0, []
        monkeypatch.setattr("hosts.clock.running_seconds", lambda: self.time)
        self.timeline = Timeline()
        self.steps = self.timeline.during("steps")
        self.steps.__enter__()
        self.dog = Watchdog(HangConfig(**options), self.timeline, 0, self.reasons.append)

    def take(self, steps: int, seconds: float) -> None:
        """Take `steps` steps of `seconds` each, and report them done at the end."""
        self.dog.dispatched += steps
        self.time += steps * seconds
        self.dog.finish(self.dog.dispatched)

    def times_out_after(self, seconds: float) -> bool:
        self.time += seconds
        self.dog.check()
        self.time -= seconds
        return bool(self.reasons)


def test_a_step_may_take_the_least_time_or_many_times_its_like(monkeypatch):
    watched = Watched(monkeypatch, seconds=100)
    for _ in range(5):
        watched.take(10, seconds=2)
    assert watched.dog.allowed == 100
    watched.take(10, seconds=20)  # a slow stretch changes little, since the median counts
    assert watched.dog.allowed == 100
    assert not watched.times_out_after(99) and watched.times_out_after(101)
    assert watched.reasons == ["no step after 60 has ended for 101 s (--hang.seconds; one takes 2 s)"]


def test_an_evaluation_is_no_slow_step_and_has_its_own_limit(monkeypatch):
    watched = Watched(monkeypatch, seconds=100, io_seconds=5000)
    watched.take(10, seconds=2)
    watched.time += 50
    with watched.timeline.during("evaluation"):
        watched.time += 600
        assert not watched.times_out_after(4399) and watched.times_out_after(4401)
        assert watched.reasons == ["an evaluation takes longer than 5000 s (hang.io_seconds in the config)"]
        watched.reasons.clear()
    assert not watched.times_out_after(49) and watched.times_out_after(51)


IMPORTS = """
import hashlib, os, signal, threading, time
from contextlib import contextmanager, suppress
from options.schema import HangConfig
from hosts.clock import Timeline
from hosts.stop import *
from hosts.watchdog import *
from system.errors import UserError
"""
INTERRUPTED_TWICE = """
with Stop(HangConfig()) as stop, stop.deferred_signals():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""
SECOND_START = """
stop = Stop(HangConfig())
stop.__enter__()
with suppress(MemoryError), stop.one_start(), stop.deferred_signals():
    raise MemoryError
with stop.one_start():
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""
COMPILING = """
with Stop(HangConfig()):
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # minutes outside Python, as a compilation
"""
HANG = """
def something_that_never_answers(): time.sleep(60)
threading.Thread(target=something_that_never_answers, daemon=True).start()
timeline = Timeline()
with timeline.during("steps"), Watchdog(HangConfig(seconds=1), timeline, 0) as dog:
    dog.dispatched = 1
    dog.finish(1)
    dog.dispatched = 2
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        (INTERRUPTED_TWICE, 130, ["steps after the newest checkpoint are lost"]),
        (COMPILING, 143, ["SIGTERM: ended before the first step"]),
        (SECOND_START, 143, ["SIGTERM: ended before the first step"]),
        (HANG, 42, ["no step after 1 has ended", "something_that_never_answers"]),  # in a thread's stack
    ],
)
def test_a_second_ctrl_c_a_signal_before_training_and_a_hang_end_the_process(script, code, says):
    ended = subprocess.run([sys.executable, "-c", IMPORTS + script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == code and all(text in ended.stderr for text in says)


LEAVING = """
@contextmanager
def on_a_disk_that_hangs():
    try:
        yield
    finally:
        threading.Event().wait()  # a thread that saves
with Stop(HangConfig(io_seconds=1)) as stop:
    with {outer}, stop.one_start(), {inner}:
        {end}
"""


@pytest.mark.parametrize(
    ("outer", "inner", "end", "says"),
    [
        ("suppress()", "on_a_disk_that_hangs(), stop.deferred_signals()", "1 / 0", "ZeroDivisionError: division by"),
        ("on_a_disk_that_hangs()", "suppress()", "raise UserError('do this')", "error: do this\n"),
        ("on_a_disk_that_hangs()", "stop.deferred_signals()", "pass", ""),
    ],
)
def test_a_process_whose_disk_hangs_leaves_in_a_limited_time_with_its_error(outer, inner, end, says):
    script = IMPORTS + LEAVING.format(outer=outer, inner=inner, end=end)
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 42, ended.stderr
    assert says in ended.stderr and "the end of this process takes longer than 1 s (hang.io_seconds" in ended.stderr
    assert "on_a_disk_that_hangs" in ended.stderr  # in the main thread's stack


STOPPED = """
timeline = Timeline()
steps = timeline.during("steps")
with steps, Watchdog(HangConfig(seconds=5), timeline, 0) as dog, time_limit(5, "the work takes longer than 5 s"):
    dog.dispatched = 1
    dog.finish(1)
    dog.dispatched = 2
    print("began", flush=True)
    time.sleep(2)
    dog.finish(2)
"""


def test_a_process_that_was_stopped_and_continued_is_not_hung():
    command = [sys.executable, "-c", IMPORTS + STOPPED]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "began\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(6)
        process.send_signal(signal.SIGCONT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 0, said

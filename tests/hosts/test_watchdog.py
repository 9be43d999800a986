"""Test the watchdog with steps that do not end."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from configs.schema import HangConfig
from data.store import OUTAGE
from hosts.watchdog import Watchdog

ROOT = Path(__file__).parents[2]


class Watched:
    """A watchdog with a manual clock."""

    def __init__(self, work=lambda step: step, **options):
        self.time, self.barks = 0.0, []
        self.dog = Watchdog(HangConfig(**options), self.barks.append, lambda: self.time, work)

    def take(self, steps: int, seconds: float) -> None:
        """Take `steps` steps of `seconds` each, and report them done at the end."""
        for _ in range(steps):
            self.dog.step(max(self.dog.given, 0) + 1)
        self.time += steps * seconds
        self.dog.done_with(self.dog.given)

    def barks_after(self, seconds: float) -> bool:
        self.time += seconds
        self.dog.check()
        self.time -= seconds
        return bool(self.barks)


def test_a_step_may_take_the_least_time_or_many_times_its_like():
    watched = Watched(seconds=100)
    for _ in range(5):
        watched.take(10, seconds=2)
    assert watched.dog.allowed == 100
    watched.take(10, seconds=20)  # a slow stretch changes little, since the median counts
    assert watched.dog.allowed == 100
    assert not watched.barks_after(99) and watched.barks_after(101)
    assert watched.barks == ["no step after 60 has ended for 101 s (--hang.seconds; one takes 2 s)"]


def test_steps_that_were_given_ahead_of_time_may_take_as_many_times_as_long():
    watched = Watched(seconds=100)
    watched.take(1, seconds=20)
    for step in range(2, 11):
        watched.dog.step(step)
    assert watched.dog.allowed == 10 * 20 * 10


def test_a_larger_step_may_take_longer_by_as_much():
    watched = Watched(lambda step: step if step <= 10 else 10 + 8 * (step - 10), seconds=100)
    watched.take(9, seconds=20)
    watched.dog.step(10)
    assert watched.dog.allowed == 10 * (20 + 8 * 20)  # steps 10 and 11; 11 has not been started
    watched.time += 20
    watched.dog.done_with(10)
    watched.dog.step(11)
    assert watched.dog.allowed == 10 * 20 * 16
    assert not watched.barks_after(3199) and watched.barks_after(3201)
    assert "one takes 160 s" in watched.barks[0]


def test_the_first_step_may_take_longer():
    watched = Watched(seconds=100)
    watched.dog.step(41)
    assert not watched.barks_after(599) and watched.barks_after(601)


def test_an_unreachable_store_is_no_hang(monkeypatch):
    watched = Watched(seconds=100)
    watched.take(10, seconds=2)
    watched.time += 500
    with monkeypatch.context() as patch:
        patch.setattr(OUTAGE, "since", time.monotonic() - 60)
        assert not watched.barks_after(600)
        watched.time += 600
        watched.dog.check()
    assert not watched.barks_after(99) and watched.barks_after(101)


def test_an_evaluation_is_no_step():
    watched = Watched(seconds=100)
    watched.take(1, seconds=1)
    with watched.dog.elsewhere("an evaluation"):
        assert not watched.barks_after(1e6)
        watched.time += 1e6
    assert not watched.barks_after(99) and watched.barks_after(101)


def test_an_evaluation_a_save_or_a_restore_has_a_limit_of_its_own():
    watched, barked = Watched(seconds=100, other_seconds=0.01), threading.Event()
    watched.dog.bark = lambda reason: (watched.barks.append(reason), barked.set())
    with watched.dog.elsewhere("saving"):
        assert barked.wait(30)
    assert watched.barks == ["saving takes longer than 0.01 s (--hang.other_seconds)"]


RESTORE = """
with limited(HangConfig(other_seconds=0.5), 'restoring'):
    something_that_never_answers()
"""
STEP = """
threading.Thread(target=something_that_never_answers, daemon=True).start()
with Watchdog(HangConfig(seconds=1)) as dog:
    dog.step(1), dog.done_with(1), dog.step(2)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("hang", "says"), [(RESTORE, "restoring takes longer than 0.5 s"), (STEP, "no step after 1 has ended")]
)
def test_a_hang_ends_with_42_and_prints_every_thread_s_stack(hang, says):
    script = (
        "import threading, time\n"
        "from configs.schema import HangConfig\n"
        "from hosts.watchdog import Watchdog, limited\n"
        f"def something_that_never_answers(): time.sleep(60)\n{hang}"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 42
    assert says in ended.stderr and "something_that_never_answers" in ended.stderr

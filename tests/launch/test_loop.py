"""Test launch/loop.sh with a train.py that ends as planned: every exit code, the bound, signals and the deadline."""

import signal
import time

import pytest

from system.errors import Exit
from tests.launch.restarts import OVER
from tests.launch.stand_in import StandIn, wait_for

RUN = "--run_dir=runs/x"


@pytest.fixture
def repository(tmp_path) -> StandIn:
    return StandIn(tmp_path / "repository")


def ended(repository: StandIn, plan: str, *words: str, **environment: str) -> tuple[int, int]:
    """Return the exit code of the loop, and the number of starts."""
    repository.plan(plan)
    loop = repository.loop(*(words or [RUN]), **environment)
    print(loop.communicate(timeout=120)[0])
    return loop.returncode, len(repository.starts())


@pytest.mark.parametrize("plan", ["42", "143", "134", "137", "139", "7", "signal6", "signal9", "signal11"])
def test_it_starts_again_after(repository, plan):
    assert ended(repository, f"{plan} {plan} 0", RUN, "--x=a b") == (0, 3)
    assert repository.starts() == [f"- {RUN} --x=a b"] * 3


@pytest.mark.parametrize("code", OVER)
def test_it_stops_after(repository, code):
    assert ended(repository, f"{code} 0") == (code, 1)


def test_every_exit_code_of_train_py_is_answered():
    assert {int(code) for code in Exit} == {*OVER, 42, 143}


@pytest.mark.parametrize("code", ["42", "143", "137"])
def test_starts_without_a_newer_checkpoint_are_bounded(repository, code):
    assert ended(repository, f"{code} {code} {code} 0", MAX_STARTS="3") == (1, 3)


def test_a_start_with_a_newer_checkpoint_is_not_counted(repository):
    assert ended(repository, "42 save42 137 save42 42 save143 0", MAX_STARTS="2") == (0, 7)


def test_only_long_starts_are_progress_if_the_run_is_in_a_bucket(repository):
    bucket = "--run_dir=gs://bucket/x"
    assert ended(repository, "42", bucket, MAX_STARTS="4") == (1, 4)
    assert ended(repository, "42 " * 8 + "0", bucket, MAX_STARTS="2", PROGRESS_SECONDS="0") == (0, 9)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_reaches_train_py_and_nothing_starts_again(repository, number, code):
    repository.plan("wait 0")
    loop = repository.loop(RUN)
    wait_for(repository.starts)
    loop.send_signal(number)
    assert loop.wait(60) == code and len(repository.starts()) == 1


def test_a_signal_during_the_pause_ends_the_loop(repository):
    repository.plan("42")
    loop = repository.loop(RUN, PAUSE="600")
    assert loop.stdout is not None and "ended with 42" in loop.stdout.readline()
    loop.send_signal(signal.SIGTERM)
    assert loop.wait(60) == 143


def test_the_deadline_ends_the_run(repository):
    for plan, environment in (("wait", {}), ("deaf", {"SAVE_SECONDS": "1"})):
        assert ended(repository, plan, DEADLINE=f"@{int(time.time()) + 3}", **environment)[0] == 124
    before = len(repository.starts())
    assert ended(repository, "0", DEADLINE="2020-01-01 12:00") == (124, before)


def test_a_mistake_starts_nothing(repository):
    assert ended(repository, "0", "--config=x") == (2, 0)
    assert ended(repository, "0", DEADLINE="some day") == (2, 0)

"""Count what the processes of a run say to each other in a step, a save and an evaluation."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax._src import distributed

from hosts.distributed import on_every_process, on_first_process
from run.session import Session
from system.errors import Exit, UserError
from tests.commands import run, write_folder

POLL = "a number"  # whether a save is still under way


@pytest.fixture
def exchanges(monkeypatch) -> list[str]:
    """Let this process be the first of two, which do the same. Return what they exchange, to be filled."""
    said = []

    def exchange(what: str, value: str, channel: str = "") -> list[str]:
        said.append(f"{channel} {what}".strip())
        return [value, value]

    for module in ("hosts.distributed", "hosts.preflight", "run.checkpoint_files"):
        monkeypatch.setattr(f"{module}.exchange", exchange)
    here = SimpleNamespace(process_count=lambda: 2, process_index=lambda: 0, errors=jax.errors)
    monkeypatch.setattr("hosts.distributed.jax", here)
    monkeypatch.setattr(distributed.global_state, "num_processes", 2)
    return said


def test_what_the_first_process_reads_takes_one_exchange(exchanges):
    assert on_first_process(lambda: {"an": "answer"}) == {"an": "answer"}
    assert on_every_process("a test", lambda: 5) == 5
    assert exchanges == ["the first process's answer", "a test"]

    def fail() -> None:
        raise UserError("do this")

    with pytest.raises(UserError, match="process 0: do this"):
        on_first_process(fail)
    assert len(exchanges) == 3


@pytest.mark.medium
def test_a_step_and_an_evaluation_exchange_nothing_and_a_save_three_values(tmp_path, monkeypatch, exchanges):
    """Log each step: then each asks once whether a save is still under way, while one is."""
    spent: dict[str, Counter] = {}

    def counting(method: Callable) -> Callable:
        def call(session: Session, step: int, *arguments: Any) -> Any:
            before = len(exchanges)
            result = method(session, step, *arguments)
            new = [what for what in exchanges[before:] if not what.startswith("saving ")]
            spent.setdefault(f"{method.__name__} {step}", Counter()).update(new)
            return result

        return call

    for method in (Session.next_batch, Session.save_if_due, Session.evaluate_if_due):
        monkeypatch.setattr(Session, method.__name__, counting(method))
    monkeypatch.chdir(write_folder(tmp_path))
    due = ("--steps=12", "--log.every_steps=1", "--checkpoint.every_steps=4", "--eval.every_steps=6")
    assert run("train", monkeypatch, "--config=tiny.py", *due, devices=1) == Exit.COMPLETE

    polls = sum(of.pop(POLL, 0) for of in spent.values())
    assert polls <= 8  # at most one for each step after the first save
    of_saves = {name: of for name, of in spent.items() if of}
    assert of_saves == {f"save_if_due {step}": {"the first process's answer": 1} for step in (4, 8, 12)}
    parts, ends = "saving parts of a checkpoint", "saving the end of a checkpoint"
    assert [what for what in exchanges if what.startswith("saving ")] == [parts, ends] * 3
    of_start_and_end = [what for what in exchanges if what != POLL and not what.startswith("saving ")]
    assert len(of_start_and_end) - 3 <= 30  # 23 in November 2026

"""Test the user's command at events, and Weights & Biases. Steps do not wait for them, and no run fails with them."""

import dataclasses
import json
import os
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import pytest

from options.schema import LogConfig
from run import ending
from run.ending import notify_of_failure, tell
from run.folder import RunFolder
from run.metrics import Wandb, drop_metrics_after, open_metrics
from tests.helpers import tiny_config


def config_with(folder, **log):
    return dataclasses.replace(tiny_config(), run_dir=str(folder), log=LogConfig(**log))


def test_the_command_receives_event_and_run(tmp_path):
    shown = "$TOKENSUM_EVENT,$TOKENSUM_STEP,$TOKENSUM_RUN,$TOKENSUM_RUN_DIR,$TOKENSUM_MESSAGE"
    tell(config_with(tmp_path, on_event=f'echo "{shown}"'), RunFolder(tmp_path), "end", "it's \0 done", 7)
    assert (tmp_path / "on_event.log").read_text() == f"end,7,tiny,{tmp_path},it's  done\n"


def test_the_end_waits_for_a_limited_time(tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "COMMAND_SECONDS", 0.1)
    began = time.monotonic()
    config = config_with(tmp_path, on_event="sleep 60 & echo $! > pid; mv pid $TOKENSUM_RUN_DIR; wait")
    tell(config, RunFolder(tmp_path), "end", "", 3)
    assert time.monotonic() - began < 30
    while not (tmp_path / "pid").exists():
        time.sleep(0.01)
    os.kill(int((tmp_path / "pid").read_text()), 15)


def test_a_command_that_cannot_start_is_only_reported_and_one_process_starts_it(tmp_path, monkeypatch, capfd):
    tell(config_with(tmp_path / "gone", on_event="true"), RunFolder(tmp_path / "gone"), "failure", "", 3)
    assert "--log.on_event was not started: " in capfd.readouterr().err
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    tell(config_with(tmp_path, on_event="true"), RunFolder(tmp_path), "end", "", 3)
    assert not (tmp_path / "on_event.log").exists()


@pytest.mark.parametrize(
    ("error", "expected"), [(ValueError("too hot\nand"), "failure ValueError: too hot\n"), (SystemExit(143), "")]
)
def test_an_exception_is_a_failure_and_a_request_to_stop_is_none(tmp_path, error, expected):
    config = config_with(tmp_path, on_event='echo "$TOKENSUM_EVENT $TOKENSUM_MESSAGE"')
    with pytest.raises(type(error)), notify_of_failure(config, RunFolder(tmp_path)):
        raise error
    log = tmp_path / "on_event.log"
    assert (log.read_text() if log.exists() else "") == expected


class FakeWandb:
    """The part of the package that is used. The method `fails` raises an error."""

    def __init__(self, fails: str = ""):
        self.Settings, self.logged, self.finished = SimpleNamespace, [], False
        if fails:
            setattr(self, fails, Mock(side_effect=TimeoutError("no answer")))

    def init(self, **options):
        self.options = options
        return self

    def define_metric(self, *_, **__):
        pass

    def log(self, line):
        self.logged.append(line)

    def finish(self):
        self.finished = True


def test_weights_and_biases_gets_the_numbers_under_one_id(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    config = config_with(tmp_path, wandb="team/gpts")
    RunFolder(tmp_path).events.add("start", 0)
    folder = RunFolder(tmp_path)
    writer = open_metrics(folder, drop_metrics_after(folder, 0), config)
    writer.write({"step": 4, "loss": 2.5, "grad_norms": {"embed": 1.0}})
    writer.write({"step": 4, "val_loss": 2.0, "samples": ["text"]})
    writer.close()
    assert [{**line, "time": 0} for line in fake.logged] == [
        {"step": 4, "loss": 2.5, "grad_norms": {"embed": 1.0}, "time": 0},
        {"step": 4, "val_loss": 2.0, "time": 0},
    ]
    assert fake.finished and fake.options["entity"] == "team" and fake.options["project"] == "gpts"
    json.dumps(fake.options["config"])
    first = fake.options["id"]
    open_metrics(folder, drop_metrics_after(folder, 4), config).close()
    assert fake.options["id"] == first and fake.options["resume"] == "allow"


@pytest.mark.parametrize("fails", [None, "init", "log", "finish"])
def test_a_run_continues_without_weights_and_biases(tmp_path, monkeypatch, capfd, fails):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fails) if fails else None)  # None: not installed
    wandb = Wandb(config_with(tmp_path, wandb="gpts"), RunFolder(tmp_path))
    for step in range(2):
        wandb.show({"step": step})
    wandb.close()
    error = capfd.readouterr().err
    assert (
        error.startswith("--log.wandb: ")
        and error.endswith("; the run continues without it\n")
        and error.count("\n") == 1
    )

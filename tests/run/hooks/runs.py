"""Make a run for hooks: its progress, and checkpoints in memory."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np

from configs.messages import LOGGER
from configs.schema import CheckpointConfig, Config, EvalConfig, LogConfig
from run.progress import Due, Progress, Start
from run.saver import Failure
from tests.helpers import tiny_config
from training.state import TrainState

NOTHING = Due(log=False, evaluate=False, save=False)
TOKENS = 256  # per step


def config_of(run_dir: object, **options: Any) -> Config:
    """Return the config of a run of 40 steps."""
    sections = {"log": LogConfig(5), "eval": EvalConfig(20), "checkpoint": CheckpointConfig(every_steps=10)}
    return replace(tiny_config(), **{"steps": 40, "run_dir": str(run_dir), **sections, **options})


def progress(config: Config, step: int = 0, **start: Any) -> Progress:
    """Return the progress of a run that starts after `step`. The rows of a batch are its number."""
    begins = Start(TrainState(step, {}, (), 0), step, **{"tokens": step * TOKENS, **start})  # pyright: ignore
    run = Progress(config, begins, SimpleNamespace(row_numbers=lambda i: i))  # pyright: ignore
    run.clock.start()
    return run


def built_of(config: Config) -> Any:
    """Return the parts of a build that hooks read."""
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(device_kind="cpu")]), size=1)
    return SimpleNamespace(config=config, mesh=mesh)


class Saved:
    """Checkpoints in memory. Saves at `failing_steps` fail."""

    def __init__(self, failing_steps=()):
        self.steps, self.failing_steps, self.facts, self.scores = [], set(failing_steps), {}, {}
        self.failures, self.pending, self.record, self.passing = [], None, Mock(), False

    @property
    def newest(self):
        return max(self.steps, default=0)

    def save(self, step, state, facts):
        if step in self.failing_steps:
            self.failures.append(Failure("the disk is full", self.passing, 0.0))
            LOGGER.warning(f"{len(self.failures)} save(s) in a row failed: the disk is full; trying again")
        else:
            self.failures.clear()
            self.steps.append(step)
            self.facts[step] = facts

    def score(self, step, val_bpb):
        self.scores[step] = val_bpb

    def failing(self, wait=True):
        return len(self.failures)

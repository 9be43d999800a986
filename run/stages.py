"""The stages of a run's ramp: the program and the batches of each. A constant batch is one stage."""

import time
from collections.abc import Callable
from typing import Any

from configs.ramp import Ramp
from data.dataset import Text
from data.loader import StagedBatches, StepBatches, local_rows
from run.loop import Start
from training.build import Build
from training.state import TrainState
from training.step import Batch, Metrics, TrainStep


class Programs:
    """The compiled steps of a run, one for each stage of its ramp, told apart by the shape of a batch."""

    def __init__(self, builds: list[Build]):
        self.builds = builds
        self.plain: dict[tuple[int, ...], TrainStep] = {}
        self.measuring: dict[tuple[int, ...], TrainStep] = {}

    def compile(self, step: int, say: Callable[[str], Any]) -> None:
        """All that the run needs after `step`, so that whatever a later stage cannot do, memory included, is known now.
        A compiled program refuses other shapes, so no step can compile anew."""
        config, began, before = self.builds[-1].config, time.monotonic(), len(self.plain)
        ramp = Ramp.of(config.batch)
        for built in self.builds[ramp.index(step) : len(ramp.reached(config.steps))]:
            if built.batch_shape not in self.plain:
                compiled = lambda step, of=built: step.lower(of.abstract_state, of.abstract_batch()).compile()
                self.plain[built.batch_shape] = compiled(built.train_step)
                if config.diagnostics.every_steps:
                    self.measuring[built.batch_shape] = compiled(built.measuring_step)
        if (new := len(self.plain) - before) and config.batch.ramp:
            say(f"compiled the programs of {new} stage(s) in {time.monotonic() - began:.1f} s")

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """A step, by its stage's program."""
        return self.plain[batch["inputs"].shape](state, batch)

    def measuring_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The same, measuring itself."""
        return self.measuring[batch["inputs"].shape](state, batch)


def batches_from(start: Start, builds: list[Build], text: Text) -> StagedBatches:
    """The batches of the steps to come, in the shapes of the stages that they belong to."""
    config, sharding = builds[0].config, builds[0].batch_sharding
    ramp, bos = Ramp.of(config.batch), text.tokenizer.bos if config.data.mask_documents else None
    stages = {}
    for stage, built in list(zip(ramp.reached(config.steps), builds))[ramp.index(start.step) :]:
        first = max(stage.step, start.step)
        row = (start.position + ramp.tokens(first) - ramp.tokens(start.step)) // config.batch.sequence_length
        mine = local_rows(built.batch_shape, sharding)
        stages[first - start.step] = StepBatches(
            text.train, text.mixture, config.seed, built.batch_shape, mine, bos, row
        )
    return StagedBatches(stages)

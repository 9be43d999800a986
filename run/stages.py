"""The stages of a run's ramp: the program and the batches of each. A constant batch is one stage."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from configs.ramp import Ramp
from data.dataset import Text
from data.loader import StagedBatches, StepBatches, local_rows
from hosts.runtime import on_first_process
from run.goodput import Times
from run.kernels import keep_choices, use_choices
from run.progress import Start
from training.build import Build
from training.step import TrainStep


class Programs:
    """The compiled steps of a run, one for each stage of its ramp."""

    def __init__(self, builds: list[Build], times: Times, say: Callable[[str], Any]):
        """Every process must make one, and compile together with the others."""
        self.builds, self.times, self.say = builds, times, say
        config, device = builds[-1].config, builds[-1].mesh.devices.flat[0]
        self.keeps_kernels = config.deterministic and device.platform == "gpu"
        if self.keeps_kernels:
            use_choices(config.run_dir)
        self.measured_every = config.diagnostics.every_steps
        self.plain: dict[int, TrainStep] = {}
        self.measuring: dict[int, TrainStep] = {}

    def compile(self, step: int) -> None:
        """Compile all that the run needs after `step` and that is not compiled yet, so that whatever a later stage
        cannot do, memory included, is known now. A compiled program refuses other shapes: no step can compile again."""
        config, began = self.builds[-1].config, time.monotonic()
        ramp = Ramp.of(config.batch)
        needed = range(ramp.index(step), len(ramp.reached(config.steps)))
        new = [stage for stage in needed if stage not in self.plain and stage not in self.measuring]
        with self.times.during("compilation"):
            for stage in new:
                built = self.builds[stage]
                state, batch = built.abstract_state, built.abstract_batch()
                if self.measured_every != 1:
                    self.plain[stage] = built.train_step.lower(state, batch).compile()
                if self.measured_every:
                    self.measuring[stage] = built.measuring_step.lower(state, batch).compile()
        if new and self.keeps_kernels:
            on_first_process(partial(keep_choices, config.run_dir))
        if new and config.batch.ramp:
            self.say(f"compiled the programs of {len(new)} stage(s) in {time.monotonic() - began:.1f} s")

    def after(self, step: int) -> TrainStep:
        """Return the program of the step that follows `step`."""
        stage = Ramp.of(self.builds[-1].config.batch).index(step)
        measures = self.measured_every and (step + 1) % self.measured_every == 0
        return (self.measuring if measures else self.plain)[stage]


def batches_from(start: Start, builds: list[Build], text: Text) -> StagedBatches:
    """The batches of the steps to come, in the shapes of the stages that they belong to."""
    config, sharding = builds[0].config, builds[0].batch_sharding
    ramp, stages = Ramp.of(config.batch), {}
    for stage, built in list(zip(ramp.reached(config.steps), builds))[ramp.index(start.step) :]:
        first = max(stage.step, start.step)
        row = (start.position + ramp.tokens(first) - ramp.tokens(start.step)) // config.batch.sequence_length
        mine = local_rows(built.batch_shape, sharding)
        stages[first - start.step] = StepBatches(
            text.train, text.mixture, config.seed, built.batch_shape, mine, text.document_bos, row
        )
    return StagedBatches(stages)

"""A batch that grows during the run: the size of each step, and the tokens of the steps before it.

`batch.ramp` names thresholds in tokens and sizes of a step. A stage begins with the first step after the run has seen
its threshold of tokens. So stages change between steps, and everything here is a function of a step's number. A
constant batch is a ramp of one stage. Nothing here needs JAX: reports read ramps, too.
"""

import math
from bisect import bisect_right
from typing import NamedTuple

from configs.schema import BatchConfig, Config, UserError, with_options
from configs.validation import nearest_multiples


class Stage(NamedTuple):
    """Consecutive steps of one size."""

    step: int
    """Steps before the stage."""
    tokens: int
    """Tokens of those."""
    tokens_per_step: int


class Ramp(NamedTuple):
    """The stages of a run, in order; the first begins at step 0."""

    stages: tuple[Stage, ...]

    @classmethod
    def read(cls, text: str, tokens_per_step: int) -> "Ramp":
        """Parse `0:65536,2e8:131072` (tokens: tokens per step). An empty text is a constant batch of `tokens_per_step`.
        Raise ValueError, with the reason, if it is not a ramp."""
        pairs = [_pair(part) for part in text.split(",")] if text else [(0, tokens_per_step)]
        (first, size), *later = pairs
        if first != 0:
            raise ValueError(f"the first stage begins at {first} tokens; it must begin at 0: 0:{size},...")
        stages = [Stage(0, 0, size)]
        for threshold, size in later:
            before = stages[-1]
            if size <= before.tokens_per_step:
                raise ValueError(f"stages must grow, but {threshold}:{size} follows {before.tokens_per_step}")
            if threshold <= before.tokens:
                begins = f"the stage before begins at {before.tokens:,} tokens"
                raise ValueError(f"{threshold}:{size} leaves no step to the stage before; {begins}")
            steps = -(-(threshold - before.tokens) // before.tokens_per_step)
            tokens = before.tokens + steps * before.tokens_per_step
            stages.append(Stage(before.step + steps, tokens, size))
        return cls(tuple(stages))

    @classmethod
    def of(cls, batch: BatchConfig) -> "Ramp":
        """Return the ramp of a config's batch. Raise UserError if it is invalid, or if its rows are not integers."""
        try:
            ramp = cls.read(batch.ramp, batch.tokens_per_step)
        except ValueError as error:
            raise UserError(f"--batch.ramp={batch.ramp} cannot work: {error}") from error
        for stage in ramp.stages if batch.ramp else ():
            if stage.tokens_per_step % batch.sequence_length:
                raise UserError(
                    f"--batch.ramp={batch.ramp} cannot work: {stage.tokens_per_step} tokens a step must be a multiple "
                    f"of batch.sequence_length={batch.sequence_length}; nearest: "
                    f"{nearest_multiples(stage.tokens_per_step, batch.sequence_length)}"
                )
        return ramp

    def index(self, step: int) -> int:
        """Return the number, from 0, of the stage of the step that follows this many steps."""
        return bisect_right(self.stages, step, key=lambda stage: stage.step) - 1

    def stage(self, step: int) -> Stage:
        """Return the stage of the step that follows this many steps."""
        return self.stages[self.index(step)]

    def tokens(self, step: int) -> int:
        """Return the tokens of the run's first `step` steps."""
        stage = self.stage(step)
        return stage.tokens + (step - stage.step) * stage.tokens_per_step

    def steps_in(self, tokens: int) -> int:
        """Return the number of complete steps in the run's first `tokens` tokens."""
        stage = self.stages[bisect_right(self.stages, tokens, key=lambda stage: stage.tokens) - 1]
        return stage.step + (tokens - stage.tokens) // stage.tokens_per_step

    def reached(self, steps: int) -> tuple[Stage, ...]:
        """Return the stages that a run of this many steps reaches."""
        return tuple(stage for stage in self.stages if stage.step < steps)


def with_ramp_spelled_out(config: Config) -> Config:
    """Return the config with its ramp in integers, so that 2e8 equals 200000000. Raise UserError as `Ramp.of` does."""
    Ramp.of(config.batch)
    pairs = (_pair(part) for part in config.batch.ramp.split(",") if part)
    return with_options(config, {"batch.ramp": ",".join(f"{threshold}:{size}" for threshold, size in pairs)})


def _pair(part: str) -> tuple[int, int]:
    threshold, _, size = part.partition(":")
    try:
        numbers = float(threshold), float(size)
    except ValueError:
        numbers = (math.nan, math.nan)
    if not all(0 <= number < 2.0**53 and number.is_integer() for number in numbers) or not 0 < numbers[1] < 2**31:
        raise ValueError(f"{part!r} is not TOKENS:TOKENS_PER_STEP, whole numbers such as 2e8:131072")
    return int(numbers[0]), int(numbers[1])

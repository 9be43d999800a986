"""The hook that traces some steps into the run's folder."""

from pathlib import Path

import jax

from configs.messages import LOGGER
from configs.schema import Config
from configs.validation import profiled_steps
from run.hooks.hook import Hook
from run.progress import Due, Progress
from training.step import Metrics


class Profile(Hook):
    """Traces the steps of `profile.steps`, on the first process."""

    def __init__(self, config: Config):
        self.first, self.last = profiled_steps(config) or (0, 0)
        self.folder = Path(config.run_dir) / "profile"
        self.tracing = False

    def begin(self, run: Progress) -> None:
        if 0 < self.first <= run.step:
            steps = run.config.profile.steps
            LOGGER.info(f"--profile.steps={steps}: step {run.step} is done already; nothing is traced")

    def before_step(self, run: Progress) -> None:
        """Start the trace at its first step, once the devices have completed the steps before."""
        if run.step + 1 == self.first and jax.process_index() == 0:
            jax.block_until_ready(run.state)
            jax.profiler.start_trace(self.folder)
            self.tracing = True

    def after_step(self, run: Progress, metrics: Metrics, due: Due) -> None:
        """Wait for the trace's last step, and write the trace."""
        if run.step == self.last and self.tracing:
            jax.block_until_ready(run.state)
            self.close()

    def close(self) -> None:
        """Write an unfinished trace."""
        if self.tracing:
            self.tracing = False
            jax.profiler.stop_trace()

"""Traces of a run's steps."""

import jax

from options.schema import Config
from options.validation import profiled_steps
from run.folder import RunFolder
from system.messages import LOGGER
from training.state import TrainState


class Profile:
    """Traces the steps of `profile.steps` on the first process, for TensorBoard, XProf or Perfetto, inside `with`. An
    unfinished trace is written at its end."""

    def __init__(self, config: Config, folder: RunFolder, step: int):
        """Take the step after which the run continues."""
        self.first, self.last = profiled_steps(config) or (0, 0)
        self.folder = folder.local / "profile"
        self.tracing = False
        if 0 < self.first <= step:
            LOGGER.info(f"--profile.steps={config.profile.steps}: step {step} is done already; nothing is traced")

    def before(self, step: int, state: TrainState) -> None:
        """Start the trace at its first step, once the devices have completed the steps before."""
        if step == self.first and jax.process_index() == 0:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self.folder)
            self.tracing = True

    def after(self, step: int, state: TrainState) -> None:
        """Wait for the trace's last step, and write the trace."""
        if step == self.last and self.tracing:
            jax.block_until_ready(state)
            self.__exit__()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        if self.tracing:
            self.tracing = False
            jax.profiler.stop_trace()

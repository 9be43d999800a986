"""Traces of a run's steps."""

import jax

from configs.schema import Config
from configs.validation import profiled_steps
from run.folder import RunFolder
from system.messages import LOGGER
from training.state import TrainState


class Profile:
    """Traces the steps of `profile.steps` on the first process, for TensorBoard, XProf or Perfetto, inside `with`. An
    unfinished trace is written at its end."""

    def __init__(self, config: Config, folder: RunFolder, step: int):
        """Take the step after which the run continues."""
        self.first, self.last = profiled_steps(config) or (0, 0)
        self.folder, self.start = folder.local / "profile", step
        self.tracing = False
        if 0 < self.first <= step:
            LOGGER.info(f"--profile.steps={config.profile.steps}: step {step} is done already; nothing is traced")

    def after(self, step: int, state: TrainState) -> None:
        """Write the trace after its last step, and begin it before its first, once the devices are done with `step`."""
        if step == self.last and self.tracing:
            jax.block_until_ready(state)
            self._write()
        if step == self.first - 1 and jax.process_index() == 0:
            jax.block_until_ready(state)
            self._begin()

    def __enter__(self) -> "Profile":
        if self.start == self.first - 1 and jax.process_index() == 0:
            self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        if self.tracing:
            self._write()

    def _begin(self) -> None:
        jax.profiler.start_trace(self.folder)
        self.tracing = True

    def _write(self) -> None:
        self.tracing = False
        jax.profiler.stop_trace()

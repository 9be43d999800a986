"""A trace of some steps, in the run's folder."""

from pathlib import Path
from typing import Any

import jax

from configs.schema import Config, profiled_steps


class Profile:
    """Traces the steps of `profile.steps`, on the first process."""

    def __init__(self, config: Config):
        steps = profiled_steps(config) if jax.process_index() == 0 else None
        self.first, self.last = steps or (0, 0)
        self.folder = Path(config.run_dir) / "profile"
        self.tracing = False

    def before(self, step: int, state: Any) -> None:
        """To be called before each step; where the trace begins, waits for what the devices are doing."""
        if step == self.first:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self.folder)
            self.tracing = True

    def after(self, step: int, state: Any) -> None:
        """To be called after each step; where the trace ends, waits for it, and writes the trace."""
        if step == self.last and self.tracing:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Writes what there is of a trace that was begun."""
        if self.tracing:
            self.tracing = False
            jax.profiler.stop_trace()

"""Saving and restoring the state with Orbax, asynchronously and sharded.

checkpoints/<step>/params/     float32 parameters: all that sampling and evaluation read
checkpoints/<step>/rest/       optimizer state, skipped steps
checkpoints/<step>/facts/      step, dataset fingerprint, training seconds
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from configs.schema import UserError
from training.state import TrainState


class Checkpoints:
    """The checkpoints of one run's folder."""

    def __init__(self, run_dir: str | Path, keep: int = 1):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, cleanup_tmp_directories=True, enable_async_checkpointing=True
        )
        names = ("params", "rest", "facts")
        folder = (Path(run_dir) / "checkpoints").absolute()
        self.manager = ocp.CheckpointManager(folder, options=options, item_names=names)

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint."""
        return self.manager.latest_step()

    def save(self, step: int, state: TrainState, facts: dict) -> None:
        """Copies the state off the devices, and writes it while training goes on. `step` is `int(state.step)`."""
        rest = {"opt_state": state.opt_state, "skipped_steps": state.skipped_steps}
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),  # pyright: ignore[reportCallIssue]
            rest=ocp.args.StandardSave(rest),  # pyright: ignore[reportCallIssue]
            facts=ocp.args.JsonSave({"step": step, **facts}),  # pyright: ignore[reportCallIssue]
        )
        self.manager.save(step, args=items, force=True)

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, dict]:
        """The state saved at `step`, as `abstract`'s shapes and shardings say, and the facts saved with it."""
        rest = {"opt_state": abstract.opt_state, "skipped_steps": abstract.skipped_steps}
        items = ocp.args.Composite(
            params=ocp.args.StandardRestore(abstract.params),  # pyright: ignore[reportCallIssue]
            rest=ocp.args.StandardRestore(rest),  # pyright: ignore[reportCallIssue]
            facts=ocp.args.JsonRestore(),
        )
        found: Any = self.manager.restore(step, args=items)
        step_array = jax.device_put(abstract.step.dtype.type(found.facts["step"]), abstract.step.sharding)
        state = TrainState(step_array, found.params, found.rest["opt_state"], found.rest["skipped_steps"])
        return state, found.facts

    def restore_params(self, abstract: dict) -> tuple[dict, int]:
        """The newest checkpoint's parameters alone, and their step. UserError where there is no checkpoint."""
        step = self.latest()
        if step is None:
            raise UserError(f"{self.manager.directory} holds no checkpoint yet")
        items = ocp.args.Composite(params=ocp.args.StandardRestore(abstract))  # pyright: ignore[reportCallIssue]
        found: Any = self.manager.restore(step, args=items)
        return found.params, step

    def close(self) -> None:
        """Waits until what was saved is written."""
        self.manager.close()

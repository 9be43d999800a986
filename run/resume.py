"""Where a run starts: from its newest checkpoint, from another network, or from step 0."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs.schema import Config, UserError
from interchange.init_from import read_params
from run.checkpoint import Checkpoints
from run.events import Events, rollbacks_to
from run.lines import scores
from run.progress import Start
from run.record import Record
from training.build import Build


def open_checkpoints(config: Config, record: Record) -> Checkpoints:
    """The run's checkpoints. UserError where they are of more steps than the run is to have."""
    run_dir = Path(config.run_dir)
    on_saved = lambda step: Events(run_dir).add("saved", step)
    checkpoints = Checkpoints(config.checkpoint.folder or run_dir, config.checkpoint, record, on_saved, scores(run_dir))
    if not checkpoints.steps and config.resume == "must":
        raise UserError(f"--resume=must, but {run_dir} holds no checkpoint")
    if checkpoints.newest > config.steps:
        raise UserError(f"--steps={config.steps}, but {run_dir} has come to step {checkpoints.newest} already")
    return checkpoints


def resume(built: Build, checkpoints: Checkpoints, events: list[dict], say: Callable[[str], Any]) -> Start:
    """The state and the data's position, from the newest checkpoint that can be read, or before step 0."""
    config = built.config
    found = checkpoints.restore_newest(built.abstract_state, say)
    if found is None:
        state = built.create_state()
        if config.init_from:
            state = state._replace(params=read_params(config, built.abstract_state.params))
        return Start(state)
    state, facts = found
    step = facts["step"]
    position = max([facts["position"], *(event["position"] for event in rollbacks_to(events, step))])
    say(f"continuing after step {step} of {config.steps}")
    return Start(state, step, facts["tokens"], position, facts["seconds"], tuple(facts["losses"]))

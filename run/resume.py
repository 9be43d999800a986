"""The start of a run: from its newest checkpoint, from another network, or from step 0."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from configs.messages import LOGGER
from configs.schema import Config, UserError
from data.dataset import Text
from data.tokenizer import TextTokenizer
from hosts.runtime import on_first_process
from hosts.stop import limited
from interchange.growth import initial_state
from model.shapes import parameter_counts
from run.checkpoint import Checkpoints
from run.events import Events, rollbacks_to
from run.folder import accept, made_with
from run.goodput import Times
from run.lines import scores
from run.progress import Start
from run.record import Record
from training.build import Build
from training.state import average_begins


def open_checkpoints(config: Config, record: Record) -> Checkpoints:
    """Return the run's checkpoints. Raise UserError if they have more steps than the run should have."""
    run_dir = Path(config.run_dir)
    on_saved = lambda step: Events(run_dir).add("saved", step)
    checkpoints = Checkpoints(config.checkpoint.folder or run_dir, config.checkpoint, record, on_saved, scores(run_dir))
    if not checkpoints.steps and config.resume == "must":
        raise UserError(f"--resume=must, but {run_dir} holds no checkpoint")
    if checkpoints.newest > config.steps:
        raise UserError(f"--steps={config.steps}, but {run_dir} has come to step {checkpoints.newest} already")
    return checkpoints


def resume(built: Build, tokenizer: TextTokenizer, checkpoints: Checkpoints, times: Times) -> Start:
    """Return the state and the data's position: of the newest checkpoint that can be read, or before step 0.
    `tokenizer`: the text's."""
    config = built.config
    with times.during("restore" if checkpoints.newest else "start"), limited(config.hang, "restoring"):
        events = on_first_process(Events(config.run_dir).read)
        restored = checkpoints.restore_newest(built.abstract_state)
        if restored is None:
            return Start(jax.block_until_ready(initial_state(built, tokenizer)))  # making it is not training
    state, facts = restored
    step, begins = facts["step"], average_begins(config)
    if built.abstract_state.average and not state.average:  # the option is new
        if step > begins:
            raise UserError(
                f"--optimizer.average={config.optimizer.average} is of the steps after {begins}, and the run has come "
                f"to step {step} without an average; at most {1 - step / config.steps:.6g} would work"
            )
        state = state._replace(average=jax.tree.map(jnp.copy, state.params))
    position = max([facts["position"], *(event["position"] for event in rollbacks_to(events, step))])
    LOGGER.info(f"continuing after step {step} of {config.steps}")
    return Start(state, step, facts["tokens"], position, facts["seconds"], tuple(facts["losses"]))


def record_start(built: Build, text: Text, changes: list[str], start: Start, times: Times) -> None:
    """Record that the run continues from `start`, the changed options, and its tokenizer."""
    config = built.config
    with times.during("start"):
        facts = times.note() | made_with(built.mesh) | {"parameters": sum(parameter_counts(config.model).values())}
        on_first_process(partial(accept, config, text.fingerprint, changes, start.step, start.position, **facts))
        if jax.process_index() == 0:
            text.tokenizer.save(Path(config.run_dir) / "tokenizer")

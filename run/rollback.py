"""Rollback after a jump of the loss."""

import jax

from configs.messages import LOGGER
from hosts.runtime import on_first_process
from run.events import Events, rollbacks_to
from run.goodput import Times
from run.hooks.save import Save
from run.notify import tell
from run.progress import GaveUp, Jumped, Progress

MOST = 3  # most rollbacks to one checkpoint


def roll_back(save: Save, times: Times, run: Progress, jump: Jumped) -> None:
    """Record that the run resumes from its newest checkpoint, without the batches up to the jump's. Raise GaveUp after
    MOST rollbacks to that checkpoint."""
    config, spike = run.config, jump.spike
    if jax.process_index() == 0:
        Events(config.run_dir).add("running", run.step, **times.note())  # these steps are repeated
    newest = save.newest()
    if len(rollbacks_to(on_first_process(Events(config.run_dir).read), newest)) >= MOST:
        run.step = spike["step"]
        raise GaveUp(f"{MOST} rollbacks to step {newest} did not help")
    on_first_process(lambda: Events(config.run_dir).add("rollback", newest, position=jump.position, **spike["spike"]))
    back = f"back to step {newest}, and on without the batches up to step {spike['step']}"
    LOGGER.info(back)
    tell(config, "rollback", back, newest)
    run.step = newest

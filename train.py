"""One run, from top to bottom: python train.py --config=configs/small.py. The same command again continues it."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from configs.command_line import parse
from configs.exit_codes import Exit
from configs.messages import LOGGER
from configs.schema import Config
from data.loader import train_batches
from hosts.cluster import Cluster
from hosts.runtime import run_command, start_jax
from hosts.stop import Stop
from hosts.watchdog import limited
from run import hooks, opening
from run.describe import describe
from run.finish import finish
from run.goodput import Times
from run.lock import RunLock
from run.notify import tell_of_failure
from run.out_of_memory import explain_out_of_memory
from run.progress import GaveUp, Jumped, Progress, due_after
from run.record import Record
from run.resume import record_start, resume
from run.rollback import roll_back
from run.stages import Program, batches_from, compile_stages, step_after


@dataclass(frozen=True)
class Arguments:
    """Options of this command, not of the run."""

    accept_changes: bool = False
    """Resume a run although options that change its result differ from the first start's. config.json and metrics.jsonl
    record the changes."""


def take_steps(
    start: Callable[[], tuple[Progress, Iterator[Any]]],
    programs: list[Program],
    idle: hooks.Idle,
    hook_list: Sequence[hooks.Hook],
    stop: Stop,
    go_back: Callable[[Progress, Jumped], Any],
) -> tuple[Progress, str]:
    """Take steps until the last, or until the run is asked to stop. Return the progress, and the reason if a hook gave
    up. `start` returns the run's progress and the next batches; `go_back` records a rollback."""
    run, batches = start()
    with ExitStack() as opened, stop.heeded():
        begin_all(hook_list, run, opened)
        try:
            while not run.is_last:
                try:
                    for hook in hook_list:
                        hook.before_step(run)
                    batch = idle.next_of(batches, run)
                    train_step = step_after(programs, run.step, run.config.diagnostics.every_steps)
                    with run.clock.waiting():  # a CPU's call waits for the step before it
                        run.state, metrics = train_step(run.state, batch)
                    run.step += 1
                    run.stopping = stop.after(run.step)
                    due = due_after(run.step, run.config, last=run.is_last, soon=run.save_soon)
                    for hook in hook_list:
                        hook.after_step(run, metrics, due)
                except Jumped as jump:
                    opened.close()
                    with stop.unheeded():
                        go_back(run, jump)
                        if run.stopping:
                            return run, ""  # nothing to save: the newest checkpoint is of this step
                        run.drop_state()
                        run, batches = start()
                    begin_all(hook_list, run, opened)
            for hook in hook_list:
                hook.finish(run)
        except GaveUp as error:
            return run, str(error)
    return run, ""


def begin_all(hook_list: Sequence[hooks.Hook], run: Progress, opened: ExitStack) -> None:
    """Let the hooks begin. `opened` closes those that began."""
    for hook in hook_list:
        hook.begin(run)
        opened.callback(hook.close)
    gc.freeze()  # garbage collection in the loop then skips the set-up's objects: 0.3 s


def train(config: Config, cluster: Cluster, accept_changes: bool, lock: RunLock, record: Record, stop: Stop) -> Exit:
    """Train, or resume training, until `config.steps`."""
    times = Times()
    opening.check_processes(config, cluster)

    # The network, its text, its record and its checkpoints.
    builds, text, evaluator = opening.open_training(config)
    built = builds[-1]  # for everything that does not depend on the size of a step
    config = built.config
    past, checkpoints = opening.open_folder(built, text, accept_changes, lock, record)
    if message := opening.why_nothing_to_do(config, past, checkpoints):
        LOGGER.info(message)
        opening.copy_record(config, record)
        return Exit.COMPLETE
    if message := opening.why_given_up(config, checkpoints.newest, record):
        LOGGER.info(message)
        return Exit.FAILED

    # The programs.
    LOGGER.info(describe(builds))
    programs: list[Program] = []
    with explain_out_of_memory(mistake=True):
        compile_stages(programs, builds, checkpoints.newest, times)

    # The hooks around a step, in this order.
    watch, idle = hooks.Watch(config, times), hooks.Idle(times)
    log = hooks.Log(built, watch, lambda position: text.epochs(position // built.batch_shape[2]), record)
    save = hooks.Save(config, checkpoints, text.fingerprint, watch)
    judge = hooks.Judge(config, log, save, text.seen)
    evaluate = hooks.Evaluate(config, evaluator, evaluator.tasks, checkpoints, log)
    changes = list(past.changes)
    hook_list = [watch, idle, hooks.Profile(config), log, hooks.History(log, changes), judge, save, evaluate]

    def start() -> tuple[Progress, Iterator[Any]]:
        """Start from the newest readable checkpoint, or from step 0."""
        begins = resume(built, text.tokenizer, checkpoints, times)
        compile_stages(programs, builds, begins.step, times)  # none, unless an older checkpoint was restored
        record_start(built, text, changes, begins, times)
        batches = batches_from(begins, builds, text)
        return Progress(config, begins, batches), train_batches(batches, built.batch_sharding, config.data.workers)

    with explain_out_of_memory(), times.during("steps"):
        run, gave_up = take_steps(start, programs, idle, hook_list, stop, partial(roll_back, save, times))
    if gave_up:
        gave_up += f"; {save.described()}"
    with times.during("saving"), limited(config.hang, "the end of saving"):
        checkpoints.close()
    code = finish(run, gave_up, stop, times)
    opening.copy_record(config, record)
    return code


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    record = Record(config.run_dir, config.checkpoint.folder)
    with RunLock(config.run_dir) as lock, Stop() as stop:
        cluster = start_jax()
        with tell_of_failure(config, record):
            return train(config, cluster, arguments.accept_changes, lock, record, stop)


if __name__ == "__main__":
    run_command(main)

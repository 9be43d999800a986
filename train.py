"""One run, from top to bottom: python train.py --config=configs/small.py. The same command again continues it."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax

from configs.command_line import Exit, parse
from configs.messages import LOGGER, ignore_output_errors
from configs.schema import Config, NotNegative, Positive
from data.loader import train_batches
from hosts.runtime import run_command, start_jax
from hosts.stop import Stop, limited
from run import hooks, session
from run.fitting import Fitting, explain_out_of_memory
from run.folder import RunLock
from run.notify import tell_of_failure
from run.programs import TrainSteps, batches_after, compile_train_steps
from run.progress import GaveUp, Hook, Progress, Start, due_after
from run.record import Record
from run.times import Times


@dataclass(frozen=True)
class Arguments:
    """Options of this command, not of the run."""

    accept_changes: bool = False
    """Resume a run although options that change its result differ from the first start's. config.json and metrics.jsonl
    record the changes."""
    resume_step: Positive[int] | None = None
    """Continue from the checkpoint of this step, and move newer ones to newer-checkpoints/. After a jump of the loss,
    another `--seed` with `--accept_changes` gives the coming steps other rows."""
    memory: NotNegative[float] = 0.0
    """GiB of a device, in place of what it reports, for `--batch.rows_per_device=auto`. A CPU reports the memory that
    the machine has available."""


def take_steps(
    start: Callable[[Start | None], tuple[Progress, TrainSteps, Iterator[Any]]],
    idle: hooks.Idle,
    hook_list: Sequence[Hook],
    stop: Stop,
    go_back: Callable[[Progress, Exception], Start | None],
) -> tuple[Progress, str]:
    """Take steps until the last, or until the run is asked to stop. Return the progress, and the reason if a hook gave
    up. `start(begins)` returns the run's progress, programs and next batches, after `begins` or the newest checkpoint.
    `go_back` records a lack of memory and returns `begins`, or raises another error of the devices."""
    run, programs, batches = start(None)
    with ExitStack() as opened, stop.deferred_signals():
        begin_all(hook_list, run, opened)
        try:
            while not run.is_last:
                try:
                    for hook in hook_list:
                        hook.before_step(run)
                    batch = idle.next_of(batches, run)
                    train_step = programs.after(run.step, run.config.diagnostics.every_steps)
                    with run.clock.waiting():  # a CPU's call waits for the step before it
                        run.state, metrics = train_step(run.state, batch)
                    run.step += 1
                    run.stopping = stop.after(run.step)
                    due = due_after(run.step, run.config, last=run.is_last, soon=run.save_soon)
                    for hook in hook_list:
                        hook.after_step(run, metrics, due)
                except jax.errors.JaxRuntimeError as reason:
                    opened.close()
                    with stop.immediate_signals():
                        begins = go_back(run, reason)
                        if run.stopping:
                            return run, ""  # nothing to save: the newest checkpoint is of this step
                        if begins is None:
                            run.drop_state()
                        run, programs, batches = start(begins)
                    begin_all(hook_list, run, opened)
            for hook in hook_list:
                hook.finish(run)
        except GaveUp as error:
            return run, str(error)
    return run, ""


def begin_all(hook_list: Sequence[Hook], run: Progress, opened: ExitStack) -> None:
    """Let the hooks begin. `opened` closes those that began."""
    for hook in hook_list:
        hook.begin(run)
        opened.callback(hook.close)
    gc.freeze()  # garbage collection in the loop then skips the set-up's objects: 0.3 s


def train(config: Config, arguments: Arguments, lock: RunLock, record: Record, stop: Stop) -> Exit:
    """Train, or resume training, until `config.steps`."""
    times = Times()
    session.check_processes(config)

    # The network, its text, its record and its checkpoints.
    fitting = Fitting(config, arguments.memory)
    built, text, evaluator = session.open_training(fitting.first())
    config = built.config
    past, checkpoints = session.open_folder(built, text, arguments.accept_changes, arguments.resume_step, lock, record)
    if message := session.why_nothing_to_do(config, past, checkpoints):
        LOGGER.info(message)
        session.copy_record(config, record)
        return Exit.COMPLETE
    if message := session.why_given_up(config, checkpoints.newest, record):
        LOGGER.error(message)
        return Exit.FAILED

    # The programs, of as many rows as fit.
    with explain_out_of_memory(mistake=True):
        built, programs = fitting.compile(built, checkpoints.newest, times)
    config, evaluator = built.config, evaluator.on(built)

    # The hooks around a step, in this order.
    watch, idle = hooks.Watch(config, times), hooks.Idle()
    log = hooks.Log(built, watch, lambda tokens: text.epochs(tokens // built.batch_shape[2]))
    save = hooks.Save(config, checkpoints, text.fingerprint, watch)
    judge = hooks.Judge(config, log, text.seen)
    evaluate = hooks.Evaluate(config, evaluator, evaluator.tasks, checkpoints, log)
    changes = list(past.changes)
    hook_list = [watch, idle, hooks.Profile(config), log, hooks.History(log, changes), judge, save, evaluate]
    hook_list.append(hooks.Overfitting(config, log))

    def start(begins: Start | None) -> tuple[Progress, TrainSteps, Iterator[Any]]:
        """Start there, or from the newest readable checkpoint, or from step 0."""
        begins = begins or session.resume(built, checkpoints, times)
        session.record_start(built, text, changes, begins, times)
        batches = batches_after(begins, built, text)
        progress = Progress(config, begins, batches)
        return progress, programs, train_batches(batches, built.batch_sharding, config.data.workers)

    def go_back(run: Progress, reason: Exception) -> Start | None:
        """Return the same state, if it is left, when the memory ran out."""
        nonlocal built, programs
        built = fitting.halved(built, run, reason)
        programs = compile_train_steps(built, times)
        save.newest()  # once it is whole: it may be needed
        return run.here()

    with explain_out_of_memory(), times.during("steps"):
        run, gave_up = take_steps(start, idle, hook_list, stop, go_back)
    if gave_up:
        gave_up += f"; {save.described()}"
    with times.during("saves"), limited(config.hang, "the end of saving"):
        checkpoints.close()
    code = session.finish(run, gave_up, stop, times)
    session.copy_record(config, record)
    return code


def main() -> int:
    config, arguments = parse(__doc__, Arguments)
    ignore_output_errors("stdout")  # its messages; the results are in the run's folder
    record = Record(config.run_dir, config.checkpoint.folder)
    with RunLock(config.run_dir) as lock, Stop() as stop:
        start_jax()
        with tell_of_failure(config, record):
            return train(config, arguments, lock, record, stop)


if __name__ == "__main__":
    run_command(main)

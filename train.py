"""One run, from top to bottom: python train.py --config=configs/small.py. The same command again continues it."""

import gc
from collections.abc import Callable

from configs.arguments import StartArguments
from configs.command_line import parse, parse_own, refuse_mistakes
from configs.schema import Config
from system.errors import Exit, StartAgain
from system.messages import LOGGER, ignore_output_errors

if __name__ == "__main__":
    refuse_mistakes(parse_own, __doc__, StartArguments)  # before the imports, which take seconds

import jax

from data.loader import train_batches
from evaluation.evaluator import Evaluator
from hosts.distributed import on_first_process
from hosts.preflight import preflight
from hosts.runtime import run_command, start_jax
from hosts.stop import Stop
from run import ending, start
from run.base import config_of_continued
from run.ending import notify_of_failure
from run.fitting import Fitting
from run.folder import RunLock
from run.log import MetricsLog
from run.metrics import Profile
from run.record import Times, scores
from run.saver import Saver
from training.state import TrainState


def train(config: Config, arguments: StartArguments, stop: Stop, times: Times) -> Exit:
    """Train, or resume training, until `config.steps`. Raise StartAgain if the memory ran out: the next start takes
    fewer rows."""
    start.check_processes(config, arguments)
    fitting = Fitting(config)
    built, text = start.build_and_open_text(fitting.first_config())
    status = start.claim_folder(built.config, text, arguments.accept_changes)
    preflight(built.config, built.mesh, text.tokenizer.sha256)  # before anything that needs the devices
    checkpoints = start.open_checkpoints(built.config, text, arguments.resume_step)
    if status.finished == checkpoints.newest == built.config.steps:
        return ending.already_complete(built.config, status.changes)
    built, (train_step, measuring_step) = fitting.compile(built, checkpoints.newest, times)
    config, evaluator = built.config, Evaluator(built, text)

    resume_point = start.resume(built, checkpoints, times) or start.begin(built)
    start.record_start(built, text, status.changes, resume_point)
    state, step = resume_point.state, resume_point.step
    step_batches = start.batches_after(resume_point, built, text)
    batches = train_batches(step_batches, built.batch_sharding, config.data.workers)
    profile = Profile(config, step)
    log = MetricsLog(built, text, resume_point, step_batches, times)
    checkpoints.scores = log.scores  # the best one is kept
    if status.changes:
        log.write(step, {"changes": status.changes})
    gc.freeze()  # garbage collection in the loop then skips the set-up's objects: 0.3 s

    with (
        fitting.fewer_rows_if_out_of_memory(built),
        checkpoints,  # whose end waits for the save in progress
        log,
        profile,
        times.during("steps"),
        stop.deferred_signals(),
    ):
        # Before step 0, or an evaluation that a kill or a request to stop cut off.
        if not on_first_process(lambda: step in scores(config.run_dir, "val_loss")):
            evaluate_if_due(step, state.params, evaluator, log, stop)
        while step < config.steps and not stop.agreed():
            profile.before(step + 1, state)
            batch = log.clock.next_batch(batches)
            log.watchdog.dispatch(step + 1)
            take = measuring_step if is_due(step + 1, config.diagnostics.every_steps) else train_step
            state, metrics = take(state, batch)
            step += 1
            log.step(step, metrics)  # reads the step before, while the devices compute this one
            profile.after(step, state)

            save_if_due(step, state, checkpoints, log)
            evaluate_if_due(step, state.params, evaluator, log, stop)
        log.flush()
        stopped = stop.agreed()  # even after the last step, whose evaluation may be cut off
        with log.saving():
            checkpoints.save_last(step, state, log.facts(step))
    if stopped:
        return ending.stopped(config, step, stop, times)
    return ending.complete(config, state, log.tokens(step), log.clock.seconds, times)


def is_due(step: int, every: int) -> bool:
    """Return whether something that happens every `every` steps (0: never), and before the first, is due at `step`."""
    return every > 0 and step % every == 0


def save_if_due(step: int, state: TrainState, checkpoints: Saver, log: MetricsLog) -> None:
    """Save the state after `step` if that is due. Every process must call it."""
    config = log.config
    if is_due(step, config.log.every_steps):
        checkpoints.poll()  # counts a save that ended
    if step == config.steps or is_due(step, config.checkpoint.every_steps) or checkpoints.overdue:
        log.flush()  # a checkpoint's metrics are on record before it
        with log.saving():
            checkpoints.save(step, state, log.facts(step))


def evaluate_if_due(step: int, params: dict, evaluator: Callable, log: MetricsLog, stop: Stop) -> None:
    """Evaluate the network after `step` by `evaluator(params, should_stop)`, if that is due. A request to stop ends an
    evaluation, and the next start repeats it. Every process must call it."""
    config = log.config
    if not (step == config.steps or is_due(step, config.eval.every_steps)) or stop.agreed():
        return
    log.flush()
    with log.evaluating():
        jax.block_until_ready(params)
        results = evaluator(params, stop.agreed)
    if results is not None:
        log.evaluation(step, results)


def main(what: str | None = __doc__, run: Callable[..., Exit] = train) -> int:
    """Parse the options of a command, and run it. Return its exit code."""
    config, arguments = parse(what, StartArguments, config_of_run=config_of_continued)
    ignore_output_errors("stdout")  # its messages; the results are in the run's folder

    def start_once() -> Exit:
        times = Times()
        with ending.failure_recorded(config, times), stop.one_start():
            return run(config, arguments, stop, times)

    with Stop(config.hang) as stop:
        start_jax()
        with RunLock(config.run_dir), notify_of_failure(config):
            try:
                return start_once()
            except StartAgain as reason:
                if jax.process_count() > 1:
                    raise  # the launcher starts all again
                LOGGER.warning(str(reason))
            gc.unfreeze()  # the failed start's objects, among them cycles that hold arrays
            gc.collect()
            return start_once()


if __name__ == "__main__":
    run_command(main)

"""One run, from top to bottom: python train.py --config=configs/small.py. The same command again continues it."""

import gc
from collections.abc import Callable
from functools import partial

from options.arguments import StartArguments
from options.command_line import parse, parse_own, refuse_mistakes
from options.schema import Config
from system.errors import Exit, StartAgain
from system.messages import LOGGER, ignore_output_errors

if __name__ == "__main__":
    refuse_mistakes(parse_own, __doc__, StartArguments)  # before the imports, which take seconds

import jax

from data.dataset import Text
from evaluation.benchmark import benchmark_of_run
from evaluation.evaluator import Evaluator
from hosts.clock import Timeline
from hosts.runtime import run_command, start_jax
from hosts.stop import Stop
from run import ending
from run.base import config_of_continued
from run.folder import RunFolder
from run.lock import RunLock
from run.session import open_session
from run.source import ResumePoint, Source, Stage
from run.start import prepare
from run.text import TextSource, open_text_of_run
from training.build import Build


def train(
    config: Config, arguments: StartArguments, stage: Stage, folder: RunFolder, stop: Stop, timeline: Timeline
) -> Exit:
    """Train, or resume training, until `config.steps`. Raise StartAgain if the memory ran out: the next start takes
    fewer rows."""
    prepared = prepare(config, arguments, stage, folder)
    config = prepared.built.config
    if prepared.is_complete:
        return ending.already_complete(config, prepared.status.changes)

    with open_session(prepared, stop, timeline) as run:
        state, step = run.start.state, run.start.step
        run.evaluate_first(step, state.params)
        while step < config.steps and not stop.ask():
            run.profile.before(step + 1, state)
            batch = run.next_batch(step, state.params)
            if batch is None:  # asked to stop meanwhile
                break
            train_step = run.step_program(step + 1)
            state, metrics = train_step(state, batch.arrays)
            step += 1
            run.log.step(step, metrics, batch)  # reads the step before, while the devices compute this one
            run.profile.after(step, state)

            run.save_if_due(step, state)
            run.evaluate_if_due(step, state.params)
        run.save_last(step, state)
    if stop.agreed:
        return ending.stopped(config, folder, step, stop, timeline)
    return ending.complete(config, folder, state, run.log.tokens(step), run.log.seconds, timeline)


def text_source(built: Build, text: Text) -> Callable[[ResumePoint], Source]:
    """Return the function from a point to a text's rows after it, a source that evaluates on held-out text."""
    benchmark = benchmark_of_run(built, text) if built.config.eval.tasks else None
    return partial(TextSource, built, text, Evaluator(built, text, benchmark))


ON_TEXT = Stage(open_text_of_run, text_source)
"""Pretraining, and fine-tuning on conversations."""


def main(what: str | None = __doc__, stage: Stage = ON_TEXT) -> int:
    """Parse the options of a command, and run a stage of training. Return its exit code."""
    config, arguments = parse(what, StartArguments, config_of_run=config_of_continued)
    ignore_output_errors("stdout")  # its messages; the results are in the run's folder
    folder = RunFolder(config.run_dir)

    def start_once() -> Exit:
        timeline = Timeline()
        with ending.failure_recorded(folder, timeline), stop.one_start():
            return train(config, arguments, stage, folder, stop, timeline)

    with Stop(config.hang) as stop:
        start_jax()
        with RunLock(folder), ending.notify_of_failure(config, folder):
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

"""A session: everything around the loop of train.py, from the first compilation to the last save."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import jax

from hosts.clock import Timeline
from hosts.distributed import on_every_process, on_first_process
from hosts.stop import Stop
from hosts.watchdog import io_limit
from model.gpt import parameter_counts, parameter_shapes
from run.checkpoint import Checkpoints
from run.describe import made_with
from run.due import is_due
from run.fitting import TrainSteps
from run.folder import RunFolder
from run.init_from import initial_state
from run.log import MetricsLog, scores_of
from run.metrics import drop_metrics_after, open_metrics
from run.profile import Profile
from run.recovery import restore_newest
from run.saver import Saver
from run.source import Material, ResumePoint, Source, StepBatch
from run.start import Prepared
from run.status import write_start_record
from system.messages import LOGGER
from training.build import Build
from training.state import TrainState
from training.step import TrainStep


class Session(NamedTuple):
    """What the loop needs, besides the state. Every process must call the methods."""

    built: Build
    steps: TrainSteps
    source: Source
    log: MetricsLog
    saver: Saver
    profile: Profile
    stop: Stop
    facts_of_run: dict[str, Any]
    """What every checkpoint says of the run."""

    @property
    def start(self) -> ResumePoint:
        """Return the state and the step from which this start continues."""
        return self.log.start

    @property
    def timeline(self) -> Timeline:
        """Return the process's activities."""
        return self.log.timeline

    def next_batch(self, step: int, params: dict) -> StepBatch | None:
        """Return the batch of the step after `step`; None if the run was asked to stop meanwhile."""
        self.log.begin(step + 1)
        with self.timeline.during("batches"):
            return self.source.batch(step, params, self.stop.ask)

    def step_program(self, step: int) -> TrainStep:
        """Return the compiled `train_step` of training/step.py, with diagnostics if they are due at `step`."""
        is_measured = is_due(step, self.built.config.diagnostics.every_steps)
        return self.steps.measuring_step if is_measured else self.steps.train_step

    def save_if_due(self, step: int, state: TrainState) -> None:
        """Save the state after `step` if that is due, or if the last save failed."""
        config = self.built.config
        if is_due(step, config.log.every_steps):
            self.saver.poll()  # counts a save that ended
        if step == config.steps or is_due(step, config.checkpoint.every_steps) or self.saver.overdue:
            self._save_by(self.saver.save, step, state)

    def save_last(self, step: int, state: TrainState) -> None:
        """Save the state after `step`, unless it is saved, and wait for the end."""
        self._save_by(self.saver.save_last, step, state)

    def _save_by(self, save: Callable[[int, TrainState, dict], None], step: int, state: TrainState) -> None:
        """Save the state with the facts that a later start continues from, and those of the run. First log the step: a
        checkpoint's metrics are on record before it."""
        self.log.flush()
        point = {"tokens": self.log.tokens(step), "seconds": self.log.seconds, "losses": list(self.log.losses)}
        with self.timeline.during("saves"):
            save(step, state, point | self.facts_of_run)

    def evaluate_first(self, step: int, params: dict) -> None:
        """Evaluate before step 0, or again if a kill or a request to stop cut off the evaluation of `step`."""
        if not on_first_process(lambda: step in self.log.scores):
            self.evaluate_if_due(step, params)

    def evaluate_if_due(self, step: int, params: dict) -> None:
        """Evaluate the network after `step` if that is due. A request to stop ends an evaluation, and the next start
        repeats it."""
        config = self.built.config
        is_last = step == config.steps
        if not (is_last or is_due(step, config.eval.every_steps)) or self.stop.ask():
            return
        self.log.flush()
        with self.timeline.during("evaluation"):
            jax.block_until_ready(params)
            results = self.source.evaluate(params, self.stop.ask)
        if results is not None:
            self.log.evaluation(step, results)


@contextmanager
def open_session(run: Prepared, stop: Stop, timeline: Timeline) -> Iterator[Session]:
    """Compile the step, restore or make the state, record the start, and yield the session of the loop inside. After
    it, the last save is complete. Raise StartAgain if the memory runs out: the next start takes fewer rows."""
    folder, changes = run.folder, run.status.changes
    built, steps = run.fitting.compile(run.built, run.checkpoints.newest, timeline)
    config = built.config
    source_after = run.stage.source(built, run.material)
    start = resume(built, run.checkpoints, timeline) or begin(built)
    source = source_after(start)
    record_start(folder, built, run.material, changes, start, source.mixture)
    lines = on_every_process("its metrics", partial(drop_metrics_after, folder, start.step))
    scores = scores_of(source, lines)
    with io_limit(config.hang, "opening the checkpoints"):
        saver = Saver(folder, config.checkpoint, scores)  # which keeps the best one
    writer = open_metrics(folder, lines, config)
    log = MetricsLog(built, folder, source, start, writer, scores, timeline)
    if changes:
        log.write(start.step, {"changes": changes})
    shapes = parameter_shapes(config.model)
    of_text = {"dataset": run.material.fingerprint, "mixture": source.mixture}
    facts_of_run = {**of_text, "config": asdict(config), "shapes": shapes}
    gc.freeze()  # garbage collection in the loop then skips the set-up's objects: 0.3 s

    with (
        run.fitting.fewer_rows_if_out_of_memory(built),
        saver,  # whose end waits for the save in progress
        log,
        Profile(config, folder, start.step) as profile,
        timeline.during("steps"),
        stop.deferred_signals(),
    ):
        yield Session(built, steps, source, log, saver, profile, stop, facts_of_run)


def resume(built: Build, checkpoints: Checkpoints, timeline: Timeline) -> ResumePoint | None:
    """Return the state and the data's position of the newest checkpoint that can be read; None without any."""
    with timeline.during("restore"), io_limit(built.config.hang, "restoring"):
        restored = restore_newest(checkpoints, built.abstract_state)
    if restored is None:
        return None
    state, facts = restored
    LOGGER.info(f"continuing after step {facts['step']} of {built.config.steps}")
    mixture = facts.get("mixture")  # none in a run of reinforcement before mixtures were recorded
    return ResumePoint(state, facts["step"], facts["tokens"], facts["seconds"], tuple(facts["losses"]), mixture)


def begin(built: Build) -> ResumePoint:
    """Return the state before step 0."""
    with io_limit(built.config.hang, "making the first state"):
        return ResumePoint(jax.block_until_ready(initial_state(built)))


def record_start(
    folder: RunFolder,
    built: Build,
    material: Material,
    changes: list[str],
    start: ResumePoint,
    mixture: dict[str, Any] | None,
) -> None:
    """Record that the run continues from this point, the changed options, the mixture of datasets from there on, and
    the tokenizer."""
    config = built.config
    facts = made_with(built.mesh) | {"parameters": sum(parameter_counts(config.model).values()), "mixture": mixture}

    def write() -> None:
        write_start_record(folder, config, material, changes, start.step, start.tokens, **facts)
        material.tokenizer.save(folder.tokenizer)

    on_first_process(write)

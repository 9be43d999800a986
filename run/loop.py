"""The steps of a run: take one, read what it says, log, evaluate and save what is due, and find out how it ends."""

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import Any, NamedTuple

import jax
from tenacity import Retrying, retry_if_result, wait_random_exponential

from configs.ramp import Ramp
from configs.retry import LONGEST
from configs.schema import Config, options
from model.flops import flops_per_token
from model.shapes import parameter_shapes
from program.machines import peak_flops
from run.busy import Busy
from run.checkpoint import Checkpoints
from run.events import Events
from run.goodput import Times
from run.lines import read_metrics
from run.metrics import Clock, MetricsWriter
from run.monitor import Monitor
from run.notify import tell
from run.profile import Profile
from run.runtime import Stop, highest, on_first_process
from run.watchdog import Watchdog, end_as_hung
from run.weights_and_biases import Wandb
from training.build import Build
from training.state import TrainState
from training.step import TrainStep


class Start(NamedTuple):
    """Where a run begins, or goes on."""

    state: TrainState
    step: int = 0
    """Steps taken."""
    tokens: int = 0
    """Tokens of those steps."""
    position: int = 0
    """Tokens of the data's sequence before the next batch: those of the steps, and what rollbacks left out."""
    seconds: float = 0.0
    """Of training."""
    losses: tuple[float, ...] = ()
    """Of the newest steps: what a jump is compared with."""


class Finished(NamedTuple):
    """All steps are taken, and the last is saved."""

    state: TrainState
    tokens: int
    seconds: float


class Stopped(NamedTuple):
    """Somebody asked for it, and the step is saved."""

    step: int


class Jumped(NamedTuple):
    """The loss jumped at a step, and the run is to go back to the newest checkpoint and leave its batches out."""

    spike: dict
    position: int
    """Tokens of the data's sequence up to the jump's batch, that batch included."""
    stopping: bool
    """Whether somebody asked the run to stop at the same time."""


class GaveUp(NamedTuple):
    """It makes no sense to go on."""

    step: int
    reason: str


Outcome = Finished | Stopped | Jumped | GaveUp


class Due(NamedTuple):
    """What is to be done after a step."""

    log: bool
    evaluate: bool
    save: bool
    tasks: bool = False


def due_after(step: int, config: Config, *, last: bool, retry: bool, old: bool = False) -> Due:
    """What is due after `step`. `last`: the run stops after it; `retry`: the save before failed, and `old`: it is
    `checkpoint.every_minutes` ago."""
    every = lambda interval: step % interval == 0 or step == config.steps
    return Due(
        log=every(config.log.every_steps),
        evaluate=every(config.eval.every_steps),
        save=every(config.checkpoint.every_steps) or last or retry or old,
        tasks=config.eval.tasks != "" and every(config.eval.tasks_every_steps),
    )


class Loop:
    """The steps of one run from one start on."""

    def __init__(
        self,
        built: Build,
        start: Start,
        train_step: TrainStep,
        measure: Callable[[dict], dict] | None,
        seen: Callable[[int], dict],
        checkpoints: Checkpoints,
        dataset: str,
        stop: Stop,
        say: Callable[[str], Any],
        times: Times | None = None,
        measuring_step: TrainStep | None = None,
        measure_tasks: Callable[[dict], dict] = lambda params: {},
        epochs: Callable[[int], dict[str, float]] = lambda position: {},
    ):
        """`train_step` and `measuring_step`, which takes its place at every `diagnostics.every_steps`: compiled.
        `measure(params)` evaluates and samples (None: nothing does), `measure_tasks(params)` gives the figures of
        `eval.tasks`. `seen(i)`: what the i-th batch from the start on held, for the record of a jump. `dataset`: the
        fingerprint that checkpoints are to carry. `times`: this process's. `epochs(position)`: how often each source
        was gone through after so many tokens of the data's sequence."""
        self.config = config = built.config
        self.start, self.state, self.step = start, start.state, start.step
        self.train_step, self.measuring_step = train_step, measuring_step
        self.measure, self.measure_tasks, self.checkpoints = measure, measure_tasks, checkpoints
        self.dataset, self.stop, self.say = dataset, stop, say
        self.ramp = Ramp.of(config.batch)
        self.times, self.watchdog = times or Times(), Watchdog(config.hang, self.end_as_hung, work=self.ramp.tokens)
        self.profile = Profile(config)
        if 0 < self.profile.first <= start.step:
            say(f"--profile.steps={config.profile.steps}: step {start.step} is done already; nothing is traced")
        self.saved = time.monotonic()
        self.clock = Clock(start.seconds, start.tokens)
        wandb = partial(Wandb, config) if config.log.wandb else None
        self.writer = MetricsWriter(config.run_dir, start.step, wandb, options(config))
        batch_of = lambda step: self.ramp.steps_in(self.position_after(step - 1))
        peak = peak_flops(built.mesh.devices.flat[0].device_kind)
        flops = flops_per_token(config.model, config.batch.sequence_length)
        self.monitor = Monitor(
            config,
            self.writer,
            self.clock,
            flops_share=flops / (peak * built.mesh.size) if peak else None,
            tokens_after=self.tokens_after,
            epochs_after=lambda step: epochs(self.position_after(step)),
            rows_of=lambda step: {"batch": batch_of(step), **seen(step - 1 - start.step)},
            say=say,
            losses=list(start.losses),
            step=start.step,
            skipped=int(start.state.skipped_steps),
        )

    def drop_state(self) -> None:
        """Frees the devices' memory of the state, which the run goes back from."""
        for leaf in jax.tree.leaves(self.state):
            leaf.delete()

    def tokens_after(self, step: int) -> int:
        """Tokens of the run up to `step`."""
        return self.start.tokens + self.ramp.tokens(step) - self.ramp.tokens(self.start.step)

    def position_after(self, step: int) -> int:
        """Tokens of the data's sequence up to the batch of `step`."""
        return self.start.position + self.ramp.tokens(step) - self.ramp.tokens(self.start.step)

    def run(self, batches: Iterator[Any]) -> Outcome:
        """Takes steps until the last, or until something ends them."""
        config, monitor = self.config, self.monitor
        self.clock.start()
        with (
            closing(monitor.bar),
            closing(Busy()) as busy,
            self.stop.heeded(),
            self.watchdog,
            closing(self.profile),
            self.times.during("steps"),
        ):
            self.evaluate_what_is_due()
            if self.step == config.steps:  # killed after its last checkpoint, before its summary
                return Finished(self.state, self.start.tokens, self.clock.seconds)
            batch = next(batches)
            gc.freeze()  # so that no collection in the loop looks through all that was set up: 0.3 s
            unlogged = retry = False
            while True:
                self.watchdog.step(self.step + 1)
                self.profile.before(self.step + 1, self.state)
                self.state, metrics = self.step_program()(self.state, batch)
                self.step += 1
                busy.given(metrics)
                self.profile.after(self.step, self.state)
                if unlogged:
                    retry = self.log()  # of the step before, while this one runs
                batch, idle = busy.wait_for(batches)
                self.clock.idle += idle
                self.times.count("data", idle)
                monitor.add(self.step, metrics)
                stopping = self.stop.after(self.step)
                last = stopping or self.step == config.steps
                due = due_after(self.step, config, last=last, retry=retry, old=self.save_is_old())
                unlogged = due.log
                if due.log and (due.evaluate or due.save or due.tasks):
                    retry = self.log()  # what a checkpoint vouches for is written before it
                    unlogged = False
                elif due.save or not self.watchdog.each:
                    self.read()  # after the first step, too: the watchdog's limit follows from its time
                if outcome := self.end_before_saving(stopping):
                    return outcome
                if due.save:
                    self.save()
                    retry = False
                if stopping:  # the machine may be gone in seconds: the next start evaluates
                    return self.end(stopping=True)
                if due.evaluate or due.tasks:
                    self.evaluate_what_is_due()
                if last:
                    return self.end()

    def step_program(self) -> TrainStep:
        """The program of the next step."""
        if self.measuring_step and (self.step + 1) % self.config.diagnostics.every_steps == 0:
            return self.measuring_step
        return self.train_step

    def save_is_old(self) -> bool:
        """Whether `checkpoint.every_minutes` have passed, by any process's clock; asked when a step is logged."""
        minutes = self.config.checkpoint.every_minutes
        if not minutes or self.step % self.config.log.every_steps:
            return False
        return highest(time.monotonic() - self.saved > 60 * minutes) > 0

    def read(self) -> None:
        """Waits for the steps before."""
        self.monitor.read()
        self.watchdog.done_with(self.monitor.step)

    def log(self) -> bool:
        """Writes a line. Whether the save before failed and is to be tried again."""
        self.read()
        self.monitor.write()
        if self.times.due and jax.process_index() == 0:
            with suppress(OSError):  # a full disk is reported elsewhere
                Events(self.config.run_dir).add("running", self.monitor.step, **self.times.note())
            if self.checkpoints.record:
                self.checkpoints.record.copy_events()
        failed = self.failed_saves(wait=False)
        return failed > 0 and not self.checkpoints.pending

    def failed_saves(self, wait: bool) -> int:
        """How many saves in a row have failed (`Checkpoints.failing`). Says each failure once."""
        failed = self.checkpoints.failing(wait)
        while self.checkpoints.messages:
            self.say(self.checkpoints.messages.pop(0))
        return failed

    def end_before_saving(self, stopping: bool) -> Outcome | None:
        """What the steps read so far, and the saves, say of going on."""
        limit, checkpoints, monitor = self.config.checkpoint.max_failed_saves, self.checkpoints, self.monitor
        if monitor.skipped_in_a_row >= self.config.max_skipped_steps:
            return self.give_up(f"--max_skipped_steps={self.config.max_skipped_steps} in a row were skipped")
        if monitor.spike and self.config.stability.rollback:
            spike, monitor.spike = monitor.spike, None
            with self.watchdog.elsewhere("saving"), self.times.during("saving"):
                checkpoints.failing()  # waits: which checkpoint is the newest must not depend on how fast it is written
            if checkpoints.newest:
                return Jumped(spike, self.position_after(spike["step"]), stopping)
            self.say("there is no checkpoint from before the jump to go back to: the run goes on")
        if checkpoints.failed_saves >= limit and not checkpoints.passing:
            return self.give_up(f"{checkpoints.failed_saves} save(s) in a row failed: {checkpoints.failure}")
        return None

    def end(self, stopping: bool = False) -> Outcome:
        """After the last step: waits for its checkpoint, and tries again, after a pause, where that fails."""
        limit, failed = self.config.checkpoint.max_failed_saves, 0
        again = lambda failed: failed > 0 and (failed < limit or self.checkpoints.passing)
        pause = wait_random_exponential(multiplier=0.5, max=LONGEST)
        with self.watchdog.elsewhere("saving"), self.times.during("saving"):
            for attempt in Retrying(retry=retry_if_result(again), wait=pause):
                if failed:
                    self.save()
                failed = self.failed_saves(wait=True)
                attempt.retry_state.set_result(failed)
        if failed:
            return self.give_up(f"{failed} save(s) in a row failed: {self.checkpoints.failure}")
        if stopping:
            return Stopped(self.step)
        return Finished(self.state, self.tokens_after(self.step), self.clock.seconds)

    def give_up(self, reason: str) -> GaveUp:
        with self.watchdog.elsewhere("saving"), self.times.during("saving"):
            self.checkpoints.failing()  # waits for what is being saved
        newest = self.checkpoints.newest
        where = f"the newest checkpoint is of step {newest}" if newest else "no checkpoint was saved"
        return GaveUp(self.step, f"{reason}; {where}")

    def end_as_hung(self, reason: str) -> None:
        """Ends all processes, from the watchdog's thread."""
        tell(self.config, "failure", f"a hang: {reason}", self.step)
        end_as_hung(reason)

    def evaluate_what_is_due(self) -> None:
        """Evaluates and samples the network as it is now, where that is due after this step and not on record: a run
        that was ended after the step was saved makes up for it."""
        due = due_after(self.step, self.config, last=False, retry=False)
        lines = lambda: [line for line in read_metrics(self.config.run_dir) if line["step"] == self.step]
        on_record = on_first_process(lambda: [name for line in lines() for name in line])
        if self.measure and due.evaluate and "val_loss" not in on_record:
            results = self.measured(self.measure)
            loss, bits = results["val_loss"], results["val_bpb"]
            self.checkpoints.score(self.step, bits)
            error = f" +- {error:.4f}" if (error := results.get("val_bpb_stderr")) else ""
            self.say(f"step {self.step}: validation loss {loss:.4f}, {bits:.4f}{error} bits per byte")
        if self.step > 0 and due.tasks and "core" not in on_record:
            results = self.measured(self.measure_tasks)
            self.say(f"step {self.step}: CORE {results['core']:.4f} +- {results['core_stderr']:.4f}")

    def measured(self, measure: Callable[[dict], dict]) -> dict:
        """What `measure` finds of the network, written down; none of its time is training's."""
        jax.block_until_ready(self.state)
        with self.clock.paused(), self.watchdog.elsewhere("an evaluation"), self.times.during("evaluation"):
            results = measure(self.state.params)
        self.writer.write({"step": self.step, "tokens": self.tokens_after(self.step), **results})
        return results

    def save(self) -> None:
        position = {"tokens": self.tokens_after(self.step), "position": self.position_after(self.step)}
        kept = {"seconds": self.clock.seconds, "losses": list(self.monitor.losses)}
        shapes = parameter_shapes(self.config.model)
        origin = {"dataset": self.dataset, "config": dataclasses.asdict(self.config), "shapes": shapes}
        with self.watchdog.elsewhere("saving"), self.times.during("saving"):
            self.checkpoints.save(self.step, self.state, {**position, **kept, **origin})
        self.saved = time.monotonic()

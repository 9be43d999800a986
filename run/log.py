"""The log of a run's steps: the lines of metrics.jsonl, the progress bar, and reports to the user."""

import math
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from hosts.clock import STEPPING, Timeline, running_seconds
from hosts.machines import peak_flops
from hosts.watchdog import Watchdog, end_as_hung, time_limit
from model.gpt import flops_per_token
from run.due import is_logged
from run.ending import COMMAND_SECONDS, tell
from run.folder import RunFolder
from run.metrics import MetricsWriter
from run.record import figures_by_step
from run.source import ResumePoint, Source, StepBatch
from system.errors import TrainingAborted
from system.messages import LOGGER
from training.build import Build
from training.step import Metrics

MOST_SKIPPED = 10  # consecutive skipped steps that end the run
WINDOW = 64  # losses kept to compare a loss with
ENOUGH = 16  # fewest losses to compare a loss with
SPIKE = 1.5  # times their median that a loss must exceed to be reported
TRAINING = (*STEPPING, "saves")
"""Activities that count as time of training: mostly training continues while a checkpoint is written."""


class Pace:
    """Tokens per second between two readings, and the share of that time in which the devices waited for a batch."""

    def __init__(self, seconds: float, tokens: int):
        """Take the seconds of training and the tokens so far."""
        self.last = (seconds, tokens)
        self.stalled = 0.0
        """Seconds since the last reading in which the devices waited."""
        self.watching = ThreadPoolExecutor(1, "pace")
        self.devices_done: Future[float] | None = None
        """The time at which the devices completed the newest step."""

    def dispatched(self, metrics: Metrics, waited: tuple[float, float]) -> None:
        """Note a step's metrics, which are ready once the devices have completed it, and the wait for its batch."""
        asked, came = waited
        if self.devices_done and self.devices_done.done():
            self.stalled += max(0.0, came - max(asked, self.devices_done.result()))

        def done_at() -> float:
            jax.block_until_ready(metrics)
            return running_seconds()

        self.devices_done = self.watching.submit(done_at)

    def read(self, seconds: float, tokens: int) -> tuple[float, float]:
        """Return the tokens per second since the last reading, at which the run had fewer than `tokens` tokens, and the
        share of the time in which the devices waited for a batch."""
        (before, tokens_before), self.last = self.last, (seconds, tokens)
        passed, stalled, self.stalled = seconds - before, self.stalled, 0.0
        return (tokens - tokens_before) / passed, stalled / passed

    def close(self) -> None:
        """End the thread, without a wait for the devices."""
        self.watching.shutdown(wait=False, cancel_futures=True)


class MetricsLog:
    """Writes a line for each logged step, and reports skipped steps and spikes of the loss.

    It reads a step's metrics while the devices compute the next step, so they never wait for the host. `flush` logs
    the newest at once. One reading of the metrics serves the file, the bar, the reports and the watchdog. Every process
    must have one, and call its methods together."""

    def __init__(
        self,
        built: Build,
        folder: RunFolder,
        source: Source,
        resume_point: ResumePoint,
        writer: MetricsWriter,
        scores: dict[int, float],
        timeline: Timeline,
    ):
        """Continue a run's log, whose lines end at `resume_point`. It adds later scores to `scores` (`scores_of`)."""
        config = self.config = built.config
        self.built, self.folder, self.source, self.start, self.writer = built, folder, source, resume_point, writer
        self.timeline = timeline
        self.unread: tuple[int, Metrics] | None = None
        """The newest step, whose metrics the devices may still compute."""
        self.losses = deque(resume_point.losses, WINDOW)
        """Losses of the newest steps that were read."""
        self.skipped, self.skipped_in_a_row = int(resume_point.state.skipped_steps), 0
        self.scores = scores
        self.pace = Pace(self.seconds, resume_point.tokens)
        self.watchdog = Watchdog(config.hang, timeline, resume_point.step, self._end_as_hung)
        self.bar = tqdm(
            total=config.steps,
            initial=resume_point.step,
            unit="step",
            disable=None if jax.process_index() == 0 else True,  # None: if the output is no terminal
            dynamic_ncols=True,
        )

    def __enter__(self) -> "MetricsLog":
        self.watchdog.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.watchdog.__exit__()
        self.pace.close()
        self.bar.close()
        self.writer.close()

    @property
    def seconds(self) -> float:
        """Return the seconds of training over all of a run's starts, without compilation, evaluation and sampling, and
        without the time in which the system stopped the process."""
        return self.start.seconds + self.timeline.seconds(*TRAINING)

    def tokens(self, step: int) -> int:
        """Return the tokens of the run up to `step`."""
        return self.start.tokens + (step - self.start.step) * self.config.batch.tokens_per_step

    def write(self, step: int, facts: dict) -> None:
        """Write a line."""
        self.writer.write({"step": step, "tokens": self.tokens(step), **facts})

    def begin(self, step: int) -> None:
        """Note that a step begins: from now on the watchdog allows for it."""
        self.watchdog.dispatched = step

    def step(self, step: int, metrics: Metrics, batch: StepBatch) -> None:
        """Take the metrics of a step that the devices have just begun, and its batch. Log the step before it."""
        self.flush()
        self.unread = (step, metrics | batch.figures)
        self.pace.dispatched(metrics, batch.waited)

    def flush(self) -> None:
        """Wait for the newest step, and log it. Raise TrainingAborted after ten skipped steps in a row."""
        if not self.unread:
            return
        (step, metrics), self.unread = self.unread, None
        values = jax.tree.map(lambda value: np.asarray(value).item(), jax.device_get(metrics))
        self.watchdog.finish(step)
        self.bar.update(step - self.bar.n)
        if "diagnostics" in values:
            self.write(step, {"diagnostics": values.pop("diagnostics")})
        if not values["valid_tokens"]:
            values["loss"] = math.nan  # the step has none
        self._count_skipped(step, values)
        if self.source.loss_is_a_measure:
            self._report_spike(step, values["loss"])
        if is_logged(step, self.config):
            self._log(step, values)
        if self.skipped_in_a_row >= MOST_SKIPPED:
            raise TrainingAborted(f"{MOST_SKIPPED} steps in a row were skipped")

    def _log(self, step: int, values: dict) -> None:
        """Write a step's line, and move the bar."""
        tokens_per_second, data_wait = self.pace.read(self.seconds, self.tokens(step))
        mfu = mfu_of(self.built, tokens_per_second)
        line = {**values, "tokens_per_second": tokens_per_second, "mfu": mfu, "data_wait": data_wait}
        memory = jax.local_devices()[0].memory_stats() or {}  # a CPU has none
        line |= {"peak_memory_bytes": memory.get("peak_bytes_in_use"), "seconds": self.seconds}
        self.write(step, line)
        if self.writer.problem:
            LOGGER.warning(self.writer.problem)
        speed = f"{tokens_per_second:,.0f} tokens/s" + (f"  MFU {mfu:.1%}" if mfu else "")
        shown = f"{self.source.describe_step(line)}  {speed}"
        self.bar.set_postfix_str(shown, refresh=False)
        if self.bar.disable:
            LOGGER.info(f"step {step}/{self.config.steps}  {shown}")

    def _count_skipped(self, step: int, values: dict) -> None:
        """Report a skipped step. One that may be empty is no failure, however many follow each other."""
        before, skipped = self.skipped, values["skipped_steps"]
        self.skipped = skipped
        if not values["valid_tokens"] and self.source.why_empty:
            LOGGER.warning(f"step {step} changed nothing: {self.source.why_empty}")
            return
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped > before else 0
        if self.skipped_in_a_row:
            bad = [group for group, norm in values["grad_norms"].items() if not math.isfinite(norm)]
            why = f"the gradient of {', '.join(bad)} is not finite" if bad else "it has no valid token"
            LOGGER.warning(f"step {step} changed nothing: {why}; {skipped} step(s) skipped so far")

    def _report_spike(self, step: int, loss: float) -> None:
        """Compare a step's loss with those before it. Log a spike with its rows."""
        usual = median(self.losses) if len(self.losses) >= ENOUGH else math.inf
        if math.isfinite(loss):
            self.losses.append(loss)
        if not loss > SPIKE * usual:
            return
        spike = f"step {step}: the loss jumped to {loss:.4f} from a median of {usual:.4f}"
        LOGGER.warning(f"{spike}; its rows: python -m tools.dataset {self.folder} --step={step}")
        if self.writer.writes:
            self.write(step, {"spike": {"loss": loss, "median": usual, **self.source.rows_of(step)}})
        tell(self.config, self.folder, "spike", spike, step)

    def evaluation(self, step: int, results: dict[str, Any]) -> None:
        """Write the results of an evaluation."""
        self.write(step, results)
        self.scores |= scores_of(self.source, [{"step": step, **results}])
        for line in self.source.describe_evaluation(results):
            LOGGER.info(f"step {step}: {line}")

    def _end_as_hung(self, reason: str) -> None:
        """End this process, from the watchdog's thread."""
        with time_limit(2 * COMMAND_SECONDS, reason):  # the run's disk may hang, too
            tell(self.config, self.folder, "failure", f"a hang: {reason}", self.watchdog.dispatched)
        end_as_hung(reason)


def scores_of(source: Source, lines: list[dict]) -> dict[int, float]:
    """Return the score of each evaluated step by these lines of metrics.jsonl: the lowest is best."""
    name, sign = source.score
    return {step: sign * figure for step, figure in figures_by_step(lines, name).items()}


def mfu_of(built: Build, tokens_per_second: float) -> float | None:
    """Return the share of the devices' peak FLOP/s, which are known for bfloat16; None for other types and devices."""
    peak = peak_flops(built.mesh.devices.flat[0].device_kind)
    if not peak or built.dtype != "bfloat16":
        return None
    flops = flops_per_token(built.config.model, built.config.batch.sequence_length)
    return tokens_per_second * flops / (peak * built.mesh.size)

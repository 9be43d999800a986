"""The log of a run's steps: their time, the lines of metrics.jsonl, the progress bar, and reports to the user."""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from configs.schema import options
from data.dataset import Text
from data.loader import StepBatches
from hosts.clock import running_seconds
from hosts.distributed import on_every_process
from hosts.machines import peak_flops
from hosts.watchdog import Watchdog, end_as_hung, time_limit
from model.gpt import flops_per_token, parameter_shapes
from run.ending import COMMAND_SECONDS, tell
from run.metrics import MetricsWriter, Wandb
from run.record import Times, read_metrics
from run.start import ResumePoint
from system.errors import TrainingAborted
from system.messages import LOGGER
from training.build import Build
from training.step import Metrics

MOST_SKIPPED = 10  # consecutive skipped steps that end the run
WINDOW = 64  # losses kept to compare a loss with
ENOUGH = 16  # fewest losses to compare a loss with
SPIKE = 1.5  # times their median that a loss must exceed to be reported


class Clock:
    """Seconds of training over all of a run's starts, without compilation, evaluation and sampling, and without the
    time in which the system stopped the process."""

    def __init__(self, seconds: float, tokens: int):
        """Take the seconds and tokens of the starts before."""
        self.before, self.origin = seconds, running_seconds()
        self.last = (seconds, tokens)
        self.stalled = 0.0
        """Seconds since the last reading in which the devices waited for a batch."""
        self.watching = ThreadPoolExecutor(1, "clock")
        self.devices_done: Future[float] | None = None
        """The time at which the devices completed the newest step."""

    @property
    def seconds(self) -> float:
        """Return the seconds so far."""
        return self.before + running_seconds() - self.origin

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch. Count the seconds of waiting for it in which the devices were idle."""
        asked = running_seconds()
        batch = next(batches)
        if self.devices_done and self.devices_done.done():
            self.stalled += running_seconds() - max(asked, self.devices_done.result())
        return batch

    def dispatched(self, metrics: Any) -> None:
        """Note the newest step's metrics, which are ready once the devices have completed it."""

        def done_at() -> float:
            jax.block_until_ready(metrics)
            return running_seconds()

        self.devices_done = self.watching.submit(done_at)

    def rates(self, tokens: int) -> tuple[float, float]:
        """Return the tokens per second since the last reading, at which the run had fewer than `tokens` tokens, and the
        share of the time in which the devices waited for a batch."""
        (seconds, before), self.last = self.last, (self.seconds, tokens)
        passed, stalled, self.stalled = self.last[0] - seconds, self.stalled, 0.0
        return (tokens - before) / passed, stalled / passed

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside."""
        start = running_seconds()
        yield
        self.origin += running_seconds() - start

    def close(self) -> None:
        """End the thread, without a wait for the devices."""
        self.watching.shutdown(wait=False, cancel_futures=True)


class MetricsLog:
    """Writes a line for each logged step, and reports skipped steps and spikes of the loss.

    It reads a step's metrics while the devices compute the next step, so they never wait for the host. `flush` logs
    the newest at once. One reading of the metrics serves the file, the bar, the reports and the watchdog. Every process
    must have one, and call its methods together."""

    SCORE, SIGN = "val_bpb", 1
    """The figure of an evaluation that chooses the best checkpoint; 1 if the lowest is best, -1 if the highest is."""

    def __init__(self, built: Build, text: Text, resume_point: ResumePoint, step_batches: StepBatches, times: Times):
        """Drop the lines after `resume_point`. `step_batches` are those that follow it, by number."""
        config = self.config = built.config
        self.built, self.text, self.step_batches, self.times = built, text, step_batches, times
        self.start_step, self.start_tokens = resume_point.step, resume_point.tokens
        self.unread: tuple[int, Metrics] | None = None
        """The newest step, whose metrics the devices may still compute."""
        self.losses = deque(resume_point.losses, WINDOW)
        """Losses of the newest steps that were read."""
        self.skipped, self.skipped_in_a_row = int(resume_point.state.skipped_steps), 0
        self.clock = Clock(resume_point.seconds, resume_point.tokens)
        self.watchdog = Watchdog(config.hang, self._end_as_hung)
        wandb = partial(Wandb, config) if config.log.wandb else None

        def opened() -> tuple[MetricsWriter, list[dict]]:
            writer = MetricsWriter(config.run_dir, resume_point.step, wandb, options(config))
            return writer, [line for line in read_metrics(config.run_dir) if line["step"] <= resume_point.step]

        self.writer, lines = on_every_process("its metrics", opened)
        evaluated = [line for line in lines if line.get(self.SCORE) is not None]
        self.scores = {line["step"]: self.SIGN * line[self.SCORE] for line in evaluated}
        """The score of each evaluated step, by the lines that are on this machine: the lowest is best."""
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
        self.clock.close()
        self.bar.close()
        self.writer.close()

    def tokens(self, step: int) -> int:
        """Return the tokens of the run up to `step`."""
        return self.start_tokens + (step - self.start_step) * self.config.batch.tokens_per_step

    def facts(self, step: int) -> dict[str, Any]:
        """Return the facts of a checkpoint of `step`: those that a later start continues from, and those of the run."""
        config, text = self.config, self.text.fingerprint
        point = {"tokens": self.tokens(step), "seconds": self.clock.seconds, "losses": list(self.losses)}
        return point | {"dataset": text, "config": asdict(config), "shapes": parameter_shapes(config.model)}

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Pause the limit on steps: a save has its own. The clock of training continues: mostly training does, too,
        while a checkpoint is written."""
        with self.watchdog.paused("saving"), self.times.during("saves"):
            yield

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Pause the limit on steps, and the clock of training."""
        with self.clock.paused(), self.watchdog.paused("an evaluation"), self.times.during("evaluation"):
            yield

    def write(self, step: int, facts: dict) -> None:
        """Write a line."""
        self.writer.write({"step": step, "tokens": self.tokens(step), **facts})

    def step(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of a step that the devices have just begun, and log the step before it."""
        self.flush()
        self.unread = (step, metrics)
        self.clock.dispatched(metrics)

    def flush(self) -> None:
        """Wait for the newest step, and log it. Raise TrainingAborted after ten skipped steps in a row."""
        if not self.unread:
            return
        (step, metrics), self.unread = self.unread, None
        values = jax.tree.map(lambda value: np.asarray(value).item(), metrics)
        self.watchdog.finish(step)
        self.bar.update(step - self.bar.n)
        if "diagnostics" in values:
            self.write(step, {"diagnostics": values.pop("diagnostics")})
        if not values["valid_tokens"]:
            values["loss"] = math.nan  # the step has none
        self._count_skipped(step, values)
        self._report_spike(step, values["loss"])
        if step % self.config.log.every_steps == 0 or step == self.config.steps:
            self._log(step, values)
        if self.skipped_in_a_row >= MOST_SKIPPED:
            raise TrainingAborted(f"{MOST_SKIPPED} steps in a row were skipped")

    def _log(self, step: int, values: dict) -> None:
        """Write a step's line, and move the bar."""
        tokens_per_second, data_wait = self.clock.rates(self.tokens(step))
        mfu = mfu_of(self.built, tokens_per_second)
        line = {**values, "epochs": self.text.epochs(self.tokens(step) // self.built.batch_shape[2])}
        line |= {"tokens_per_second": tokens_per_second, "mfu": mfu, "data_wait": data_wait}
        memory = jax.local_devices()[0].memory_stats() or {}  # a CPU has none
        line |= {"peak_memory_bytes": memory.get("peak_bytes_in_use"), "seconds": self.clock.seconds}
        self.write(step, line)
        if self.writer.problem:
            LOGGER.warning(self.writer.problem)
        shown = f"{self.shown(line)}  {tokens_per_second:,.0f} tokens/s" + (f"  MFU {mfu:.1%}" if mfu else "")
        self.bar.set_postfix_str(shown, refresh=False)
        if self.bar.disable:
            LOGGER.info(f"step {step}/{self.config.steps}  {shown}")

    def shown(self, line: dict) -> str:
        """Return the figure of a step's line that a person follows."""
        return f"loss {line['loss']:.4f}"

    def _count_skipped(self, step: int, values: dict) -> None:
        skipped = values["skipped_steps"]
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped > self.skipped else 0
        self.skipped = skipped
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
        rows = self.text.preview_batch(self.step_batches.row_numbers(step - 1 - self.start_step))
        spike = f"step {step}: the loss jumped to {loss:.4f} from a median of {usual:.4f}"
        LOGGER.warning(f"{spike}; its rows: python -m tools.dataset {self.config.run_dir} --step={step}")
        self.write(step, {"spike": {"loss": loss, "median": usual, **rows}})
        tell(self.config, "spike", spike, step)

    def evaluation(self, step: int, results: dict) -> None:
        """Write the results of an evaluation on held-out text."""
        self.write(step, results)
        self.scores[step] = self.SIGN * results[self.SCORE]
        error = f" +- {error:.4f}" if (error := results.get("val_bpb_stderr")) else ""
        loss, bits = results["val_loss"], results["val_bpb"]
        of = ", ".join(f"{name} {part:.4f}" for name, part in results.get("val_bpb_of", {}).items() if part is not None)
        LOGGER.info(f"step {step}: validation loss {loss:.4f}, {bits:.4f}{error} bits per byte{f' ({of})' * bool(of)}")
        for name in {"core", "chatcore"} & results.keys():
            interval = results[f"{name}_interval"]
            LOGGER.info(f"step {step}: {name} {results[name]:.4f} ({interval['low']:.4f} to {interval['high']:.4f})")

    def _end_as_hung(self, reason: str) -> None:
        """End this process, from the watchdog's thread."""
        with time_limit(2 * COMMAND_SECONDS, reason):  # the run's disk may hang, too
            tell(self.config, "failure", f"a hang: {reason}", self.watchdog.dispatched)
        end_as_hung(reason)


def mfu_of(built: Build, tokens_per_second: float) -> float | None:
    """Return the share of the devices' peak FLOP/s, which are known for bfloat16; None for other types and devices."""
    peak = peak_flops(built.mesh.devices.flat[0].device_kind)
    if not peak or built.dtype != "bfloat16":
        return None
    flops = flops_per_token(built.config.model, built.config.batch.sequence_length)
    return tokens_per_second * flops / (peak * built.mesh.size)

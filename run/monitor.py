"""The metrics of steps: read when they are done, judged, and written."""

import json
import math
import platform
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from configs.ramp import Ramp
from configs.schema import Config
from run.diagnosis import Diagnosis
from run.lines import read_metrics
from run.metrics import Clock, MetricsWriter
from run.notify import tell
from run.peers import exchange
from training.step import Metrics

WINDOW, ENOUGH = 64, 16  # steps that a loss is compared with: at most, and at least


class Monitor:
    """Reads the metrics of steps that are done, judges them, and writes the logged steps' lines."""

    def __init__(
        self,
        config: Config,
        writer: MetricsWriter,
        clock: Clock,
        *,
        flops_share: float | None,
        tokens_after: Callable[[int], int],
        epochs_after: Callable[[int], dict[str, float]],
        rows_of: Callable[[int], dict],
        say: Callable[[str], Any],
        losses: list[float],
        step: int,
        skipped: int,
    ):
        """`flops_share`: MFU of one token a second. `tokens_after(step)`: tokens of the run up to a step.
        `epochs_after(step)`: how often each source of text was gone through up to it. `rows_of(step)`: which batch,
        rows and texts a step saw. `losses` and `skipped` are of the steps up to `step`, after which the run goes
        on."""
        self.config, self.writer, self.clock, self.say = config, writer, clock, say
        self.flops_share, self.tokens_after, self.rows_of = flops_share, tokens_after, rows_of
        self.epochs_after = epochs_after
        self.losses = deque(losses, WINDOW)
        """Of the newest steps: what a loss is compared with."""
        self.skipped, self.skipped_in_a_row = skipped, 0
        self.spike: dict | None = None
        """The first step whose loss jumped, until somebody has dealt with it: `step`, and `spike` with the loss, the
        median, and which batch and rows it saw."""
        lines = read_metrics(config.run_dir) if config.diagnostics.every_steps else []
        self.diagnosis = Diagnosis((line for line in lines if line["step"] <= step), config.optimizer)
        self.unread: list[tuple[int, Metrics]] = []
        hidden = None if jax.process_index() == 0 else True  # None: where the output is no terminal
        # By tokens where steps differ in size, so that the time left is right.
        ramp = Ramp.of(config.batch)
        self.work, unit = (ramp.tokens, "token") if config.batch.ramp else (lambda step: step, "step")
        self.bar = tqdm(
            total=self.work(config.steps),
            initial=self.work(step),
            unit=unit,
            unit_scale=unit == "token",
            disable=hidden,
            dynamic_ncols=True,
        )

    def add(self, step: int, metrics: Metrics) -> None:
        """The metrics of a step that may not be done yet: nothing waits for them here."""
        self.unread.append((step, metrics))

    def read(self) -> None:
        """Waits for the newest step, and says what went wrong since this was last called."""
        for step, metrics in self.unread:
            with self.clock.waiting():
                self.step, self.values = step, jax.tree.map(lambda value: np.asarray(value).item(), metrics)
            self._count_skipped()
            self._compare_loss()
            if "diagnostics" in self.values:
                measured = self.diagnosis.line(self.values.pop("diagnostics"), step, self.values["valid_tokens"])
                self.writer.write({"step": step, "tokens": self.tokens_after(step), "diagnostics": measured})
        self.unread.clear()

    def write(self) -> None:
        """Reads, and writes the newest step's line. Every process must call it."""
        self.read()
        tokens = self.tokens_after(self.step)
        tokens_per_second, data_wait, own_seconds = self.clock.rates(tokens)
        mfu = tokens_per_second * self.flops_share if self.flops_share else None
        line = {"step": self.step, "tokens": tokens, **self.values, "epochs": self.epochs_after(self.step)}
        line |= {"tokens_per_second": tokens_per_second, "mfu": mfu, "data_wait": data_wait}
        memory = jax.local_devices()[0].memory_stats() or {}  # a CPU has none
        line["peak_memory_bytes"] = memory.get("peak_bytes_in_use")
        ours = {"data_wait": data_wait, "own_seconds": own_seconds, "peak_memory_bytes": line["peak_memory_bytes"]}
        line |= of_all_hosts(ours)
        self.writer.write(line | {"seconds": self.clock.seconds})
        if self.writer.problem:
            self.say(self.writer.problem)
        shown = f"loss {line['loss']:.4f}  {tokens_per_second:,.0f} tokens/s" + (f"  MFU {mfu:.1%}" if mfu else "")
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update(self.work(self.step) - self.bar.n)
        if self.bar.disable:
            self.say(f"step {self.step}/{self.config.steps}  {shown}")

    def _count_skipped(self) -> None:
        skipped = self.values["skipped_steps"]
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped > self.skipped else 0
        self.skipped = skipped
        if self.skipped_in_a_row:
            bad = [group for group, norm in self.values["grad_norms"].items() if not math.isfinite(norm)]
            why = f"the gradient of {', '.join(bad)} is not finite" if bad else "it has no valid token"
            self.say(f"step {self.step} changed nothing: {why}; {skipped} step(s) skipped so far")

    def _compare_loss(self) -> None:
        loss, factor = self.values["loss"], self.config.stability.spike_factor
        usual = median(self.losses) if len(self.losses) >= ENOUGH else math.inf
        if factor and loss > factor * usual:
            spike = {"step": self.step, "spike": {"loss": loss, "median": usual, **self.rows_of(self.step)}}
            jumped = f"step {self.step}: the loss jumped to {loss:.4f} from a median of {usual:.4f}"
            self.say(f"{jumped}; what it saw: python -m data.inspect {self.config.run_dir} --step={self.step - 1}")
            self.writer.write(spike)
            tell(self.config, "spike", jumped, self.step)
            self.spike = self.spike or spike
        if math.isfinite(loss):
            self.losses.append(loss)


def of_all_hosts(ours: dict[str, float | None]) -> dict[str, dict]:
    """Of each measurement that the processes have, under `hosts`: the smallest and the largest, and whose they are.
    Of one process nothing. Every process must call it."""
    if jax.process_count() == 1:
        return {}
    answers = exchange("its measurements", json.dumps([f"{jax.process_index()} ({platform.node()})", ours]))
    theirs = dict(map(json.loads, answers))
    found = {}
    for name in (name for name, value in ours.items() if value is not None):
        order = sorted(theirs, key=lambda host: theirs[host][name])
        least, most = order[0], order[-1]
        found[name] = {"min": theirs[least][name], "min_host": least, "max": theirs[most][name], "max_host": most}
    return {"hosts": found}

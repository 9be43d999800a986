"""The hooks that write metrics.jsonl: the lines of logged steps, and changes of options."""

import json
import platform
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from configs.messages import LOGGER
from configs.schema import options
from hosts.distributed import exchange
from hosts.machines import peak_flops
from model.gpt import flops_per_token
from run.diagnosis import Diagnosis
from run.hooks.watch import Watch
from run.metrics import MetricsWriter
from run.notify import Wandb
from run.progress import Due, Hook, Progress
from run.record import read_metrics
from training.build import Build
from training.step import Metrics


class ReadStep(NamedTuple):
    """A step that the devices completed, and its metrics as numbers."""

    step: int
    values: dict


class Log(Hook):
    """Writes a line for each logged step. It reads a step's metrics while the next step runs, so the devices never wait
    for the host. It reads them at once only if a checkpoint or an evaluation of the same step follows.
    Eleven attributes: one reading of the metrics serves the file and the bar."""

    def __init__(self, built: Build, watch: Watch, epochs: Callable[[int], dict[str, float]]):
        """Take `epochs(tokens)`, which counts the epochs of each source in the first tokens."""
        self.config, self.watch, self.epochs = built.config, watch, epochs
        peak = peak_flops(built.mesh.devices.flat[0].device_kind)
        flops = flops_per_token(self.config.model, self.config.batch.sequence_length)
        self.flops_share = flops / (peak * built.mesh.size) if peak else None
        """MFU at one token per second."""
        self.just_read: list[ReadStep] = []
        """Steps whose metrics the last call read, in order."""
        self.unread: list[tuple[int, Metrics]] = []
        self.is_pending = False

    def begin(self, run: Progress) -> None:
        wandb = partial(Wandb, self.config) if self.config.log.wandb else None
        self.writer = MetricsWriter(self.config.run_dir, run.step, wandb, options(self.config))
        lines = read_metrics(self.config.run_dir) if self.config.diagnostics.every_steps else []
        self.diagnosis = Diagnosis((line for line in lines if line["step"] <= run.step), self.config.optimizer)
        self.unread = [(step, metrics) for step, metrics in self.unread if step <= run.step]  # not what is done again
        self.is_pending = self.is_pending and self.unread != []
        self.bar = tqdm(
            total=self.config.steps,
            initial=run.step,
            unit="step",
            disable=None if jax.process_index() == 0 else True,  # None: if the output is no terminal
            dynamic_ncols=True,
        )
        run.clock.start()

    def after_step(self, run: Progress, metrics: Metrics, due: Due) -> None:
        self.just_read = []
        if self.is_pending:
            self._write(run)
        self.unread.append((run.step, metrics))
        self.is_pending = due.log
        first = not self.watch.watchdog.step_seconds  # the watchdog's limit follows from the first step's time
        if due.log and (due.evaluate or due.save or due.tasks or first):
            self._write(run)  # a checkpoint's metrics are on record before it
        elif due.save or first:
            self._read(run)

    def _read(self, run: Progress) -> None:
        """Wait for the newest step."""
        for step, metrics in self.unread:
            with run.clock.waiting():
                values = jax.tree.map(lambda value: np.asarray(value).item(), metrics)
            self.just_read.append(ReadStep(step, values))
            if "diagnostics" in values:
                measured = self.diagnosis.line(values.pop("diagnostics"), values["valid_tokens"])
                self.writer.write({"step": step, "tokens": run.tokens_after(step), "diagnostics": measured})
        self.unread.clear()
        # Once: steps completed before they are read would seem to take no time, and the first of them all of it.
        self.watch.watchdog.finish(self.just_read[-1].step)

    def _write(self, run: Progress) -> None:
        """Write the line of the newest step."""
        self._read(run)
        self.is_pending = False
        step, values = self.just_read[-1]
        tokens = run.tokens_after(step)
        tokens_per_second, data_wait, own_seconds = run.clock.rates(tokens)
        mfu = tokens_per_second * self.flops_share if self.flops_share else None
        line = {"step": step, "tokens": tokens, **values, "epochs": self.epochs(tokens)}
        line |= {"tokens_per_second": tokens_per_second, "mfu": mfu, "data_wait": data_wait}
        memory = jax.local_devices()[0].memory_stats() or {}  # a CPU has none
        line["peak_memory_bytes"] = memory.get("peak_bytes_in_use")
        ours = {"data_wait": data_wait, "own_seconds": own_seconds, "peak_memory_bytes": line["peak_memory_bytes"]}
        line |= of_all_hosts(ours)
        self.writer.write(line | {"seconds": run.clock.seconds})
        if self.writer.problem:
            LOGGER.warning(self.writer.problem)
        shown = f"loss {line['loss']:.4f}  {tokens_per_second:,.0f} tokens/s" + (f"  MFU {mfu:.1%}" if mfu else "")
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update(step - self.bar.n)
        if self.bar.disable:
            LOGGER.info(f"step {step}/{self.config.steps}  {shown}")

    def close(self) -> None:
        self.bar.close()
        self.writer.close()


def of_all_hosts(ours: dict[str, float | None]) -> dict[str, dict]:
    """Return, under `hosts`, the minimum and maximum of each measurement over processes, and their processes. Return
    nothing for one process. Every process must call it."""
    if jax.process_count() == 1:
        return {}
    answers = exchange("its measurements", json.dumps([f"{jax.process_index()} ({platform.node()})", ours]))
    theirs = dict(map(json.loads, answers))
    spread = {}
    for name in (name for name, value in ours.items() if value is not None):
        order = sorted(theirs, key=lambda host: theirs[host][name])
        least, most = order[0], order[-1]
        spread[name] = {"min": theirs[least][name], "min_host": least, "max": theirs[most][name], "max_host": most}
    return {"hosts": spread}


class History(Hook):
    """Writes the changes of options."""

    def __init__(self, log: Log, changes: list[str]):
        """Take `changes`: the options that changed; empty after the first `begin`."""
        self.log, self.changes = log, changes

    def begin(self, run: Progress) -> None:
        if self.changes:
            self.log.writer.write({"step": run.step, "changes": self.changes.copy()})
            self.changes.clear()

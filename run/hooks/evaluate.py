"""The hooks that evaluate the network, and warn when it learns its text by heart."""

from collections.abc import Callable, Sequence
from statistics import mean

import jax

from configs.messages import LOGGER
from configs.schema import Config
from hosts.distributed import on_first_process
from run.hooks.log import Log
from run.notify import tell
from run.progress import Due, Hook, Progress, due_after
from run.record import read_metrics
from run.saver import Saver
from training.step import Metrics

IN_A_ROW = 3  # one or two worse evaluations are common while the rate is high


class Evaluate(Hook):
    """Evaluates and samples the network when that is due and not recorded yet. A run that is asked to stop skips it,
    since the machine may be gone in seconds. The next start does it instead."""

    def __init__(
        self,
        config: Config,
        measure: Callable[[dict], dict],
        measure_tasks: Callable[[dict], dict],
        checkpoints: Saver,
        log: Log,
    ):
        """Take `measure(params)`, which returns the results on held-out text with samples, and
        `measure_tasks(params)`, which returns those of `eval.tasks`."""
        self.config, self.measure, self.measure_tasks = config, measure, measure_tasks
        self.checkpoints, self.log = checkpoints, log

    def begin(self, run: Progress) -> None:
        self._evaluate(run, due_after(run.step, self.config, last=False))

    def after_step(self, run: Progress, metrics: Metrics, due: Due) -> None:
        if not run.stopping:
            self._evaluate(run, due)

    def _evaluate(self, run: Progress, due: Due) -> None:
        if not due.evaluate and not due.tasks:
            return
        lines = lambda: [line for line in read_metrics(self.config.run_dir) if line["step"] == run.step]
        on_record = on_first_process(lambda: [name for line in lines() for name in line])
        if due.evaluate and "val_loss" not in on_record:
            results = self._measured(run, self.measure)
            loss, bits = results["val_loss"], results["val_bpb"]
            self.checkpoints.score(run.step, bits)
            error = f" +- {error:.4f}" if (error := results.get("val_bpb_stderr")) else ""
            LOGGER.info(f"step {run.step}: validation loss {loss:.4f}, {bits:.4f}{error} bits per byte")
        if run.step > 0 and due.tasks and "core" not in on_record:
            results = self._measured(run, self.measure_tasks)
            LOGGER.info(f"step {run.step}: CORE {results['core']:.4f} +- {results['core_stderr']:.4f}")

    def _measured(self, run: Progress, measure: Callable[[dict], dict]) -> dict:
        """Return the results of `measure`, and record them. Its time does not count as training."""
        jax.block_until_ready(run.state)
        with run.clock.paused(), self.log.watch.away("an evaluation", "evaluation"):
            results = measure(run.state.params)
        self.log.writer.write({"step": run.step, "tokens": run.tokens_after(run.step), **results})
        return results


class Overfitting(Hook):
    """Warns once in a run, after an evaluation, when the run learns its text by heart."""

    def __init__(self, config: Config, log: Log):
        self.config, self.log = config, log

    def after_step(self, run: Progress, metrics: Metrics, due: Due) -> None:
        lines = read_metrics(self.config.run_dir) if due.evaluate else []
        if any("overfitting" in line for line in lines) or not (best := minimum_passed(lines)):
            return
        message = (
            f"step {run.step}: the run learns its text by heart: the training loss falls, but the last {IN_A_ROW} "
            f"evaluations are worse than step {best['step']}'s {best['val_bpb']:.4f} bits per byte; take fewer steps, "
            f"--model.dropout or more weight decay; the best checkpoint is kept if each evaluated step is saved "
            f"(--checkpoint.every_steps={self.config.eval.every_steps})"
        )
        LOGGER.warning(message)
        self.log.writer.write({"step": run.step, "overfitting": {name: best[name] for name in ("step", "val_bpb")}})
        tell(self.config, "overfitting", message, run.step)


def minimum_passed(lines: Sequence[dict]) -> dict | None:
    """Return a run's best evaluation, of its metrics' `lines`, if it overfits since then; None otherwise.

    It does if the text repeats, the last `IN_A_ROW` evaluations exceed the best by more than its standard error, and
    the training loss before the last one is lower than before the best. Evaluations share their rows, so their
    difference varies less than the standard error. Before the text repeats, only a change in the text lets the two
    losses part.
    """
    results = [line for line in lines if line.get("val_bpb") is not None]
    steps = [line for line in lines if line.get("loss") is not None and "epochs" in line]
    if not results or not steps or max(steps[-1]["epochs"].values()) <= 1:
        return None
    at = min(range(len(results)), key=lambda i: results[i]["val_bpb"])
    best, later = results[at], results[at + 1 :][-IN_A_ROW:]
    bound = best["val_bpb"] + (best["val_bpb_stderr"] or 0)

    def before(i: int) -> list[float]:
        """Return the logged losses between an evaluation and the one before it."""
        return [step["loss"] for step in steps if results[i - 1]["step"] < step["step"] <= results[i]["step"]]

    worse = len(later) == IN_A_ROW and all(result["val_bpb"] > bound for result in later)
    return best if worse and at and before(at) and before(-1) and mean(before(-1)) < mean(before(at)) else None

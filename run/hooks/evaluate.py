"""The hook that evaluates the network."""

from collections.abc import Callable

import jax

from configs.messages import LOGGER
from configs.schema import Config
from hosts.runtime import on_first_process
from run.checkpoint import Checkpoints
from run.hooks.hook import Hook
from run.hooks.log import Log
from run.lines import of_average, read_metrics
from run.progress import Due, Progress, due_after
from training.state import begun_average
from training.step import Metrics


class Evaluate(Hook):
    """Evaluates and samples the network when that is due and not recorded yet. A run that is asked to stop skips it,
    since the machine may be gone in seconds. The next start does it instead."""

    def __init__(
        self,
        config: Config,
        measure: Callable[[dict, dict | None], dict],
        measure_tasks: Callable[[dict], dict],
        checkpoints: Checkpoints,
        log: Log,
    ):
        """Take `measure(params, average)`, which returns the results on held-out text with samples, and
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
            average = begun_average(run.state, self.config, run.step)
            results = self._measured(run, lambda params: self.measure(params, average))
            loss, bits = results["val_loss"], results["val_bpb"]
            self.checkpoints.score(run.step, bits)
            error = f" +- {error:.4f}" if (error := results.get("val_bpb_stderr")) else ""
            LOGGER.info(
                f"step {run.step}: validation loss {loss:.4f}, {bits:.4f}{error} bits per byte{of_average(results)}"
            )
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

"""The hook that warns when a run learns its text by heart."""

from collections.abc import Sequence
from statistics import mean

from configs.messages import LOGGER
from configs.schema import Config
from run.hooks.hook import Hook
from run.hooks.log import Log
from run.lines import read_metrics
from run.notify import tell
from run.progress import Due, Progress
from training.step import Metrics

IN_A_ROW = 3  # one or two worse evaluations are common while the rate is high


class Overfitting(Hook):
    """Warns once in a run, after an evaluation."""

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

"""The hook that puts changes of options and rollbacks into the run's metrics."""

from run.events import Events, rollbacks_to
from run.hooks.hook import Hook
from run.hooks.log import Log
from run.lines import read_metrics
from run.progress import Progress


class History(Hook):
    """Writes each change and each rollback exactly once, even after kills."""

    def __init__(self, log: Log, changes: list[str]):
        """Take `changes`: the options that changed; empty after the first `begin`."""
        self.log, self.changes = log, changes

    def begin(self, run: Progress) -> None:
        step, writer, run_dir = run.step, self.log.writer, run.config.run_dir
        if self.changes:
            writer.write({"step": step, "changes": self.changes.copy()})
            self.changes.clear()
        written = sum("rollback" in line and line["step"] == step for line in read_metrics(run_dir))
        for event in rollbacks_to(Events(run_dir).read(), step)[written:]:
            facts = {name: value for name, value in event.items() if name not in ("event", "step", "time")}
            writer.write({"step": step, "rollback": facts})

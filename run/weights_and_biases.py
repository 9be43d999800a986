"""A run's numbers in Weights & Biases, with --log.wandb. Training never waits for it, and its failure does not stop
training."""

import queue
import sys
import threading
import time
from contextlib import suppress

from configs.retry import first_line
from configs.schema import Config, options
from run.events import Events

WAITING = 10_000  # most lines that wait while it cannot be reached; further ones are dropped
LAST = 30  # seconds that the end of a run waits for unsent lines


class Wandb:
    """Sends lines of metrics.jsonl in a thread. An error is reported once, and ends the thread."""

    def __init__(self, config: Config):
        self.config = config
        self.lines: queue.Queue[dict | None] = queue.Queue(WAITING)
        self.thread = threading.Thread(target=self._send, daemon=True)
        self.thread.start()

    def show(self, line: dict) -> None:
        """Return the numbers of a line; texts stay in the run's folder."""
        with suppress(queue.Full):
            self.lines.put_nowait({name: value for name, value in line.items() if not isinstance(value, list)})

    def close(self) -> None:
        """Send the waiting lines, for at most LAST seconds."""
        with suppress(queue.Full):
            self.lines.put_nowait(None)
        self.thread.join(LAST)

    def _send(self) -> None:
        config = self.config
        try:
            import wandb  # pyright: ignore[reportMissingImports]

            entity, _, project = config.log.wandb.rpartition("/")
            # One run there for all starts of this one, on any machine: events.jsonl is stored with checkpoints.
            first = next((event["time"] for event in Events(config.run_dir).read()), time.time())
            run = wandb.init(
                project=project,
                entity=entity or None,
                name=config.name,
                id=f"{int(1000 * first):x}",
                resume="allow",
                dir=config.run_dir,
                config=options(config),
                settings=wandb.Settings(console="off", silent=True, login_timeout=LAST),
            )
            run.define_metric("*", step_metric="step")  # steps repeated after a kill may come again
            while line := self.lines.get():
                run.log(line)
            run.finish()
        except (Exception, SystemExit) as error:
            print(f"--log.wandb: {first_line(error)}; the run continues without it", file=sys.stderr)

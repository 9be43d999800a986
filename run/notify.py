"""Send events of a run to a command of the user's (--log.on_event), and its numbers to Weights & Biases (--log.wandb).

Training never waits for either, and neither's failure stops training.
"""

import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import jax

from configs.messages import start_hook
from configs.retry import first_line
from configs.schema import Config, UserError, options
from hosts.runtime import TrainingAborted
from run.record import Events, local_path, storage_path, upload

COMMAND_SECONDS = 10  # seconds to wait for the command: a container or job kills it when the run ends
WAITING = 10_000  # most lines that wait while Weights & Biases cannot be reached; further ones are dropped
WANDB_SECONDS = 30  # seconds that the end of a run waits for unsent lines


def tell(config: Config, event: Literal["spike", "failure", "end"], message: str, step: int | None = None) -> None:
    """Start the command on the first process. Its output goes to the run's on_event.log. Only the end of a process
    waits for it, for some seconds. A failure is reported and changes nothing."""
    if jax.process_index() == 0:
        wait = COMMAND_SECONDS if event in ("failure", "end") else 0
        start_hook(config, event, message, step, log=local_path(config.run_dir) / "on_event.log", wait=wait)


@contextmanager
def notify_of_failure(config: Config) -> Iterator[None]:
    """Notify of an exception inside, unless somebody asked for the end. Keep its traceback in the run's folder, except
    for a user's mistake and for an aborted training."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, UserError | TrainingAborted):
            with suppress(Exception):  # the disk or the store may have failed
                name = f"traceback-{jax.process_index()}.txt"
                (storage_path(config.run_dir) / name).write_text(traceback.format_exc())
        tell(config, "failure", f"{type(error).__name__}: {first_line(error)}")
        if jax.process_index() == 0 and not isinstance(error, UserError):
            with suppress(Exception):
                upload(config.run_dir)
        raise


class Wandb:
    """Sends lines of metrics.jsonl in a thread. An error is reported once, and ends the thread."""

    def __init__(self, config: Config):
        self.config = config
        self.lines: queue.Queue[dict | None] = queue.Queue(WAITING)
        self.thread = threading.Thread(target=self._send, daemon=True)
        self.thread.start()

    def show(self, line: dict) -> None:
        """Queue the numbers of a line; texts stay in the run's folder."""
        with suppress(queue.Full):
            self.lines.put_nowait({name: value for name, value in line.items() if not isinstance(value, list)})

    def close(self) -> None:
        """Send the waiting lines, for at most WANDB_SECONDS seconds."""
        with suppress(queue.Full):
            self.lines.put_nowait(None)
        self.thread.join(WANDB_SECONDS)

    def _send(self) -> None:
        config = self.config
        try:
            import wandb  # pyright: ignore[reportMissingImports]

            entity, _, project = config.log.wandb.rpartition("/")
            # One run there for all starts of this one, on any machine.
            first = next((event["time"] for event in Events(config.run_dir).read()), time.time())
            run = wandb.init(
                project=project,
                entity=entity or None,
                name=config.name,
                id=f"{int(1000 * first):x}",
                resume="allow",
                dir=local_path(config.run_dir),
                config=options(config),
                settings=wandb.Settings(console="off", silent=True, login_timeout=WANDB_SECONDS),
            )
            run.define_metric("*", step_metric="step")  # steps repeated after a kill may come again
            while line := self.lines.get():
                run.log(line)
            run.finish()
        except (Exception, SystemExit) as error:
            print(f"--log.wandb: {first_line(error)}; the run continues without it", file=sys.stderr)

"""Notifications of a run's events through a command of the user's: --log.on_event=COMMAND."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import jax

from configs.messages import start_hook
from configs.retry import first_line
from configs.schema import Config, UserError
from run.record import Record, place

LAST = 10  # seconds to wait for the command: a container or job kills it when the run ends


def tell(
    config: Config,
    event: Literal["spike", "rollback", "overfitting", "failure", "end"],
    message: str,
    step: int | None = None,
) -> None:
    """Start the command on the first process. Its output goes to the run's on_event.log. Only the end of a process
    waits for it, for some seconds. A failure is reported and changes nothing."""
    if jax.process_index() == 0:
        wait = LAST if event in ("failure", "end") else 0
        start_hook(config, event, message, step, log=Path(config.run_dir) / "on_event.log", wait=wait)


@contextmanager
def tell_of_failure(config: Config, record: Record) -> Iterator[None]:
    """Notify of an exception inside, unless somebody asked for the end. Keep its traceback with the record, except for
    a user's mistake."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, UserError):
            with suppress(Exception):  # the disk or the store may have failed
                name = f"traceback-{jax.process_index()}.txt"
                (place(record.elsewhere or record.run_dir) / name).write_text(traceback.format_exc())
                if jax.process_index() == 0:
                    record.copy()
        tell(config, "failure", f"{type(error).__name__}: {first_line(error)}")
        raise

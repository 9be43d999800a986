"""A command of the user's that is notified of what happens to a run: --log.on_event=COMMAND."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import jax

from configs.hook import start_hook
from configs.retry import first_line
from configs.schema import Config, UserError
from run.record import Record, place

LAST = 10  # seconds that a process waits for the command at its end, which would kill the command in a container or job


def tell(
    config: Config, event: Literal["spike", "rollback", "failure", "end"], message: str, step: int | None = None
) -> None:
    """Start the command on the first process. What it prints goes to the run's on_event.log. Nothing waits for it, but
    for the last seconds of a process, and whatever goes wrong is said and changes nothing."""
    if jax.process_index() == 0:
        wait = LAST if event in ("failure", "end") else 0
        start_hook(config, event, message, step, log=Path(config.run_dir) / "on_event.log", wait=wait)


@contextmanager
def tell_of_failure(config: Config, record: Record) -> Iterator[None]:
    """Notify of an exception that ends what is inside, but for one by which somebody asked for the end. Its
    traceback is kept with the record, but for a user's mistake."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, UserError):
            with suppress(Exception):  # the disk or the store may be what failed
                name = f"traceback-{jax.process_index()}.txt"
                (place(record.elsewhere or record.run_dir) / name).write_text(traceback.format_exc())
                if jax.process_index() == 0:
                    record.copy()
        tell(config, "failure", f"{type(error).__name__}: {first_line(error)}")
        raise

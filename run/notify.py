"""A command of the user's that is told what happens to a run: --log.on_event=COMMAND."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import jax

from configs.hook import start_hook
from configs.schema import Config
from run.runtime import first_line

LAST = 10  # seconds that a process waits for the command at its end, which would kill the command in a container or job


def tell(
    config: Config, event: Literal["spike", "rollback", "failure", "end"], message: str, step: int | None = None
) -> None:
    """Starts the command on the first process. What it prints goes to the run's on_event.log. Nothing waits for it, but
    for the last seconds of a process, and whatever goes wrong is said and changes nothing."""
    if jax.process_index() == 0:
        wait = LAST if event in ("failure", "end") else 0
        start_hook(config, event, message, step, log=Path(config.run_dir) / "on_event.log", wait=wait)


@contextmanager
def tell_of_failure(config: Config) -> Iterator[None]:
    """An exception that ends what is inside is a failure, but for one by which somebody asked for the end."""
    try:
        yield
    except Exception as error:
        tell(config, "failure", f"{type(error).__name__}: {first_line(error)}")
        raise

"""A command of the user's that is told what happens to a run: --log.on_event=COMMAND."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import jax

from configs.schema import Config
from run.runtime import first_line

LAST = 10  # seconds that a process waits for the command at its end, which would kill the command in a container or job


def tell(
    config: Config, event: Literal["spike", "rollback", "failure", "end"], message: str, step: int | None = None
) -> None:
    """Starts the command on the first process, with TOKENSUM_EVENT, TOKENSUM_MESSAGE, TOKENSUM_STEP, TOKENSUM_RUN and
    TOKENSUM_RUN_DIR in its environment. What it prints goes to the run's on_event.log. Nothing waits for it, but for
    the last seconds of a process, and whatever goes wrong is said and changes nothing."""
    if not config.log.on_event or jax.process_index() > 0:
        return
    facts = {"EVENT": event, "MESSAGE": message, "STEP": "" if step is None else str(step)}
    facts |= {"RUN": config.name, "RUN_DIR": os.path.abspath(config.run_dir)}
    environment = os.environ | {f"TOKENSUM_{name}": value.replace("\0", "") for name, value in facts.items()}
    try:
        with (Path(config.run_dir) / "on_event.log").open("ab") as log:
            started = subprocess.Popen(
                config.log.on_event,
                shell=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C that ends the run is not for it
            )
    except (OSError, ValueError) as error:
        print(f"--log.on_event was not started: {first_line(error)}", file=sys.stderr)
        return
    threading.Thread(target=started.wait, daemon=True).start()  # or it would stay in the system's table
    if event in ("failure", "end"):
        with suppress(subprocess.TimeoutExpired):
            started.wait(LAST)


@contextmanager
def tell_of_failure(config: Config) -> Iterator[None]:
    """An exception that ends what is inside is a failure, but for one by which somebody asked for the end."""
    try:
        yield
    except Exception as error:
        tell(config, "failure", f"{type(error).__name__}: {first_line(error)}")
        raise

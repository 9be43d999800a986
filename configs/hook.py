"""The user's command that events of a run start: --log.on_event=COMMAND."""

import os
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

from configs.schema import Config


def start_hook(
    config: Config,
    event: str,
    message: str,
    step: int | None = None,
    name: str = "",
    log: Path | None = None,
    wait: float = 0,
) -> None:
    """Start the command with TOKENSUM_EVENT, TOKENSUM_MESSAGE, TOKENSUM_STEP, TOKENSUM_RUN (`name`, else the config's)
    and TOKENSUM_RUN_DIR in its environment. Wait for it, `wait` seconds at most. Append its output to `log`, or print
    it. A failure is printed and changes nothing."""
    if not config.log.on_event:
        return
    facts = {"EVENT": event, "MESSAGE": message, "STEP": "" if step is None else str(step)}
    facts |= {"RUN": name or config.name, "RUN_DIR": os.path.abspath(config.run_dir)}
    environment = os.environ | {f"TOKENSUM_{key}": value.replace("\0", "") for key, value in facts.items()}
    try:
        with log.open("ab") if log else nullcontext() as file:
            started = subprocess.Popen(
                config.log.on_event,
                shell=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # a Ctrl-C that ends the run must not reach it
            )
    except (OSError, ValueError) as error:
        print(f"--log.on_event was not started: {error}", file=sys.stderr)
        return
    threading.Thread(target=started.wait, daemon=True).start()  # otherwise it would stay as a zombie
    with suppress(subprocess.TimeoutExpired):
        started.wait(wait)

"""The lock of a run's folder."""

import errno
import fcntl
import os
import platform
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random

from configs.messages import LOGGER
from configs.schema import UserError

MADE = ("lock", "config.json")  # files that a refused start makes in a run's folder
LEASE = 120  # seconds to wait for the lock of a machine that may be gone: NFS servers keep it for 90


class RunLock:
    """The lock of the process that writes to a run's folder. The system releases it when the process ends, however."""

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir) / "lock"
        self.file: IO | None = None
        self.claimed = False
        """True if the folder has no step, and so nothing worth keeping."""

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.file:
            return
        with suppress(OSError):
            if kind and issubclass(kind, UserError):
                self._leave_nothing()
        self.file.close()

    def _leave_nothing(self) -> None:
        """Delete the files of a refused start, unless the folder contains others."""
        folder, made = self.path.parent, (*MADE, "events.jsonl") if self.claimed else MADE[:1]
        if {path.name for path in folder.iterdir()} <= {*made, "checkpoints"}:
            if (folder / "checkpoints").exists():
                (folder / "checkpoints").rmdir()  # OSError unless it is empty
            for name in made:
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()

    def take(self) -> None:
        """Take the lock, if this process does not have it. Raise UserError if another process has it."""
        if self.file:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+")
        waits = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, BlockingIOError) and self._is_of_another(file)),
            stop=stop_after_delay(LEASE),
            wait=wait_random(1, 3),
            before_sleep=lambda state: self._say_waiting(file) if state.attempt_number == 1 else None,
            reraise=True,
        )
        holder = ""
        try:
            waits(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._holder(file)[0] or "which has just begun"
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            LOGGER.warning(
                f"{self.path.parent} is on a disk without locks: nothing keeps a second process from writing to it"
            )
        if holder:
            raise UserError(
                f"{self.path.parent} is being written to by another process ({holder}); wait for it, or end it, "
                "or choose another --run_dir"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n{_boot()}")
        file.flush()
        self.file = file

    def _holder(self, file: IO) -> list[str]:
        """Return the writer of the file: a line for people, and the machine's boot."""
        file.seek(0)
        return [*file.read().splitlines(), "", ""][:2]

    def _is_of_another(self, file: IO) -> bool:
        """Return whether a process of another machine has the lock. It may be gone: an NFS server keeps its lock for a
        while. A process of this machine is alive."""
        return self._holder(file)[1] not in ("", _boot())

    def _say_waiting(self, file: IO) -> None:
        holder = self._holder(file)[0]
        LOGGER.info(f"{self.path} is locked ({holder}): waiting up to {LEASE} s, in case its machine is gone")


def _boot() -> str:
    """Return the identity of this machine's boot."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()

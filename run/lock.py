"""The lock of a run's folder: one process writes to it at a time."""

import errno
import fcntl
import platform
from contextlib import suppress
from typing import IO

import jax
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random

from hosts.distributed import on_first_process
from run.config_json import is_of_a_run
from run.folder import RunFolder, is_of_this_process, line_of_lock
from run.record import saved_up_to
from system.errors import UserError
from system.files import is_there
from system.messages import LOGGER

LEASE = 120  # seconds to wait for the lock of a machine that may be gone: NFS servers keep it for 90


class RunLock:
    """The lock of the process that writes to a run's folder, taken inside `with`. The system releases it when the
    process ends, however. A bucket has no locks: there the newest start takes the run over (`take_over`). Every process
    enters; the first one takes the lock."""

    def __init__(self, folder: RunFolder):
        self.folder, self.path = folder, folder.local / "lock"
        self.file: IO | None = None

    def __enter__(self) -> "RunLock":
        """Take the lock, or fetch the record of a run in a bucket. Raise UserError if another process has the lock, or
        if the folder cannot be written."""
        if "\\" in str(self.path.absolute()):  # tensorstore would write elsewhere
            raise UserError(f"--run_dir={self.folder} cannot work: checkpoints need a path without a backslash")
        begin = self.folder.fetch_record if self.folder.in_bucket else self._take
        on_first_process(lambda: self.folder.writing(begin))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.folder.in_bucket and jax.process_index() == 0:
            with suppress(Exception):  # the store may not answer
                if is_of_this_process(self.folder.lock_holder()):
                    (self.folder.path / "lock").unlink()
            self.folder.taken = False
        if self.file:
            with suppress(OSError, UserError):  # the disk may be gone, or the events damaged
                if kind and issubclass(kind, UserError):
                    self._leave_nothing()
            self.file.close()

    def _leave_nothing(self) -> None:
        """Delete what a refused start made, if the run has no step, and so nothing worth keeping."""
        local, record = self.folder.local, self.folder.config_json
        logged = is_there(local / "metrics.jsonl") or saved_up_to(self.folder.events.read())
        if is_of_a_run(record) and not logged and not self.folder.finished_steps():
            for name in ("config.json", "events.jsonl"):
                (local / name).unlink(missing_ok=True)
        if not is_of_a_run(record):
            self.path.unlink()
            for path in (local / "checkpoints", local, local.parent):
                with suppress(OSError):  # not there, or not empty
                    path.rmdir()

    def _take(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+")
        waits = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, BlockingIOError) and _is_of_another_machine(file)),
            stop=stop_after_delay(LEASE),
            wait=wait_random(1, 3),
            reraise=True,
        )
        try:
            waits(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.path.parent} is being written to by another process ({_holder(file) or 'which has just begun'})"
                "; wait for it, or end it, or choose another --run_dir"
            ) from None  # an error of the disk as its cause would be retried
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
            LOGGER.warning(
                f"{self.path.parent} is on a disk without locks: nothing keeps a second process from writing to it"
            )
        file.truncate(0)
        file.write(line_of_lock())
        file.flush()
        self.file = file


def take_over(folder: RunFolder) -> None:
    """Write this process's name into the lock of a run in a bucket, which has no locks. Report whose name it replaces:
    that process, if it is alive, ends before its next save (`RunFolder.other_writer`). Do nothing on a disk. On the
    first process."""
    if not folder.in_bucket:
        return
    if holder := folder.other_writer():
        LOGGER.warning(f"{folder} was being written to by {holder}: if that process is alive, it ends at its next save")
    (folder.path / "lock").write_text(line_of_lock())
    folder.taken = True


def _holder(file: IO) -> str:
    """Return the line of the process that has the lock of this file."""
    file.seek(0)
    return file.read().partition("\n")[0]


def _is_of_another_machine(file: IO) -> bool:
    """Return whether a process of another machine has the lock. It may be gone: an NFS server keeps its lock for a
    while. A process of this machine is alive."""
    return _holder(file) != "" and f" on {platform.node()}, " not in _holder(file)

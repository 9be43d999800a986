"""How a command ends: the exit code and the message of each exception, alone or together with other processes."""

import errno
import os
import select
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple, TextIO

from system.errors import CODES, Exit, FailedElsewhere, OutputClosed, StorageLost
from system.files import is_transient
from system.messages import repair_streams

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
INTERRUPTED = "interrupted; everything that was complete before is kept"
PEER_LOST = "error: another process has stopped, or cannot be reached; start all again"


class Ending(NamedTuple):
    """What a command exits with, and what it says before; an empty message says nothing."""

    code: int
    message: str


def ending_of(error: BaseException, alone: bool = False) -> Ending:
    """Return how a process ends by an exception. `alone`: the other processes of its run do not end with it. An
    error of the devices is then a lost process's, and the message follows the error's own."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return Ending(error.code or Exit.COMPLETE, "")
        return Ending(Exit.FAILED, error.code)
    if isinstance(error, KeyboardInterrupt):
        return Ending(Exit.INTERRUPTED, str(error) or INTERRUPTED)
    if isinstance(error, OutputClosed):
        return Ending(CODES[OutputClosed], "")
    if kind := kind_of_ours(error):
        advice = "; start all again" if CODES[kind] == Exit.PEER_LOST else ""
        return Ending(CODES[kind], f"error: {error}{advice}")
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return Ending(Exit.FAILED, f"error: {error.filename or 'a file'} cannot be written: {error.strerror}")
    its_traceback = "".join(traceback.format_exception(error)).rstrip()
    if is_transient(error):  # some reads and writes have no retries of their own
        return Ending(Exit.PEER_LOST, its_traceback)
    if alone and _is_of_all_devices(error):
        return Ending(Exit.PEER_LOST, PEER_LOST)
    return Ending(Exit.FAILED, its_traceback)


def kind_of_ours(error: BaseException) -> type[Exception] | None:
    """Return which of our exceptions, as in CODES, this one is; None for another one."""
    return next((kind for kind in CODES if isinstance(error, kind)), None)


def shared_kind(error: Exception) -> type[Exception]:
    """Return the exception of ours that all processes raise if one fails with this error: it has the error's exit
    code."""
    if kind := kind_of_ours(error):
        return kind
    return StorageLost if ending_of(error).code == Exit.PEER_LOST else FailedElsewhere


def _is_of_all_devices(error: BaseException) -> bool:
    """Return whether an operation of all devices may have failed with this error because another process is gone."""
    from jax.errors import JaxRuntimeError  # commands without JAX have no other processes

    return isinstance(error, JaxRuntimeError | ValueError)


def reason_of_end(raised: BaseException) -> BaseException:
    """Return why a command ends: OutputClosed if the raised error is that of an output without a reader, else the
    error itself."""
    return OutputClosed() if isinstance(raised, BrokenPipeError) and _has_no_reader(sys.stdout) else raised


def _has_no_reader(output: TextIO) -> bool:
    """Return whether the program that reads this output has ended."""
    state = select.poll()
    state.register(output, 0)
    return any(flags & select.POLLERR for _, flags in state.poll(0))


def report(error: BaseException) -> int:
    """Print why a command ends (`reason_of_end`), and return its exit code. Drop what an output without a reader has
    buffered, which Python would write at its end."""
    if isinstance(error, OutputClosed):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    code, message = ending_of(error)
    if message:
        print(message, file=sys.stderr)
    return code


def exit_code_of(main: Callable[[], int], interrupted: str) -> int:
    """Run a command that does not start JAX (hosts/runtime.py runs those that do), and return its exit code.
    `interrupted`: the message after Ctrl-C."""
    repair_streams()
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return report(KeyboardInterrupt(interrupted))
    except BaseException as raised:
        return report(reason_of_end(raised))
    return code

"""Files on disks and in buckets: atomic writes, the cache folder, and retries of errors that may pass."""

import errno
import os
import re
import ssl
import sys
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import tenacity

from system.errors import StorageLost, UserError

T = TypeVar("T")

RETRY_SECONDS = 300  # retries of a failing disk or store last this long
LONGEST_ASKED = 3600  # seconds that a server may ask to wait
FEWEST_ATTEMPTS = 3  # and are at least this many: one attempt may take longer than that to fail
LONGEST_PAUSE = 30  # seconds between attempts
# Errors of file systems that persist until somebody changes something, by number and, if they have none, by kind.
LASTING = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOSYS, errno.EOPNOTSUPP),
}
LASTING_KINDS = (FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
# Errors of tensorstore, which are all ValueErrors that begin with a status.
PASSING = re.compile(
    "(UNAVAILABLE|UNAUTHENTICATED|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|INTERNAL|UNKNOWN|CANCELLED)\\b"
)
FULL = "the disk is full"
CLIENTS = ("aiohttp", "google.auth", "httpx")  # libraries whose errors without a status are the network's


def cache_dir() -> Path:
    """Return the folder of prepared datasets and compiled programs: TOKENSUM_CACHE, or ~/.cache/tokensum. Raise
    UserError if there is no home folder."""
    try:
        return Path(os.environ.get("TOKENSUM_CACHE") or "~/.cache/tokensum").expanduser()
    except RuntimeError as error:
        raise UserError(f"no home folder to keep prepared data in ({error}); set TOKENSUM_CACHE to a folder") from error


def in_bucket(folder: Any) -> bool:
    """Return whether a folder is in a bucket."""
    return str(folder).startswith("gs://")


def is_there(path: Any) -> bool:
    """Return whether a file or folder exists, on a disk or in a bucket. Raise OSError if the disk does not answer.
    `exists` may return False then, and what follows would delete, repeat or overwrite what is there."""
    if in_bucket(path):
        return path.exists()
    try:
        os.stat(path)  # epath's stat fails if the owner or group has no name on this machine (google/etils#790)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP):
            return False
        raise
    return True


def read_if_there(path: Any) -> bytes:
    """Return a file's content, on a disk or in a bucket; empty without a file. Raise OSError if the disk does not
    answer."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return b""


def write_whole(path: Path, *parts: bytes | memoryview | str) -> None:
    """Write a file of these parts atomically: under another name, synced to disk, then renamed. A kill or a power cut
    leaves the old file or the new one. Raise OSError if that is impossible; the old file stays then."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part.encode() if isinstance(part, str) else part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def write_picture(path: Path, figure: Any) -> None:
    """Write a figure of matplotlib as a PNG, as `write_whole` does."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=150)
    # A copy: if the write fails, a view of the buffer in the traceback crashes Python 3.12.
    write_whole(path, content.getvalue())


def append_whole(path: Path, text: str) -> None:
    """Append to a file, and sync it to disk. If that is impossible, raise OSError and leave the file unchanged."""
    file = path.open("ab")
    size = file.tell()
    try:
        with file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        os.truncate(path, size)  # after closing, which writes the rest of a failed flush
        error.filename = str(path)
        raise


def causes(error: BaseException) -> list[BaseException]:
    """Return the exception and its causes."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return chain


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status in an error, where gcsfs, aiohttp and the hub's client store it, or None."""
    response = getattr(error, "response", None)
    found = (getattr(error, "code", None), getattr(error, "status", None), getattr(response, "status_code", None))
    return next((int(str(status)) for status in found if str(status).isdigit()), None)


def is_transient(error: BaseException) -> bool:
    """Return whether the same request may succeed later: an error of the disk, the store or the network."""
    chain = causes(error)
    certificate = any(isinstance(cause, ssl.CertificateError) for cause in chain)
    return not certificate and any(_is_transient(cause) for cause in chain)


def _is_transient(error: BaseException) -> bool:
    if (status := status_of(error)) is not None:
        return status in (401, 408, 429) or status >= 500  # 401: credentials could not be renewed
    if isinstance(error, LASTING_KINDS) or type(error).__name__ == "OfflineModeIsEnabled":  # HF_HUB_OFFLINE=1
        return False
    if isinstance(error, OSError):
        # Without a number it is a library's own refusal, such as gcsfs's "Forbidden" for status 403.
        return error.errno not in LASTING and (error.errno is not None or type(error) is not OSError)
    if isinstance(error, ValueError):
        return PASSING.match(str(error)) is not None and _system_error(error) not in LASTING
    return type(error).__module__.startswith(CLIENTS) and "Credentials" not in type(error).__name__


def _system_error(error: BaseException) -> int | None:
    """Return the number of the system's error, as OSError and tensorstore store it; None without one."""
    of_tensorstore = re.search(r"\[os_error_code='(\d+)'\]", str(error))
    return int(of_tensorstore[1]) if of_tensorstore else getattr(error, "errno", None)


def with_retries(what: str, function: Callable[[], T]) -> T:
    """Return the result of `function`. Retry after an error that may pass, with growing random pauses, for up to
    RETRY_SECONDS and at least FEWEST_ATTEMPTS attempts; then raise StorageLost. Pause for as long as a server asks
    (Retry-After), or give up at once if that is above LONGEST_ASKED. Raise other exceptions at once."""
    enough = tenacity.stop_all(tenacity.stop_after_delay(RETRY_SECONDS), tenacity.stop_after_attempt(FEWEST_ATTEMPTS))
    growing = tenacity.wait_random_exponential(multiplier=0.5, max=LONGEST_PAUSE)

    def asked(state: tenacity.RetryCallState) -> float:
        return _asked_pause(state.outcome.exception() if state.outcome else None)

    again = tenacity.Retrying(
        stop=lambda state: enough(state) or asked(state) > LONGEST_ASKED,
        wait=lambda state: growing(state) + asked(state),
        retry=tenacity.retry_if_exception(is_transient),
        before_sleep=partial(_say, what),
        reraise=True,
    )
    try:
        return again(function)
    except Exception as error:
        if not is_transient(error):
            raise
        raise StorageLost(f"{what}: {first_line(error)}") from error


def _asked_pause(error: BaseException | None) -> float:
    """Return the seconds that a server asks to wait before the next request; 0 if it asks for none."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    asked = headers.get("Retry-After", "0")
    if asked.isdigit():
        return int(asked)
    try:
        return max(parsedate_to_datetime(asked).timestamp() - time.time(), 0)
    except ValueError:  # neither seconds nor a date
        return 0


def described(error: BaseException) -> str:
    """Return an error in a line that starts with 1 if it may pass, else with 0. A full disk is said to be full, which
    tensorstore says at the end of a long line."""
    numbers = {_system_error(cause) for cause in causes(error)}
    full = [number for number in (errno.ENOSPC, errno.EDQUOT) if number in numbers]
    message = f"{FULL} ({os.strerror(full[0])})" if full else first_line(error)
    return f"{int(is_transient(error))} {message}"


def _say(what: str, state: tenacity.RetryCallState) -> None:
    if state.attempt_number in (1, 5) or state.attempt_number % 10 == 0:
        error = state.outcome.exception() if state.outcome else None
        pause = f" in {state.upcoming_sleep:.0f} s" * (state.upcoming_sleep > LONGEST_PAUSE)
        print(f"{what}: {first_line(error)}; trying again{pause}", file=sys.stderr, flush=True)


def first_line(error: BaseException | None) -> str:
    """Return an exception in one line, for messages."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:400]


def permission_hint(error: Exception) -> str:
    """Return what to grant, if the store says which permission is missing."""
    if not (missing := re.search(r"storage\.(buckets|objects|folders)\.\w+", str(error))):
        return ""
    name = "legacyBucketReader" if missing[1] == "buckets" else "objectUser"
    return f"; the account lacks {missing[0]}: grant it roles/storage.{name} on the bucket"

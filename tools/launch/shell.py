"""Run external commands (gcloud, kubectl, sbatch) with a time limit, or print them in a dry run; retry what failed."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote

from tenacity import RetryCallState, Retrying, retry_if_exception_type, wait_exponential_jitter

from configs.schema import UserError

LONGEST = 3600  # seconds of a command without its own limit: building an image, a set-up
STALLED = 124  # the code of a command that was killed at its limit, as by `timeout`
UNANSWERED = re.compile(
    "contact slurm controller|timed out|(i/o|handshake) timeout|connection (refused|reset)|no route to host|"
    "network is unreachable|server (?!localhost:8080).* refused|(serviceunavailable|internalerror)\\)",
    re.IGNORECASE,
)
"""Messages of a command whose server does not answer. Without a config, kubectl asks localhost:8080."""
Done = subprocess.CompletedProcess[str]


class Trouble(Exception):
    """Raised if a cloud, a network or a host does not answer: it may work the next time."""


class Denied(Trouble):
    """Raised for a zone that this project, or this account, may not read."""


def pause() -> float:
    """Return the seconds between two queries: 20, or LAUNCH_PAUSE."""
    return float(os.environ.get("LAUNCH_PAUSE", "20"))


def patient(until: float = math.inf, times: float = math.inf) -> Retrying:
    """Return the one retry policy: `for attempt in patient(): with attempt: ...` tries again after Trouble, 20 s to
    5 min later, with jitter. It raises the last Trouble after `times` tries, or once the clock has passed `until`."""

    def over(state: RetryCallState) -> bool:
        return state.attempt_number >= times or time.time() >= until

    return Retrying(
        retry=retry_if_exception_type(Trouble),
        wait=wait_exponential_jitter(multiplier=pause(), max=15 * pause(), jitter=pause()),
        stop=over,
        before_sleep=lambda state: warn(f"{state.outcome and state.outcome.exception()}; retrying"),
        reraise=True,
    )


def ask(words: Sequence[str], check: bool = True, stdin: bytes = b"", seconds: float = LONGEST) -> Done:
    """Run a command to its end, or for `seconds`. Raise UserError if it is not installed. Unless `check` is False,
    raise Trouble if it stalls or its server does not answer, and UserError if it fails otherwise."""
    require_installed(words[0])
    # A new session, so that the command's children end with it, and nothing asks for a password.
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as started:
        try:
            out, err = started.communicate(stdin, timeout=seconds)
            code = started.returncode
        except subprocess.TimeoutExpired as late:  # with its output until then
            out, err, code = late.stdout or b"", late.stderr or b"", STALLED
            err += f"\nno answer in {seconds:g} s".encode()
        finally:
            if started.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
    done = Done(words, code, out.decode(errors="replace"), err.decode(errors="replace"))
    if check and code:
        message = (done.stderr.strip() or done.stdout.strip())[-2000:]
        trouble = code == STALLED or UNANSWERED.search(message)
        raise (Trouble if trouble else UserError)(f"{join(words)[:300]} ended with {code}: {message}")
    return done


def require_installed(program: str) -> None:
    """Raise UserError if there is no such program here."""
    if not shutil.which(program):
        raise UserError(f"{program} is not installed here; --dry_run shows its commands")


@dataclass(frozen=True)
class Shell:
    """Make changes, or print them with `dry_run`."""

    dry_run: bool = False

    def run(
        self, words: Sequence[str], check: bool = True, stdin: bytes = b"", shown: str = "", seconds: float = LONGEST
    ) -> Done:
        """Run a command as `ask` does. A dry run prints it with its standard input, or prints `shown` instead."""
        if not self.dry_run:
            return ask(words, check, stdin, seconds)
        print(shown or (f"{join(words)} <<'END'\n{stdin.decode()}END" if stdin else join(words)))
        return Done(words, 0, "", "")

    def write(self, path: Path, content: bytes | str, names: Sequence[str] = ()) -> None:
        """Write a file, and make its folder. A dry run prints a text, or the size of bytes. With `names` the content
        is secrets of these names: nobody else may read the file, and a dry run shows only the names."""
        if self.dry_run and names:
            print(f"# write {quote(str(path))}, for its owner alone: {', '.join(names)}, from this environment")
        elif self.dry_run and isinstance(content, bytes):
            print(f"# write {quote(str(path))}: {len(content):,} bytes")
        elif self.dry_run:
            print(f"cat > {quote(str(path))} <<'END'\n{content}END")
        else:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600 if names else 0o666), "wb") as file:
                    file.write(content if isinstance(content, bytes) else content.encode())
            except OSError as error:
                raise UserError(f"{path} cannot be written: {error}") from error

    def say(self, text: str) -> None:
        """Print lines at once, unless it is a dry run."""
        if not self.dry_run:
            say(text)

    def become(self, words: Sequence[str]) -> None:
        """Run a command in place of this process. Raise UserError if it is not installed."""
        if self.dry_run:
            return print(join(words))
        require_installed(words[0])
        os.execvp(words[0], list(words))


def say(text: str) -> None:
    """Print lines at once; nothing if the text is empty."""
    if text:
        print(text, flush=True)


def warn(text: str) -> None:
    """Print lines on the error stream."""
    print(text, file=sys.stderr, flush=True)

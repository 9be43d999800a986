"""Commands of others (gcloud, kubectl, sbatch): run, each with a time limit, or in a dry run printed as they would be
typed; and how often what did not work is tried again."""

import math
import os
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

LONGEST = 3600  # seconds of a command that has no limit of its own: an image that is built, a set-up
STALLED = 124  # the code of a command that was ended at its limit, as of `timeout`


class Trouble(Exception):
    """What is nobody's mistake, and may work the next time: a cloud, a network or a host that does not answer."""


class Denied(Trouble):
    """A zone that this project, or this account, may not look at."""


def pause() -> float:
    """Seconds between two questions: 20, or LAUNCH_PAUSE."""
    return float(os.environ.get("LAUNCH_PAUSE", "20"))


def patient(until: float = math.inf, times: float = math.inf) -> Retrying:
    """The one retry policy: `for attempt in patient(): with attempt: ...` tries again after Trouble, 20 s to 5 min
    later, with jitter. Raises the last Trouble after `times` tries, or once the clock has passed `until`."""

    def over(state: RetryCallState) -> bool:
        return state.attempt_number >= times or time.time() >= until

    return Retrying(
        retry=retry_if_exception_type(Trouble),
        wait=wait_exponential_jitter(multiplier=pause(), max=15 * pause(), jitter=pause()),
        stop=over,
        before_sleep=lambda state: warn(f"{state.outcome and state.outcome.exception()}; it is tried again"),
        reraise=True,
    )


@dataclass(frozen=True)
class Shell:
    """Runs commands; one with `dry_run` prints those that would change something, and runs none."""

    dry_run: bool = False

    def change(
        self,
        words: Sequence[str],
        check: bool = True,
        stdin: bytes = b"",
        shown: str = "",
        seconds: float = LONGEST,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command that changes something, or shows it in a dry run, with the text that it reads; `shown` is
        printed there in place of both. UserError where it fails, Trouble where it stalls, unless `check` is False."""
        if self.dry_run:
            print(shown or (f"{join(words)} <<'END'\n{stdin.decode()}END" if stdin else join(words)))
            return subprocess.CompletedProcess(words, 0, "", "")
        return self._run(words, check, stdin, seconds)

    def ask(
        self, words: Sequence[str], check: bool = True, seconds: float = LONGEST
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command that changes nothing. Raises as `change` does. Not in a dry run."""
        assert not self.dry_run
        return self._run(words, check, b"", seconds)

    def write(self, path: Path, content: bytes | str, names: Sequence[str] = ()) -> None:
        """Writes a file, its folder being made; a dry run prints a text whole, and the size of anything else. With
        `names` it holds secrets of these names: nobody else may read it, and a dry run shows the names alone."""
        if self.dry_run and names:
            print(f"# write {quote(str(path))}, for its owner alone: {', '.join(names)}, from this environment")
        elif self.dry_run and isinstance(content, bytes):
            print(f"# write {quote(str(path))}: {len(content):,} bytes")
        elif self.dry_run:
            print(f"cat > {quote(str(path))} <<'END'\n{content}END")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600 if names else 0o666), "wb") as file:
                file.write(content if isinstance(content, bytes) else content.encode())

    def become(self, words: Sequence[str]) -> None:
        """Runs a command in place of this process, or shows it in a dry run. UserError where it is not installed."""
        if self.dry_run:
            return print(join(words))
        try:
            os.execvp(words[0], list(words))
        except FileNotFoundError as error:
            raise UserError(f"{words[0]} is not installed here; --dry_run shows what it would be asked") from error

    def _run(self, words: Sequence[str], check: bool, stdin: bytes, seconds: float) -> subprocess.CompletedProcess[str]:
        try:
            # A session of its own, so that what the command has started ends with it, and nothing asks for a password.
            pipe = subprocess.PIPE
            started = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except FileNotFoundError as error:
            raise UserError(f"{words[0]} is not installed here; --dry_run shows what it would be asked") from error
        with started:
            try:
                out, err = started.communicate(stdin, timeout=seconds)
                code = started.returncode
            except subprocess.TimeoutExpired as late:  # with what was said until then
                out, err, code = late.stdout or b"", late.stderr or b"", STALLED
                err += f"\nno answer in {seconds:g} s".encode()
            finally:
                if started.returncode is None:
                    with suppress(ProcessLookupError):
                        os.killpg(started.pid, signal.SIGKILL)
        done = subprocess.CompletedProcess(words, code, out.decode(errors="replace"), err.decode(errors="replace"))
        if check and code:
            said = (done.stderr.strip() or done.stdout.strip())[-2000:]
            raise (Trouble if code == STALLED else UserError)(f"{join(words)[:300]} ended with {code}: {said}")
        return done


def say(text: str) -> None:
    """Lines for the person who waits, at once; nothing where there are none."""
    if text:
        print(text, flush=True)


def warn(text: str) -> None:
    """A line on the error stream."""
    print(text, file=sys.stderr, flush=True)

"""Commands of others (gcloud, kubectl, sbatch): run, or in a dry run printed as they would be typed."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote

from configs.schema import UserError


@dataclass(frozen=True)
class Shell:
    """Runs commands; one with `dry_run` prints those that would change something, and runs none."""

    dry_run: bool = False

    def change(
        self, words: Sequence[str], check: bool = True, stdin: bytes = b"", shown: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command that changes something, or shows it in a dry run, with the text that it reads; `shown` is
        printed there in place of both. UserError where it fails, unless `check` is False."""
        if self.dry_run:
            print(shown or (f"{join(words)} <<'END'\n{stdin.decode()}END" if stdin else join(words)))
            return subprocess.CompletedProcess(words, 0, "", "")
        return self._run(words, check, stdin)

    def ask(self, words: Sequence[str], check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a command that changes nothing. UserError where it fails, unless `check` is False. Not in a dry run."""
        assert not self.dry_run
        return self._run(words, check)

    def write(self, path: Path, content: bytes | str) -> None:
        """Writes a file, its folder being made; a dry run prints a text whole, and the size of anything else."""
        if not self.dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        elif isinstance(content, bytes):
            print(f"# write {quote(str(path))}: {len(content):,} bytes")
        else:
            print(f"cat > {quote(str(path))} <<'END'\n{content}END")

    def become(self, words: Sequence[str]) -> None:
        """Runs a command in place of this process, or shows it in a dry run. UserError where it is not installed."""
        if self.dry_run:
            return print(join(words))
        try:
            os.execvp(words[0], list(words))
        except FileNotFoundError as error:
            raise UserError(f"{words[0]} is not installed here; --dry_run shows what it would be asked") from error

    def _run(self, words: Sequence[str], check: bool, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
        try:
            ran = subprocess.run(words, input=stdin, capture_output=True, check=False)
        except FileNotFoundError as error:
            raise UserError(f"{words[0]} is not installed here; --dry_run shows what it would be asked") from error
        said, errors = (stream.decode(errors="replace") for stream in (ran.stdout, ran.stderr))
        done = subprocess.CompletedProcess(words, ran.returncode, said, errors)
        if check and done.returncode:
            said = (done.stderr.strip() or done.stdout.strip())[-2000:]
            raise UserError(f"{join(words)[:300]} ended with {done.returncode}: {said}")
        return done


def say(text: str) -> None:
    """Lines for the person who waits, at once; nothing where there are none."""
    if text:
        print(text, flush=True)


def warn(text: str) -> None:
    """A line on the error stream."""
    print(text, file=sys.stderr, flush=True)

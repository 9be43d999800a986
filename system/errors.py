"""The exceptions that end a command for a reason that is known, and the exit code of each."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes (docs/checkpoints.md). Other codes come from the system (134, 137, 139: signals); a few restarts may
    help. JAX ends a process that has lost another one with 134."""

    COMPLETE = 0
    FAILED = 1
    """Do not repeat it: it would fail again."""
    MISTAKE = 2
    """A user's mistake; nothing was changed."""
    UNREADABLE = 3
    """No checkpoint can be read, or the one asked for is damaged."""
    PEER_LOST = 42
    """Another process has stopped or cannot be reached, or a step hangs: start all of them again."""
    INTERRUPTED = 130
    """Stopped by Ctrl-C; saved."""
    PREEMPTED = 143
    """Stopped by SIGTERM; saved: start again."""


class UserError(Exception):
    """A mistake that the user can correct: every command prints the message, without a traceback."""


class StorageLost(Exception):
    """A disk or a store failed for longer than retries last: start all processes again."""


class NoCheckpoint(Exception):
    """Raised if a run has checkpoints, and none can be read."""


class Damaged(ValueError):
    """Raised if a saved file is missing, or its content differs."""


class FailedElsewhere(Exception):
    """Raised if another process failed for a reason that has no exception of its own."""


class TrainingAborted(Exception):
    """Raised if another step makes no sense, for this reason."""


class StartAgain(Exception):
    """Raised if another start continues the run, for this reason."""


class OutputClosed(Exception):
    """The program that reads the output has ended, as `| head` does: nothing is left to say."""


CODES: dict[type[Exception], Exit] = {
    UserError: Exit.MISTAKE,
    StorageLost: Exit.PEER_LOST,
    StartAgain: Exit.PEER_LOST,
    NoCheckpoint: Exit.UNREADABLE,
    Damaged: Exit.UNREADABLE,
    TrainingAborted: Exit.FAILED,
    OutputClosed: Exit.FAILED,
    FailedElsewhere: Exit.FAILED,
}
"""The exit code of each of our exceptions; system/exits.py adds those of others. If processes fail differently, all
raise the one that stands first here (`hosts.distributed.on_every_process`)."""

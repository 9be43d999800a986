"""Exit codes, for shells, schedulers and the commands themselves."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes: the one table that everything reads (docs/checkpoints.md). All processes of a run end with one code.
    Other codes come from the system (134, 137, 139: signals); a few restarts may help."""

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

    @property
    def start_again(self) -> bool:
        """Return whether a launcher should restart all processes of the command, however often."""
        return self in (Exit.PEER_LOST, Exit.PREEMPTED)

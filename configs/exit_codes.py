"""How commands end, for shells, schedulers and the commands themselves."""

from enum import IntEnum


class Exit(IntEnum):
    """How a command ends: the one table that everything reads (docs/checkpoints.md). All processes of a run end with
    one code. Other codes are not ours (134, 137, 139: signals), and may be worth a few new starts."""

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
    """By a person, with Ctrl-C; saved."""
    PREEMPTED = 143
    """By SIGTERM; saved: start again."""

    @property
    def start_again(self) -> bool:
        """Whether what started the command is to start it again, all processes of it, however often."""
        return self in (Exit.PEER_LOST, Exit.PREEMPTED)

"""End as a command ends."""

from collections.abc import Callable

import pytest

from hosts.runtime import run_command


def exit_code(main: Callable[[], int]) -> int:
    """Run a command to its end, and return its exit code."""
    with pytest.raises(SystemExit) as end:
        run_command(main)
    return end.value.code

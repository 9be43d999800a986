"""Run a command's main function, and return the exit code of its process."""

import pytest

from hosts.runtime import (
    run_command,
)


def exit_code(main) -> int:
    """Return the exit code of a command."""
    with pytest.raises(SystemExit) as end:
        run_command(main)
    return end.value.code

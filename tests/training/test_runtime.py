"""How a command ends."""

import os
import signal

import pytest

from configs.schema import UserError
from training.runtime import Interrupt, run_command


@pytest.mark.parametrize(("raised", "code", "says"), [(UserError("do this"), 2, "error: do this\n"), (None, 0, "")])
def test_exit_codes(raised, code, says, capsys):
    def main():
        if raised:
            raise raised
        return 0

    with pytest.raises(SystemExit) as end:
        run_command(main)
    assert end.value.code == code and capsys.readouterr().err == says


def test_ctrl_c_outside_of_training(capsys):
    with pytest.raises(SystemExit) as end:
        run_command(lambda: os.kill(os.getpid(), signal.SIGINT) or 0)
    assert end.value.code == 130 and "Traceback" not in capsys.readouterr().err


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_interrupt_is_a_flag_inside_and_restored_outside():
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # a second one ends the process
    assert signal.getsignal(signal.SIGINT) == before

"""While a command's modules are imported, which takes seconds: Ctrl-C is one line in place of a traceback, and the
garbage collector is off, since imports leave it nothing to collect.

A command calls this before its other imports, where nothing else could catch it; `hosts.runtime.run_command` gives both
back to Python once they are done. Nothing of ours, and nothing slow, is imported here.
"""

import gc
import os
import signal
import sys
from typing import NoReturn

from configs.exit_codes import Exit


def end_at_interrupt() -> None:
    """From now on Ctrl-C ends the process at once, unless it was started to ignore it (as by nohup), and garbage is not
    collected, which would take a fifth of the imports' time."""
    gc.disable()
    if {"-h", "--help"} & set(sys.argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a traceback
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_at_interrupt() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again, and garbage is collected, though not from what was imported."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> NoReturn:
    os.write(2, b"interrupted before it started\n")
    os._exit(Exit.INTERRUPTED)  # an exception could be swallowed by what is being imported

"""What a test has workers do, in a module that they can import."""

import os
import signal

from data.prepare.corpus import Corpus


class DeadlyCorpus(Corpus):
    """A corpus one of whose documents kills whoever reads it."""

    def read(self, file, start=0, stop=None):
        for number, text, problem in super().read(file, start, stop):
            if "deadly" in text:
                os.kill(os.getpid(), signal.SIGKILL)
            yield number, text, problem

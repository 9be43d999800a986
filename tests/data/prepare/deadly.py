"""Define the work of a test's workers, in a module that they can import."""

import os
import signal

from data.prepare.corpus import Corpus


class DeadlyCorpus(Corpus):
    """A corpus with a document that kills its reader."""

    def read(self, file, start=0, stop=None):
        for number, text, problem in super().read(file, start, stop):
            if "deadly" in text:
                os.kill(os.getpid(), signal.SIGKILL)
            yield number, text, problem

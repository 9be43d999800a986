"""Prepare the raw text that a run was given, in a process of its own: data/dataset_folder.py starts it.

It reads the arguments of `prepare_raw` from stdin, and writes the dataset's folder, or the exception, to stdout; both
are pickled. So a run that reads a prepared dataset loads nothing of this room.
"""

import pickle
import sys
from contextlib import redirect_stdout

from data.prepare.preparation import prepare_raw


def main() -> None:
    answer = sys.stdout.buffer
    with redirect_stdout(sys.stderr):
        try:
            result = prepare_raw(*pickle.load(sys.stdin.buffer))
        except Exception as error:
            result = error
        except KeyboardInterrupt:  # the command that waits for this process says so
            sys.exit(1)
    answer.write(pickle.dumps(result))


if __name__ == "__main__":
    main()

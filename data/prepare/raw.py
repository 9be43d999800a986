"""Prepare a run's raw text, in a separate process that data/dataset_folder.py starts.

Its argument is that process's number. It reads the arguments of `prepare_raw` from stdin, and writes the folder or
its exception to stdout; both are pickled. So a run that reads a prepared dataset loads nothing of data/prepare.
"""

import os
import pickle
import sys

from data.prepare.parts import end_with
from data.prepare.preparation import prepare_raw
from system.errors import StorageLost, UserError


def main() -> None:
    end_with(int(sys.argv[1]))
    answer = os.dup(1)
    os.dup2(2, 1)  # in a terminal, the training of a tokenizer prints an empty line from Rust
    try:
        result = prepare_raw(*pickle.load(sys.stdin.buffer))
    except (UserError, StorageLost, OSError) as error:
        result = error
    except KeyboardInterrupt:  # the waiting command reports it
        sys.exit(1)
    with open(answer, "wb") as file:
        file.write(pickle.dumps(result))


if __name__ == "__main__":
    main()

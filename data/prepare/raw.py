"""Prepare a run's raw text, in a separate process that data/dataset_folder.py starts.

Its argument is that process's number. It reads the arguments of `prepare_raw` from stdin, and writes the folder or
the exception to stdout; both are pickled. So a run that reads a prepared dataset loads nothing of data/prepare.
"""

import os
import pickle
import sys
import threading
import time
import traceback

from data.prepare.preparation import prepare_raw


def end_with(parent: int) -> None:
    """End this process once its parent has ended: an orphan would keep the dataset's lock."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    threading.Thread(target=end_with, args=[int(sys.argv[1])], daemon=True).start()
    answer = os.dup(1)
    os.dup2(2, 1)  # in a terminal, the training of a tokenizer prints an empty line from Rust
    try:
        result = prepare_raw(*pickle.load(sys.stdin.buffer))
    except Exception as error:
        error.add_note(traceback.format_exc())  # a pickle has no traceback
        result = error
    except KeyboardInterrupt:  # the waiting command reports it
        sys.exit(1)
    with open(answer, "wb") as file:
        file.write(pickle.dumps(result))


if __name__ == "__main__":
    main()

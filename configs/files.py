"""Files that are written whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, *parts: bytes | memoryview | str) -> None:
    """Writes a file of these parts under another name, on disk for certain, then renames it: a kill or a power cut
    leaves the old file or the new one. OSError where that is impossible; the old file stays then."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part.encode() if isinstance(part, str) else part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def append_whole(path: Path, text: str) -> None:
    """Appends to a file, on disk for certain. Where that is impossible (OSError) the file stays as it was."""
    with path.open("ab") as file:
        size = file.tell()
        try:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.truncate(path, size)
            raise

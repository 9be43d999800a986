"""Atomic writes, buckets, and the cache folder."""

import os
from io import BytesIO
from pathlib import Path
from typing import Any

from configs.schema import UserError


def cache_dir() -> Path:
    """Return the folder of prepared datasets and compiled programs: TOKENSUM_CACHE, or ~/.cache/tokensum. Raise
    UserError if there is no home folder."""
    try:
        return Path(os.environ.get("TOKENSUM_CACHE") or "~/.cache/tokensum").expanduser()
    except RuntimeError as error:
        raise UserError(f"no home folder to keep prepared data in ({error}); set TOKENSUM_CACHE to a folder") from error


def in_bucket(folder: Any) -> bool:
    """Return whether a folder is in a bucket."""
    return str(folder).startswith("gs://")


def write_whole(path: Path, *parts: bytes | memoryview | str) -> None:
    """Write a file of these parts atomically: under another name, synced to disk, then renamed. A kill or a power cut
    leaves the old file or the new one. Raise OSError if that is impossible; the old file stays then."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part.encode() if isinstance(part, str) else part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        error.filename = str(path)
        raise


def write_picture(path: Path, figure: Any, dpi: int = 150) -> None:
    """Write a figure of matplotlib as a PNG, as `write_whole` does."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=dpi)
    # A copy: if the write fails, a view of the buffer in the traceback crashes Python 3.12.
    write_whole(path, content.getvalue())


def append_whole(path: Path, text: str) -> None:
    """Append to a file, and sync it to disk. If that is impossible, raise OSError and leave the file unchanged."""
    file = path.open("ab")
    size = file.tell()
    try:
        with file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        os.truncate(path, size)  # after closing, which writes the rest of a failed flush
        error.filename = str(path)
        raise


def shown_bytes(count: float) -> str:
    """Return a size on a disk: 24.0 kB, 0.3 MB, 3.1 GB."""
    unit = next((unit for unit in (1e9, 1e6) if count >= unit / 10), 1e3)
    return f"{count / unit:.1f} {({1e9: 'GB', 1e6: 'MB', 1e3: 'kB'})[unit]}"

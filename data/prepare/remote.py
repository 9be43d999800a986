"""A file at a URL, read although its server fails for a while."""

import io
from typing import Any

from fsspec import AbstractFileSystem

from configs.retry import patiently

BUFFER_BYTES = 2**20


class RemoteFile(io.RawIOBase):
    """A file that is opened again, and read on from where it was, if a read of it fails. StorageLost if it fails for
    long."""

    def __init__(self, filesystem: AbstractFileSystem, url: str):
        self.filesystem, self.url, self.at = filesystem, url, 0
        self.opened: Any = None

    def readinto(self, buffer: Any) -> int:
        content = patiently(self.url, lambda: self._read(len(buffer)))
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)

    def _read(self, size: int) -> bytes:
        try:
            return self._at_position().read(size)
        except Exception:
            self.opened = None
            raise

    def _at_position(self) -> Any:
        if self.opened is None:
            self.opened = self.filesystem.open(self.url, "rb")
        if self.opened.tell() != self.at:
            self.opened.seek(self.at)
        return self.opened

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.at}
        self.at = offset + (start[whence] if whence in start else patiently(self.url, self._size))
        return self.at

    def _size(self) -> int:
        return self.filesystem.size(self.url) or 0

    def tell(self) -> int:
        return self.at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def open_remote(filesystem: AbstractFileSystem, url: str) -> io.BufferedReader:
    """Open a file at a URL for reading bytes. Raise what its server says if it is not there."""
    return io.BufferedReader(RemoteFile(filesystem, url), BUFFER_BYTES)

"""Reading a file at a URL despite temporary failures of its server."""

import io
from typing import Any

from fsspec import AbstractFileSystem

from configs.retry import patiently
from data.store import read_range

BUFFER_BYTES = 2**22  # of one request


class RemoteFile(io.RawIOBase):
    """A file read by requests for ranges, each repeated until it is answered. Raises StorageLost if its server fails
    for long."""

    def __init__(self, filesystem: AbstractFileSystem, url: str):
        """Raise the server's error if the file is missing, and OSError if its length is unknown."""
        self.filesystem, self.url, self.at = filesystem, url, 0
        size = patiently(url, lambda: filesystem.size(url))
        if size is None:
            raise OSError("its server does not report its length")
        self.size: int = size

    def readinto(self, buffer: Any) -> int:
        stop, path = min(self.at + len(buffer), self.size), str(self.filesystem._strip_protocol(self.url))
        content = b""
        if self.at < stop:
            content = patiently(self.url, lambda: read_range(self.filesystem, path, self.at, stop))
        buffer[: len(content)] = content
        self.at += len(content)
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def open_remote(filesystem: AbstractFileSystem, url: str) -> io.BufferedReader:
    """Open a file at a URL for reading bytes. Raise as `RemoteFile` does."""
    return io.BufferedReader(RemoteFile(filesystem, url), BUFFER_BYTES)

"""Memory that processes of one machine and user share, without a name in any file system."""

import contextlib
import fcntl
import mmap
import os
import secrets
from typing import Self

from worker.kv.wire import Shared


def _seals() -> int:
    """Return seals: memory neither shrinks, which would kill a reader, nor changes."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Sole owner of a file of memory, until it is left or lost; mappings of it stay."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._is_open = True

    @classmethod
    def of(cls, data: memoryview) -> Self | None:
        """Make one with a copy of `data`; None without such memory, or none to spare."""
        name = f"pointsman-kv-{secrets.token_hex(16)}"
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, AttributeError):  # it is Linux's
            return None
        try:
            while data:
                data = data[os.write(fd, data) :]
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _seals())
        except OSError:
            os.close(fd)
            return None
        return cls(Shared(os.getpid(), fd, name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self.shared.fd)

    __del__ = __exit__  # who waited for a thread to make it may have been cancelled


def map_shared(shared: Shared, size: int) -> memoryview | None:
    """Map the memory, of `size` bytes; None where it is missing, or another than was named."""
    path = f"/proc/{shared.pid}/fd/{shared.fd}"
    with contextlib.suppress(OSError):
        # In another PID namespace the number is that of another process.
        if os.readlink(path) != f"/memfd:{shared.name} (deleted)":
            return None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _seals() == _seals()
            if is_sealed and os.fstat(fd).st_size == size:
                return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY))
        finally:
            os.close(fd)
    return None

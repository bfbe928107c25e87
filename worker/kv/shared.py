"""Memory that processes of one machine and user share, without a name in any file system."""

import contextlib
import fcntl
import mmap
import os
import secrets
from typing import Self

from worker.kv.wire import Shared


def _seals() -> int:
    """Return the seals that keep memory from shrinking, which would kill a reader, or changing."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Sole owner of a file of memory, until its context ends or it is freed; mappings stay."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._is_open = True

    @classmethod
    def of(cls, data: memoryview) -> Self | None:
        """Create one with a copy of `data`; None if there is no such memory, or too little."""
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
    """Map `size` bytes of the memory; return None if it is missing, or not the one named."""
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

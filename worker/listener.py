"""The socket of a worker: bound early, so that a busy address fails before the model loads, and
listening when requests can be answered.
"""

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from worker.config import ServeConfig
from worker.errors import ConfigError


@contextmanager
def bound(config: ServeConfig) -> Iterator[socket.socket]:
    if config.uds is None:
        with bind(config.host, config.port) as listener:
            yield listener
        return
    with _locked(config.uds), _bind_unix(config.uds) as listener:
        mine = _identity(config.uds)
        try:
            yield listener
        finally:
            # Another process may have replaced the file meanwhile: remove only this socket.
            with contextlib.suppress(OSError):
                if mine is not None and _identity(config.uds) == mine:
                    os.unlink(config.uds)


def bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error
    try:
        # Connections in TIME_WAIT must not block a restart on the same port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is already in use; choose another with --port"
            ) from error
        raise ConfigError(f"cannot bind {host} port {port}: {error.strerror}") from error
    return listener


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Reserve `path` by a lock on a file beside it: a worker that has bound its socket but does not
    listen yet looks dead from outside. The lock ends with the process.
    """
    name = f"{path}.lock"
    try:
        lock = _lock(name)
    except BlockingIOError as error:
        raise ConfigError(f"--uds {path}: another worker listens there, or is about to") from error
    except OSError as error:
        raise ConfigError(f"--uds {path}: {name}: {error.strerror or error}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            # Unlink while holding the lock: the next holder checks that the file is still there.
            os.unlink(name)
        os.close(lock)


def _lock(name: str) -> int:
    while True:
        # Never follow a link: the path may be in a directory that others can write.
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _identity(name) == _identity(lock):
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # its owner removed the file between our open and our lock


def _identity(file: str | int) -> tuple[int, int] | None:
    """Return the device and inode of a file, which outlast a rename; None when there is no file."""
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _bind_unix(path: str) -> socket.socket:
    """Bind a unix socket. Replace the socket of a dead worker, and no other file."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_answered(path):
            os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds {path}: {error.strerror or error}") from error
    return listener


def _is_answered(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def shown(listener: socket.socket, *, tls: bool) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def is_exposed(listener: socket.socket) -> bool:
    if listener.family == socket.AF_UNIX:
        return False
    # The zone of a link-local IPv6 address follows %.
    return not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback

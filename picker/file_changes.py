"""Decides when to look at a file again: when its folder changes, and now and then anyway.

The kernel reports changes (inotify) to the event loop itself, so that a quiet folder costs no
thread and no wake-up but the one of each second. Lines written to a log beside the file are no
change: a file counts when its writer closes it, and when it is replaced, made or removed.
"""

import asyncio
import ctypes
import logging
import os
import struct
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

WATCH_DEBOUNCE_MS = 50  # one replacement is several events
RECHECK_MS = 1000  # finds what a file system without change events, or a race at start, hides
READ_BYTES = 64 * 1024
# <sys/inotify.h>
_CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x8, 0x40, 0x80, 0x100, 0x200
_CHANGES = _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_ONLY_FOLDERS = 0x0100_0000
_EVENT = struct.Struct("iIII")  # watch, kind, cookie, bytes of the name


async def moments_to_look(
    folder: Path, *names: str, debounce_ms: int = WATCH_DEBOUNCE_MS
) -> AsyncGenerator[None, None]:
    """Yield when one of the files `names` may have changed, at least every second, until closed.
    The folder is watched, not the files: editors and Kubernetes replace files by renaming. Changes
    within `debounce_ms` count as one.
    """
    changed = asyncio.Event()

    def note(events: bytes) -> None:
        if not changed.is_set() and concern(events, names):
            changed.set()

    with _watched(folder, note):
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RECHECK_MS / 1000):
                    await changed.wait()
                await asyncio.sleep(debounce_ms / 1000)
            changed.clear()
            yield


def concern(events: bytes, names: tuple[str, ...]) -> bool:
    """Return whether one of inotify's events is about one of the files `names`, or about the
    `..data` link that Kubernetes replaces. An event without a name concerns all files.
    """
    at = 0
    while at < len(events):
        length = _EVENT.unpack_from(events, at)[3]
        at += _EVENT.size
        name = os.fsdecode(events[at : at + length].rstrip(b"\0"))
        if not name or name in names or name.startswith(".."):
            return True
        at += length
    return False


@contextmanager
def _watched(folder: Path, note: Callable[[bytes], None]) -> Iterator[None]:
    """Pass the events of a folder to `note`; without a watch to give, the system passes none."""
    try:
        watch = _open_watch(folder)
    except OSError as error:
        log.warning("%s cannot be watched (%s); it is looked at every second", folder, error)
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(watch, lambda: note(os.read(watch, READ_BYTES)))
    try:
        yield
    finally:
        loop.remove_reader(watch)
        os.close(watch)


def _open_watch(folder: Path) -> int:
    """Return the descriptor of a watch of a folder. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "inotify_init1"):
        raise OSError("this system has no inotify")
    watch: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if watch >= 0:
        path = os.fsencode(folder)
        if libc.inotify_add_watch(watch, path, _CHANGES | _ONLY_FOLDERS) >= 0:
            return watch
    number = ctypes.get_errno()
    if watch >= 0:
        os.close(watch)
    raise OSError(number, os.strerror(number))

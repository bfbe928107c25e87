"""Decides when to look at a file again: when its folder changes, and now and then anyway."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

from watchfiles import Change, awatch

log = logging.getLogger(__name__)

WATCH_STEP_MS = 50
WATCH_DEBOUNCE_MS = 100  # the two files of a pair are rarely replaced at once
RECHECK_MS = 1000  # finds what a file system without change events, or a race at start, hides


async def moments_to_look(
    folder: Path,
    *names: str,
    debounce_ms: int = WATCH_DEBOUNCE_MS,
    watch: Callable[..., AsyncIterator[object]] = awatch,
) -> AsyncGenerator[None, None]:
    """Yield when one of the files `names` may have changed, at least every second, until closed.
    The folder is watched, not the files: editors and Kubernetes replace files by renaming. Changes
    within `debounce_ms` count as one. `watch` is for tests.
    """

    def concerns(_change: Change, changed: str) -> bool:
        """Return whether it is one of the files, or the `..data` link that Kubernetes replaces."""
        name = Path(changed).name
        return name in names or name.startswith("..")

    stop = asyncio.Event()
    try:
        async for _ in watch(
            folder,
            step=WATCH_STEP_MS,
            debounce=debounce_ms,
            rust_timeout=RECHECK_MS,
            yield_on_timeout=True,
            stop_event=stop,
            recursive=False,
            watch_filter=concerns,
        ):
            yield
    # The system may have no watch left to give; then only the interval remains.
    except (OSError, RuntimeError) as error:
        log.warning("%s cannot be watched (%s); it is looked at every second", folder, error)
    finally:
        stop.set()
    while True:
        yield
        await asyncio.sleep(RECHECK_MS / 1000)

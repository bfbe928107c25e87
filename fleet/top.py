# Apart: a subcommand, imported only when it runs.
"""`pointsman top`: a running picker, live in a terminal.

It asks once a second and draws what was said. A picker that goes away leaves its last picture and a
line that says so; when one is back, it goes on.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fleet.picker_views import NoPickerError, PickerViews, Seen
from fleet.top_frame import Room, Title, frame
from fleet.top_text import ASCII, Glyphs
from picker.admin.history import SAMPLES

INTERVAL_SECONDS = 1.0
DECISIONS = 200
QUIT = "q"
HINT = f"{QUIT} quits"
_MOST_KEYS = 64


def top(url: str, console: Console, keyboard: TextIO, *, once: bool = False) -> int:
    """Show the picker until `q` or Ctrl-C; returns the exit status 0.

    Where `console` is no terminal, or with `once`, prints a single picture as plain text. Raises
    `NoPickerError` when there is nothing to be printed, and `SeveralPoolsError` where a pool has to
    be named.
    """
    with PickerViews(url) as views:
        if once or not console.is_terminal:
            seen = views.look(SAMPLES, DECISIONS)
            room = Room(console.width, None, _glyphs(console))
            for line in frame(seen, Title(url), room):
                console.print(Text(line.plain.rstrip()), soft_wrap=True)
            return 0
        with contextlib.suppress(KeyboardInterrupt), _ending_by_signals(), _keys(keyboard) as keys:
            _Screen(url, views, console).run(keys)
    return 0


class _Screen:
    """Owns what was seen last."""

    def __init__(self, url: str, views: PickerViews, console: Console) -> None:
        self._url = url
        self._views = views
        self._console = console
        self._seen: Seen | None = None
        self._lost: str | None = None

    def run(self, keys: Callable[[float], str]) -> None:
        """Draw once a second until a key says to stop."""
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            live.update(self._picture(), refresh=True)
            while True:
                begun = time.monotonic()
                self._look()
                live.update(self._picture(), refresh=True)
                left = INTERVAL_SECONDS - (time.monotonic() - begun)
                if QUIT in keys(max(0.0, left)).lower():
                    return

    def _look(self) -> None:
        try:
            self._seen = self._views.look(SAMPLES, DECISIONS)
        except NoPickerError:
            since = time.strftime("%H:%M:%S")
            self._lost = self._lost or f"does not answer since {since}, trying again"
        else:
            self._lost = None

    def _picture(self) -> Group:
        width, height = self._console.size
        title = Title(self._url, self._lost, HINT)
        return Group(*frame(self._seen, title, Room(width, height, _glyphs(self._console))))


def _no_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _glyphs(console: Console) -> Glyphs:
    return Glyphs() if console.encoding.lower().startswith("utf") else ASCII


@contextlib.contextmanager
def _keys(keyboard: TextIO) -> Iterator[Callable[[float], str]]:
    """Reads single keys: what was pressed within so many seconds, "" for nothing."""
    if not keyboard.isatty():
        yield _no_keys
        return
    descriptor = keyboard.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return ""
        # Past the buffer of `keyboard`, which `select` does not see. Its end is the user's.
        return os.read(descriptor, _MOST_KEYS).decode(errors="replace") or QUIT

    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _ending_by_signals() -> Iterator[None]:
    """Let signals end the program as Ctrl-C does, so that the terminal is left clean; and Ctrl-C,
    too, where whoever started us ignores it.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, end) for number in numbers]
    try:
        yield
    finally:
        for number, one in zip(numbers, before, strict=True):
            signal.signal(number, one)


def console_and_keyboard() -> tuple[Console, TextIO]:
    """Those of this program. `NO_COLOR` is obeyed."""
    return Console(highlight=False), sys.stdin

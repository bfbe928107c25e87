"""`pointsman top`: a running picker, live in a terminal.

When the picker stops answering, the last picture stays, with a line that says so.
"""

import contextlib
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from fleet.commands.explain_text import SHOWN_CANDIDATES, Layout, explained
from fleet.commands.top_frame import Room, Title, Wishes, frame
from fleet.commands.top_text import ASCII, Glyphs
from fleet.errors import FleetError
from fleet.picker_views import NoPickerError, PickerViews, Seen
from picker.admin.history import SAMPLES

INTERVAL_SECONDS = 1.0
DECISIONS = 200
QUIT = "q"
_KEY = re.compile(r"\x1b\[[A-D]|.", re.DOTALL)
_NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
}
_MAX_KEYS = 64


def top(url: str, console: Console, keyboard: TextIO, *, once: bool = False) -> int:
    """Show the picker until `q` or Ctrl-C; with `once`, or outside a terminal, print one snapshot.
    Raises `NoPickerError` and `SeveralPoolsError`.
    """
    views = PickerViews(url)
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
    def __init__(self, url: str, views: PickerViews, console: Console) -> None:
        self._url = url
        self._views = views
        self._console = console
        self._seen: Seen | None = None
        self._lost: str | None = None
        self._wishes = Wishes()
        self._record: list[RenderableType] | None = None

    def run(self, keys: Callable[[float], str]) -> None:
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            live.update(self._picture(), refresh=True)
            while True:
                due = time.monotonic() + INTERVAL_SECONDS
                if not self._wishes.is_paused:
                    self._look()
                live.update(self._picture(), refresh=True)
                while (left := due - time.monotonic()) > 0:
                    for key in _KEY.findall(keys(left)):
                        if self._ends_by(_NAMES.get(key, key)):
                            return
                        live.update(self._picture(), refresh=True)

    def _ends_by(self, key: str) -> bool:
        wishes = self._wishes
        if key.lower() == QUIT and not wishes.is_typing:
            return True
        if self._record is not None:
            self._record = None if key in ("enter", "escape") else self._record
        elif key == "enter" and wishes.chosen is not None and not wishes.is_typing:
            self._record = self._explain(wishes.chosen.request_id)
        else:
            self._wishes = wishes.pressed(key, self._seen)
        return False

    def _explain(self, request_id: str) -> list[RenderableType]:
        page = Layout(_glyphs(self._console), limit=SHOWN_CANDIDATES)
        end = page.text("Enter or Escape: back to the list", "dim")
        try:
            return [end, *explained(self._views.decision(request_id), page)]
        except FleetError as error:
            return [end, page.text(str(error), "bold red")]

    def _look(self) -> None:
        try:
            self._seen = self._views.look(SAMPLES, DECISIONS)
        except NoPickerError:  # not `SeveralPoolsError`, which waiting does not end
            since = time.strftime("%H:%M:%S")
            self._lost = self._lost or f"does not answer since {since}, trying again"
        else:
            self._lost = None

    def _picture(self) -> Group:
        if self._record is not None:
            return Group(*self._record)
        width, height = self._console.size
        room = Room(width, height, _glyphs(self._console))
        return Group(*frame(self._seen, Title(self._url, self._lost), room, self._wishes))


def _no_keys(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _glyphs(console: Console) -> Glyphs:
    return Glyphs() if console.encoding.lower().startswith("utf") else ASCII


@contextlib.contextmanager
def _keys(keyboard: TextIO) -> Iterator[Callable[[float], str]]:
    """Yield a function that reads a key pressed within a number of seconds, "" for none."""
    if not keyboard.isatty():
        yield _no_keys
        return
    descriptor = keyboard.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        if not ready:
            return ""
        # Read below the buffer of `keyboard`, which `select` does not see. End of file quits.
        return os.read(descriptor, _MAX_KEYS).decode(errors="replace") or QUIT

    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _ending_by_signals() -> Iterator[None]:
    """Let signals end the program as Ctrl-C does, and Ctrl-C too where the parent ignores it."""

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
    return Console(highlight=False), sys.stdin

"""Numbers, states and bars for a terminal, each in a given number of cells.

Clients chose much of the text, so only printable characters reach the terminal.
"""

from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

UNKNOWN = "-"
OUTCOME_STYLES = {
    "completed": "",
    "skipped": "",
    "waiting": "dim",
    "under-way": "dim",
    "client-gone": "dim",
    "shutdown": "dim",
}
# Words for outcomes, and for reasons why a request was refused or stopped.
_WORDS = {
    "under-way": "in progress",
    "client-gone": "client gone",
    "skipped": "not observed",
    "reset": "connection lost",
    "shutdown": "cut by a shutdown",
    "rejected-saturated": "queue full",
    "rejected-no-endpoints": "no endpoint",
    "rejected-ttl-expired": "waited too long",
    "rejected-context-cancelled": "client gone",
    "rejected-shutting-down": "shutting down",
    "evicted": "stopped for others",
    "evicted-queue-pressure": "stopped for others",
    "evicted-priority": "stopped for others",
}
STATES = {
    "healthy": ("good", "healthy", "cyan"),
    "suspect": ("doubtful", "suspect", "yellow"),
    "ejected": ("bad", "ejected", "bold red"),
    "on-trial": ("doubtful", "on trial", "yellow"),
    "unknown": ("bad", "unknown", "bold red"),
}


@dataclass(frozen=True, slots=True)
class Glyphs:
    full: str = "█"
    empty: str = "░"
    steps: str = "▁▂▃▄▅▆▇█"
    more: str = "…"
    good: str = "✓"
    doubtful: str = "!"
    bad: str = "✕"
    unprintable: str = "�"


ASCII = Glyphs("#", ".", "_.-=+*#@", "~", "+", "!", "x", "?")


def clean(text: str, glyphs: Glyphs) -> str:
    """Remove line breaks from `text`, and everything that a terminal would obey."""
    is_ascii = glyphs is ASCII
    return "".join(
        one if one.isprintable() and (one.isascii() or not is_ascii) else glyphs.unprintable
        for one in text
    )


def cell(text: str, width: int, glyphs: Glyphs, *, right: bool = False) -> str:
    """Return `text` in exactly `width` cells, cut with a mark if it is longer."""
    text = clean(text, glyphs)
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, max(0, width - 1)) + glyphs.more if width > 0 else ""
    blank = " " * (width - length)
    return blank + text if right else text + blank


def styled(parts: list[tuple[str, str]]) -> Text:
    line = Text(no_wrap=True, overflow="crop")
    for text, style in parts:
        line.append(text, style or None)
    return line


def bar(share: float, width: int, glyphs: Glyphs) -> str:
    filled = round(max(0.0, min(1.0, share)) * width)
    return glyphs.full * filled + glyphs.empty * (width - filled)


def sparkline(values: tuple[float | None, ...], highest: float, width: int, glyphs: Glyphs) -> str:
    """Draw the last `width` values, the newest at the right; unknown values are blank."""
    steps = glyphs.steps
    top = len(steps) - 1
    shown = [
        " " if value is None else steps[round(max(0.0, min(value / highest, 1.0)) * top)]
        for value in values[-width:]
    ]
    return "".join(shown).rjust(width)


def words(name: str) -> str:
    return _WORDS.get(name, name)


def count(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value * 100:.0f}%"


def rate(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    for below, factor, unit in ((0.001, 1e6, "us"), (1, 1e3, "ms"), (100, 1, "s")):
        if value < below:
            number = value * factor
            return f"{number:.1f}{unit}" if number < 10 else f"{number:.0f}{unit}"
    return f"{value:.0f}s" if value < 10_000 else f"{value / 3600:.0f}h"


def size(num_bytes: int) -> str:
    number, unit = float(num_bytes), "B"
    for bigger in ("kB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, bigger
    return f"{number:.1f} {unit}" if unit != "B" and number < 10 else f"{number:.0f} {unit}"

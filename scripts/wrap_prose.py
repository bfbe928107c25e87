"""Wrap the prose of the documentation at 100 columns: checks, or with `--write` writes.

A paragraph or a list item is filled anew if one of its lines is longer; all else stays as it is:
tables, code, headings, comments, and what fits. Code in backticks stays in one line.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS = 100
_FENCE = re.compile(r"\s*(```+)")
_ITEM = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
_WORD = re.compile(r"(?:`[^`]*`|\S)+")
# What begins a line of another kind, so that none of these may begin a wrapped one.
_OTHER = re.compile(r"\s*(?:\||#|>|<!--|```)")


def pages() -> Iterator[Path]:
    """Every page that is held to it."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def wrapped(text: str) -> str:
    """The text of a page with its long paragraphs filled; done twice it is the same."""
    lines: list[str] = []
    block: list[str] = []
    fence = ""
    for line in text.split("\n"):
        mark = _FENCE.match(line)
        if mark and (not fence or line.strip() == fence):
            fence = "" if fence else mark[1]
        is_prose = not fence and line.strip() and not _OTHER.match(line)
        if not is_prose or _ITEM.match(line):
            lines += _filled(block)
            block = []
        if is_prose:
            block.append(line)
        else:
            lines.append(line)
    return "\n".join(lines + _filled(block))


def _filled(block: Sequence[str]) -> list[str]:
    if not block or max(map(len, block)) <= COLUMNS:
        return list(block)
    item = _ITEM.match(block[0])
    first = item[0] if item else _indent(block[0])
    rest = _indent(block[1]) if len(block) > 1 else " " * len(first)
    line, lines = first, []
    for word in _WORD.findall(" ".join([block[0][len(first) :], *map(str.strip, block[1:])])):
        is_full = len(line) + 1 + len(word) > COLUMNS and line not in (first, rest)
        if is_full and not _ITEM.match(f"{word} ") and not _OTHER.match(word):
            lines.append(line)
            line = rest
        line += word if line in (first, rest) else f" {word}"
    return [*lines, line]


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def main() -> int:
    """Compare, or write; 1 when a page has longer lines."""
    late = [page for page in pages() if wrapped(page.read_text("utf-8")) != page.read_text("utf-8")]
    if sys.argv[1:] != ["--write"]:
        for page in late:
            print(f"{page.relative_to(ROOT)} has lines of more than {COLUMNS} columns: make format")
        return 1 if late else 0
    for page in late:
        page.write_text(wrapped(page.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

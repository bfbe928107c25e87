"""A recording's file → its lines, with their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from picker.errors import PickerError
from picker.recording.lines import FORMAT_VERSION, AnyLine, Header, decoded

MAX_LINE_BYTES = 256 * 2**20
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TRUNCATED = "truncated"


class RecordingError(PickerError):
    """A recording that cannot be replayed; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class NumberedLine:
    """A line and its number in the file, from one. `line` None: it was only half written, because
    the picker ended while it wrote.
    """

    number: int
    line: AnyLine | None


def read_recording(path: Path) -> Iterator[NumberedLine]:
    """The lines of the file, as they are asked for.

    Raises `RecordingError` for a file that cannot be read, for one that does not begin with a
    header of this format, and for a line that is none; a half-written one may be the last of a run.
    """
    try:
        with path.open("rb") as file:
            yield from _lines(path, file)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from error


def _lines(path: Path, file: BinaryIO) -> Iterator[NumberedLine]:
    number, torn = 0, None
    while text := file.readline(MAX_LINE_BYTES):
        number += 1
        if len(text) >= MAX_LINE_BYTES:
            raise RecordingError(f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes")
        try:
            line = decoded(text.rstrip(b"\n"))
        except _UNREADABLE as error:
            if torn is not None or number == 1:
                raise _no_line(path, number, error) from error
            torn = error if _may_be_torn(text, error) else None
            if torn is None:
                raise _no_line(path, number, error) from error
            continue
        if torn is not None:
            if not isinstance(line, Header):
                raise _no_line(path, number - 1, torn) from torn
            yield NumberedLine(number - 1, None)
            torn = None
        _check(path, number, line)
        yield NumberedLine(number, line)
    if torn is not None:
        yield NumberedLine(number, None)
    if not number:
        raise RecordingError(f"{path}: empty, no recording")


def _may_be_torn(text: bytes, error: Exception) -> bool:
    """Whether it looks like the beginning of a line."""
    return not text.endswith(b"\n") or _TRUNCATED in str(error)


def _no_line(path: Path, number: int, error: Exception) -> RecordingError:
    what = "no recording" if number == 1 else "no line of a recording"
    return RecordingError(f"{path}:{number}: {what}: {error}")


def _check(path: Path, number: int, line: AnyLine) -> None:
    if number == 1 and not isinstance(line, Header):
        raise RecordingError(f"{path}:1: no recording: it does not begin with a header")
    if isinstance(line, Header) and line.format_version != FORMAT_VERSION:
        text = f"format {line.format_version}, this version reads {FORMAT_VERSION}"
        raise RecordingError(f"{path}:{number}: {text}")

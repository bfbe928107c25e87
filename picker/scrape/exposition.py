"""Finds a few series in a Prometheus text exposition without parsing the rest.

A worker's page is mostly histogram buckets that the picker does not read. `scan` searches each name
with `bytes.find`, decodes only its samples, skips malformed lines, and never raises.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType

import msgspec

MAX_REMEMBERED_BYTES = 1024
_NO_LABELS: Mapping[str, str] = MappingProxyType({})
_BLANKS = b" \t"
_AFTER_NAME = b"{ \t"
_NEWLINE = 10
_LABEL = re.compile(
    rb'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*(,?)', re.DOTALL
)
_CLOSE = re.compile(rb"[ \t]*}")
_ESCAPES = {ord("\\"): "\\", ord('"'): '"', ord("n"): "\n"}


class PageSample(msgspec.Struct, frozen=True):
    """One line of the exposition. `value` is unchecked: it may be NaN, infinite or negative."""

    labels: Mapping[str, str]
    value: float
    timestamp_ms: int | None = None


def scan(exposition: bytes, names: Iterable[str]) -> dict[str, tuple[PageSample, ...]]:
    """Return the samples of each wanted series that has any, in the order of the page."""
    found: dict[str, tuple[PageSample, ...]] = {}
    for name in names:
        sought = name.encode()
        if sought in exposition:  # most pages lack most names
            samples = [_sample(line) for line in _lines(exposition, sought)]
            if known := tuple(one for one in samples if one is not None):
                found[name] = known
    return found


def only(page: bytes, names: Iterable[str]) -> bytes:
    """Return the lines on which `scan` could find samples of these names, grouped by name."""
    lines = [
        b"%b%b\n" % (name, rest)
        for name in map(str.encode, names)
        for rest in _lines(page, name)
        if rest[:1] in _AFTER_NAME
    ]
    return b"".join(lines)


def greatest(exposition: bytes, name: str) -> PageSample | None:
    """Return a series' sample with the greatest value, the first of equals; decodes few labels."""
    found: list[tuple[float, int, bytes]] = []
    for index, line in enumerate(_lines(exposition, name.encode())):
        value = _plain_value(line)
        if value is not None and not math.isnan(value):
            # Sorted in reverse, so that of equal values the first line comes first.
            found.append((value, -index, line))
    found.sort(reverse=True)
    samples = (_sample(line) for _, _, line in found)
    return next((sample for sample in samples if sample is not None), None)


def _plain_value(line: bytes) -> float | None:
    """Return the value on a line that is a sample; undefined for any other line."""
    if b"#" in line:  # only decoding distinguishes a label from an exemplar
        sample = _sample(line)
        return None if sample is None else sample.value
    words = line[line.rfind(b"}") + 1 :].split(None, 1)
    return _number(words[0]) if words else None


def _lines(page: bytes, name: bytes) -> Iterator[bytes]:
    position = page.find(name)
    while position >= 0:
        after = position + len(name)
        if _starts_line(page, position):
            end = page.find(b"\n", after)
            end = len(page) if end < 0 else end
            yield page[after:end]
            after = end
        position = page.find(name, after)


def _starts_line(page: bytes, position: int) -> bool:
    position -= 1
    while position >= 0 and page[position] in _BLANKS:
        position -= 1
    return position < 0 or page[position] == _NEWLINE


def _sample(rest: bytes) -> PageSample | None:
    """Decode the rest of a line after the name; None if it is not a sample of that name."""
    labels = _NO_LABELS
    body = rest.lstrip(_BLANKS)
    if body.startswith(b"{"):
        decoded, body = _labelled(body)
        if decoded is None:
            return None
        labels = decoded
    elif len(body) == len(rest):
        return None  # `name` is only the beginning of a longer name
    words = body.split()
    if b"#" in body:
        # A word that starts with '#' opens an exemplar, which is ignored.
        words = words[: next((i for i, w in enumerate(words) if w.startswith(b"#")), len(words))]
    if not 1 <= len(words) <= 2:
        return None
    value = _number(words[0])
    timestamp = _number(words[1]) if len(words) == 2 else None
    if value is None or (len(words) == 2 and (timestamp is None or timestamp % 1 != 0)):
        return None
    return PageSample(labels, value, None if timestamp is None else int(timestamp))


def _number(word: bytes) -> float | None:
    # float() also accepts digit separators, which the format does not.
    if b"_" in word:
        return None
    try:
        return float(word)
    except ValueError:
        return None


def _labelled(body: bytes) -> tuple[Mapping[str, str] | None, bytes]:
    """Return the labels at the start of `body`, and the rest; (None, …) when malformed."""
    end = body.rfind(b"}") + 1
    if 0 < end <= MAX_REMEMBERED_BYTES:
        labels = _remembered_labels(body[:end])
        if labels is not None:
            return labels, body[end:]
    return _labels(body)


# The labels of a worker do not change between scrapes, so short ones are decoded once.
@lru_cache(maxsize=4096)
def _remembered_labels(block: bytes) -> Mapping[str, str] | None:
    labels, rest = _labels(block)
    return None if labels is None or rest else MappingProxyType(labels)


def _labels(body: bytes) -> tuple[dict[str, str] | None, bytes]:
    labels: dict[str, str] = {}
    position = 1
    while True:
        match = _LABEL.match(body, position)
        if match is None:
            break
        name = match[1].decode()
        if name in labels:
            return None, b""
        labels[name] = _unescape(match[2])
        position = match.end()
        if not match[3]:
            break
    end = _CLOSE.match(body, position)
    return (None, b"") if end is None else (labels, body[end.end() :])


def _unescape(raw: bytes) -> str:
    text = raw.decode(errors="replace")
    if "\\" not in text:
        return text
    parts: list[str] = []
    characters = iter(text)
    for character in characters:
        if character != "\\":
            parts.append(character)
            continue
        escaped = next(characters, "")
        parts.append(_ESCAPES.get(ord(escaped), "\\" + escaped) if escaped else "\\")
    return "".join(parts)

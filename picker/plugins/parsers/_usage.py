"""Usage in responses: the shapes of the APIs, and readers of JSON, SSE and gRPC bodies.

A shape is a function from one JSON document (or one event's data) to its usage, None if it has
none. Only the members that count are decoded. Numbers may be written as strings, and fractions are
cut off.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from picker.plugins.parsers._json_bodies import UNREADABLE
from picker.types import Usage

USAGE = b"usage"
META_INFO = b"meta_info"
DEFAULT_LIMIT_BYTES = 4 * 2**20  # a document is held until its end
TAIL_BYTES = 16 * 1024  # the end of a longer document that is stored
_MAX_DIGITS = 20
_MAX_COUNT = 2**63 - 1
_FINAL_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})

Shape = Callable[[bytes], Usage | None]


def merge(known: Usage | None, said: Usage) -> Usage:
    """Return `known` updated with the numbers of a further piece. The piece's total counts only if
    it also has prompt and completion tokens; else the total is their sum.
    """
    prompt = said.prompt_tokens or (known.prompt_tokens if known else 0)
    completion = said.completion_tokens or (known.completion_tokens if known else 0)
    total = said.prompt_tokens and said.completion_tokens and said.total_tokens
    cached = said.cached_tokens
    if not cached and known is not None and known.cached_tokens is not None:
        cached = known.cached_tokens
    return Usage(prompt, completion, total or prompt + completion, cached)


class _Counts(msgspec.Struct):
    """The `usage` of the OpenAI and the Anthropic APIs."""

    prompt_tokens: Any = None
    input_tokens: Any = None
    completion_tokens: Any = None
    output_tokens: Any = None
    total_tokens: Any = None
    prompt_tokens_details: Any = None
    input_tokens_details: Any = None
    cache_read_input_tokens: Any = None


class _Document(msgspec.Struct):
    """A document with a `usage`, or an event with one inside its `response` or `message`."""

    usage: _Counts | None = None
    type: Any = None
    response: msgspec.Raw = msgspec.Raw()
    message: msgspec.Raw = msgspec.Raw()


class _MetaInfo(msgspec.Struct):
    prompt_tokens: Any = None
    completion_tokens: Any = None
    cached_tokens: Any = None
    finish_reason: Any = None


class _Generated(msgspec.Struct):
    meta_info: _MetaInfo | None = None


_decode_document = msgspec.json.Decoder(_Document).decode
_decode_generated = msgspec.json.Decoder(_Generated).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def openai_usage(document: bytes) -> Usage | None:
    """Read `usage` of the OpenAI APIs; events of the Responses API count only if final."""
    decoded = _decode_document(document)
    if decoded.response and isinstance(decoded.type, str) and decoded.type in _FINAL_EVENTS:
        decoded = _decode_document(decoded.response)
    counts = decoded.usage
    if counts is None:
        return None
    details = counts.prompt_tokens_details or counts.input_tokens_details
    said = Usage(
        prompt_tokens=_first_count(counts.prompt_tokens, counts.input_tokens),
        completion_tokens=_first_count(counts.completion_tokens, counts.output_tokens),
        total_tokens=_count(counts.total_tokens) or 0,
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
    )
    return None if said == Usage() else said


def anthropic_usage(document: bytes) -> Usage | None:
    """Read `usage` of a message, a `message_start` or a `message_delta`. The generated tokens of a
    `message_start` are only the first few and do not count.
    """
    decoded = _decode_document(document)
    is_start = decoded.type == "message_start"
    if is_start and decoded.message:
        decoded = _decode_document(decoded.message)
    counts = decoded.usage
    if counts is None:
        return None
    said = Usage(
        prompt_tokens=_count(counts.input_tokens) or 0,
        completion_tokens=0 if is_start else _count(counts.output_tokens) or 0,
        cached_tokens=_count(counts.cache_read_input_tokens),
    )
    return None if said == Usage() else said


def sglang_usage(document: bytes) -> Usage | None:
    """Read `meta_info` of a response of SGLang's `/generate`; the generated tokens of all readable
    answers to one prompt are added up.
    """
    answers = _decode_list(document) if _is_list(document) else [document]
    usage: Usage | None = None
    for answer in answers:
        try:
            said = _of_meta_info(_decode_generated(answer).meta_info)
        except UNREADABLE:
            continue
        if said is not None:
            generated = usage.completion_tokens if usage else 0
            added = replace(said, completion_tokens=said.completion_tokens + generated)
            usage = merge(usage, added)
    return usage


def sglang_event_usage(document: bytes) -> Usage | None:
    """Read `meta_info` of an event of `/generate`; only an event with a finish reason counts."""
    if _is_list(document):
        return None
    info = _decode_generated(document).meta_info
    return _of_meta_info(info) if info is not None and info.finish_reason is not None else None


def _is_list(document: bytes) -> bool:
    return document.lstrip()[:1] == b"["


def _of_meta_info(info: _MetaInfo | None) -> Usage | None:
    if info is None:
        return None
    said = Usage(
        prompt_tokens=_count(info.prompt_tokens) or 0,
        completion_tokens=_count(info.completion_tokens) or 0,
        cached_tokens=_count(info.cached_tokens),
    )
    return None if said == Usage() else said


def _first_count(*values: object) -> int:
    return next((count for value in values if (count := _count(value))), 0)


def _count(value: object) -> int | None:
    """Return a number of tokens that is written as a number or as text; None for another value."""
    if isinstance(value, str) and len(value) <= _MAX_DIGITS:
        try:
            value = float(value) if "." in value else int(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value <= _MAX_COUNT else None


class JsonUsage:
    """Reads a response that is one JSON document, which is stored until its end, up to the limit.

    Only the end of a longer document, such as a list of embeddings, is stored, because engines
    write their `usage` there.
    """

    def __init__(self, shape: Shape, marker: bytes, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._shape = shape
        self._marker = marker
        self._limit = limit_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._usage: Usage | None = None

    @property
    def usage(self) -> Usage | None:
        return self._usage

    def feed(self, data: bytes, is_last: bool) -> None:
        self._num_bytes += len(data)
        self._pieces.append(data)
        # Join and cut at once, so that the pieces of an endless document never add up.
        if self._num_bytes > self._limit:
            self._pieces = [b"".join(self._pieces)[-TAIL_BYTES:]]
        if is_last:
            document = b"".join(self._pieces)
            self._pieces.clear()
            if self._num_bytes > self._limit:
                document = _last_member(document, self._marker)
            # Most documents without usage, such as errors, need no decoding.
            if self._marker in document:
                usage = _read(self._shape, document)
                if usage is None:  # perhaps the end of a document whose beginning was not shown
                    usage = _read(self._shape, _last_member(document, self._marker))
                self._usage = usage


def _last_member(tail: bytes, name: bytes) -> bytes:
    """Return the end of a document, from its last member called `name`, as its own document."""
    at = tail.rfind(b'"%b"' % name)
    return b"" if at < 0 else b"{" + tail[at:]


class SseEvents:
    """Joins the pieces of a stream into its events, and yields those whose data contain `marker`.

    Lines end with LF, CR or CRLF; an empty line ends an event; only `data` fields matter (HTML
    Living Standard, "Server-sent events"). The text since the last empty line is held back, and
    nothing is read twice. Most pieces are whole events without the marker, and one search skips
    them. CR is turned into LF on arrival; a CR at the end of a piece waits for the next piece,
    which may begin with the LF of the same line end.
    """

    __slots__ = ("_limit", "_marker", "_pending", "_return_held")

    def __init__(self, marker: bytes, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._marker = marker
        self._limit = limit_bytes
        self._pending = bytearray()
        self._return_held = False

    def feed(self, data: bytes, is_last: bool) -> list[list[bytes]]:
        """Return the events that `data` completes, each as the values of its `data` lines.

        The end of the stream ends an event, too. An event longer than the limit is read in parts,
        each of whole lines.
        """
        if self._return_held or b"\r" in data:
            data = self._with_newlines(data, is_last)
        pending = self._pending
        if not pending and self._marker not in data and (is_last or data.endswith(b"\n\n")):
            return []
        # The two line ends of an empty line may be in different pieces.
        searched = max(0, len(pending) - 1)
        pending += data
        end = len(pending) if is_last else pending.rfind(b"\n\n", searched) + 2
        if end < 2:
            if len(pending) <= self._limit:
                return []
            end = pending.rfind(b"\n") + 1
        complete = bytes(pending[:end])
        # A single line longer than the limit is dropped, too.
        del pending[: end or None]
        return self._events(complete) if self._marker in complete else []

    def _with_newlines(self, data: bytes, is_last: bool) -> bytes:
        if self._return_held:
            data = b"\r" + data
        self._return_held = data.endswith(b"\r") and not is_last
        if self._return_held:
            data = data[:-1]
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _events(self, complete: bytes) -> list[list[bytes]]:
        return [
            [_data_of(line) for line in event.split(b"\n") if line.startswith(b"data:")]
            for event in complete.split(b"\n\n")
            if self._marker in event
        ]


def _data_of(line: bytes) -> bytes:
    return line[6:] if line.startswith(b"data: ") else line[5:]


class SseUsage:
    def __init__(self, shape: Shape, marker: bytes) -> None:
        self._shape = shape
        self._marker = marker
        self._events = SseEvents(marker)
        self._usage: Usage | None = None

    @property
    def usage(self) -> Usage | None:
        return self._usage

    def feed(self, data: bytes, is_last: bool) -> None:
        for lines in self._events.feed(data, is_last):
            if not self._read_lines(lines) and len(lines) > 1:
                self._take(_read(self._shape, b"\n".join(lines)))

    def _read_lines(self, lines: list[bytes]) -> bool:
        """Return whether any line has usage by itself: some servers end events with one newline."""
        found = False
        for line in lines:
            if self._marker in line:
                found = self._take(_read(self._shape, line)) or found
        return found

    def _take(self, said: Usage | None) -> bool:
        if said is None:
            return False
        self._usage = merge(self._usage, said)
        return True


def _read(shape: Shape, document: bytes) -> Usage | None:
    try:
        said = shape(document)
    except UNREADABLE:
        return None
    return said if said is None else merge(None, said)


def is_event_stream(content_type: str) -> bool:
    return "text/event-stream" in content_type.lower()


def usage_reader(
    content_type: str, shape: Shape, marker: bytes = USAGE, event_shape: Shape | None = None
) -> JsonUsage | SseUsage:
    """Create a reader for a response; events may have a different shape from documents."""
    if is_event_stream(content_type):
        return SseUsage(event_shape or shape, marker)
    return JsonUsage(shape, marker)

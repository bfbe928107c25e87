# Apart: formats of files, which nothing else of the bench knows.
"""Trace files: Mooncake's JSON lines, Azure's CSV, and recordings of `picker --record`."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, TextIO, TypeVar
from zlib import crc32

import msgspec

from fleet.bench.workload import TracedRequest
from fleet.errors import UsageError

MOONCAKE_BLOCK_TOKENS = 512
RECORDING_BLOCK_TOKENS = 64
_TOKEN_BYTES = 4
_AZURE = {"at": "TIMESTAMP", "prompt": "ContextTokens", "answer": "GeneratedTokens"}
_MOST_SECONDS = 366 * 86_400.0
_MOST_TOKENS = 9_999_999  # as of --input-tokens
_Time = Annotated[float, msgspec.Meta(ge=0)]
_Prompt = Annotated[int, msgspec.Meta(ge=1, le=_MOST_TOKENS)]
# Published traces have requests that were answered with nothing; no API can be asked for that.
_Answer = Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]
T = TypeVar("T")


class _MooncakeLine(msgspec.Struct):
    """Of https://github.com/kvcache-ai/Mooncake, FAST25: milliseconds, tokens, ids of blocks."""

    timestamp: _Time
    input_length: _Prompt
    output_length: _Answer
    hash_ids: list[int] = []


class _AzureLine(msgspec.Struct, rename=_AZURE):
    at: datetime
    prompt: _Prompt
    answer: _Answer


class _RecordedUsage(msgspec.Struct):
    completion_tokens: _Answer = 0


class RecordedRequest(msgspec.Struct):
    """What a load takes of a recorded request; `max_output_tokens` is the client's, and may be
    anything.
    """

    received_at: _Time
    max_output_tokens: int | None = None
    prompts: tuple[bytes, ...] | None = None
    prompt_bytes: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] | None = None
    objective: str = ""


class _RecordedLine(msgspec.Struct):
    """Of a recording: decisions have `request`, ends `usage`, other lines neither."""

    line: str
    number: int = 0
    again: int | bool | None = None  # of a header whether, of a decision which
    config: str | int = ""  # of a header its text, of a decision the number of one
    request: RecordedRequest | None = None
    usage: _RecordedUsage | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """Its first configuration, its requests by number, and the tokens of those that were answered
    with some.
    """

    config: str | None
    requests: Mapping[int, RecordedRequest]
    ended: Mapping[int, int]


def read_recording(path: Path) -> Recording:
    """The file of `--replay`. Raises as `read_trace` does."""
    return _read(path, "--replay", _recorded)


def read_trace(path: Path, output_tokens: int) -> list[TracedRequest]:
    """The requests of a file in the order of their times, which begin at 0. `output_tokens` is for
    those whose answer's length nobody noted. Raises `UsageError`, which names the line and field of
    what cannot be.
    """

    def sorted_rows(file: TextIO) -> list[TracedRequest]:
        return sorted(_requests(file, output_tokens), key=lambda one: one.at_seconds)

    rows = _read(path, "--trace", sorted_rows)
    if not rows:
        raise UsageError(f"--trace: {path} has no request")
    begun, lasts = rows[0].at_seconds, rows[-1].at_seconds - rows[0].at_seconds
    if lasts > _MOST_SECONDS:
        raise UsageError(
            f"--trace: {path} lasts {lasts / _MOST_SECONDS:,.0f} years; Mooncake's timestamps are "
            "milliseconds"
        )
    return [replace(one, at_seconds=one.at_seconds - begun) for one in rows]


def _read(path: Path, flag: str, read: Callable[[TextIO], T]) -> T:
    try:
        with path.open(encoding="utf-8") as file:
            return read(file)
    except OSError as error:
        raise UsageError(f"{flag}: {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        text = f"{flag}: {path} is no text; if it is compressed, decompress it"
        raise UsageError(text) from error
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{flag}: {path}: {error}") from error


def _requests(file: TextIO, output_tokens: int) -> Iterator[TracedRequest]:
    first = file.readline()
    file.seek(0)
    if first.startswith(_AZURE["at"]):
        return _azure(file)
    if first.strip() and not first.startswith("{"):
        raise ValueError(
            "is no trace that is known: Mooncake's JSON lines, Azure's CSV, or a recording of "
            "`picker --record`"
        )
    if '"line":"header"' in first.replace(" ", ""):
        return _of_recording(_recorded(file), output_tokens)
    return _mooncake(file)


def _decoded(lines: Iterable[str], kind: type[T]) -> Iterator[T]:
    """JSON lines; empty ones are skipped."""
    decode = msgspec.json.Decoder(kind).decode
    for number, text in enumerate(lines, 1):
        try:
            if text.strip():
                yield decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"line {number}: {error}") from error


def _mooncake(lines: Iterable[str]) -> Iterator[TracedRequest]:
    for one in _decoded(lines, _MooncakeLine):
        lengths = one.input_length, max(1, one.output_length)
        yield TracedRequest(one.timestamp / 1e3, *lengths, one.hash_ids, MOONCAKE_BLOCK_TOKENS)


def _azure(lines: Iterable[str]) -> Iterator[TracedRequest]:
    table = csv.DictReader(lines, restkey="more")
    if missing := [name for name in _AZURE.values() if name not in (table.fieldnames or ())]:
        raise ValueError(f"there is no column {missing[0]}")
    for row in table:
        try:
            one = msgspec.convert(row, _AzureLine, strict=False)
        except msgspec.ValidationError as error:
            text = str(error).replace(", got `str`", "")  # as every cell is
            raise ValueError(f"line {table.line_num}: {text}") from error
        yield TracedRequest(one.at.timestamp(), one.prompt, max(1, one.answer))


def _recorded(lines: Iterable[str]) -> Recording:
    config: str | None = None
    requests: dict[int, RecordedRequest] = {}
    ended: dict[int, int] = {}
    for one in _decoded(lines, _RecordedLine):
        if one.line == "header" and config is None and isinstance(one.config, str):
            config = one.config
        elif one.request is not None and one.again is None:
            requests[one.number] = one.request
        elif one.usage is not None and one.usage.completion_tokens:
            ended[one.number] = one.usage.completion_tokens
    return Recording(config, requests, ended)


def _of_recording(found: Recording, output_tokens: int) -> Iterator[TracedRequest]:
    """Its prompts are not sent: only which of them begin alike, in blocks of 64 tokens."""
    for number, request in found.requests.items():
        prompts = request.prompts or ()
        sizes = request.prompt_bytes or tuple(map(len, prompts))
        asked = request.max_output_tokens or 0
        known = asked if 0 < asked <= _MOST_TOKENS else output_tokens
        yield TracedRequest(
            request.received_at,
            max(1, sum(sizes) // _TOKEN_BYTES),  # of a text that is shorter than a token
            found.ended.get(number, known),
            tuple(_chain(prompts[0])) if len(prompts) == 1 else (),
            RECORDING_BLOCK_TOKENS,
        )


def _chain(prompt: bytes) -> Iterator[int]:
    """An id of each full block, of it and of all before it."""
    step, value = RECORDING_BLOCK_TOKENS * _TOKEN_BYTES, 0
    for at in range(0, len(prompt) - step + 1, step):
        value = crc32(prompt[at : at + step], value)
        yield value

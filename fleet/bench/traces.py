# Apart: formats of files, which nothing else of the bench knows.
"""Trace files: Mooncake's JSON lines, Azure's CSV, and recordings of `picker --record`."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from zlib import crc32

import msgspec

from fleet.bench.workload import TracedRequest
from fleet.errors import UsageError
from picker.types import Usage

MOONCAKE_BLOCK_TOKENS = 512
RECORDING_BLOCK_TOKENS = 64
_TOKEN_BYTES = 4
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _MooncakeLine(msgspec.Struct):
    """Of https://github.com/kvcache-ai/Mooncake, FAST25: milliseconds, tokens, ids of blocks."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class _RecordedRequest(msgspec.Struct):
    received_at: float
    max_output_tokens: int | None = None
    prompts: tuple[bytes, ...] | None = None
    prompt_bytes: tuple[int, ...] | None = None


class _RecordedLine(msgspec.Struct):
    """Of a recording: decisions have `request`, ends `usage`, other lines neither."""

    line: str
    number: int = 0
    again: int | bool | None = None  # of a header whether, of a decision which
    request: _RecordedRequest | None = None
    usage: Usage | None = None


def read_trace(path: Path, output_tokens: int) -> list[TracedRequest]:
    """The requests of a file in the order of their times, which begin at 0. `output_tokens` is for
    those whose answer's length nobody noted. Raises `UsageError`.
    """
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
            file.seek(0)
            found = _reader(first, output_tokens)(file)
            rows = sorted(found, key=lambda one: one.at_seconds)
    except OSError as error:
        raise UsageError(f"--trace: {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, ValueError, KeyError) as error:
        text = str(error).partition("\n")[0]
        raise UsageError(f"--trace: {path} is no trace that is known: {text}") from error
    if not rows:
        raise UsageError(f"--trace: {path} has no request")
    begun = rows[0].at_seconds
    return [replace(one, at_seconds=one.at_seconds - begun) for one in rows]


def _reader(first: str, output_tokens: int) -> Callable[[Iterable[str]], Iterator[TracedRequest]]:
    if first.startswith(_AZURE[0]):
        return _azure
    if '"line":"header"' in first.replace(" ", ""):
        return lambda lines: _recording(lines, output_tokens)
    return _mooncake


def _mooncake(lines: Iterable[str]) -> Iterator[TracedRequest]:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    for number, text in enumerate(lines, 1):
        try:
            one = decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"line {number}: {error}") from error
        at, ids = one.timestamp / 1e3, one.hash_ids
        lengths = max(1, one.input_length), max(1, one.output_length)
        yield TracedRequest(at, *lengths, ids, MOONCAKE_BLOCK_TOKENS)


def _azure(lines: Iterable[str]) -> Iterator[TracedRequest]:
    table = csv.DictReader(lines)
    if missing := [name for name in _AZURE if name not in (table.fieldnames or ())]:
        raise ValueError(f"there is no column {missing[0]}")
    for row in table:
        at = datetime.fromisoformat(row[_AZURE[0]]).timestamp()
        yield TracedRequest(at, max(1, int(row[_AZURE[1]])), max(1, int(row[_AZURE[2]])))


def _recording(lines: Iterable[str], output_tokens: int) -> Iterator[TracedRequest]:
    """Its prompts are not sent: only which of them begin alike, in blocks of 64 tokens."""
    decode = msgspec.json.Decoder(_RecordedLine).decode
    requests: dict[int, _RecordedRequest] = {}
    ended: dict[int, int] = {}
    for text in lines:
        one = decode(text)
        if one.request is not None and one.again is None:
            requests[one.number] = one.request
        elif one.usage is not None and one.usage.completion_tokens:
            ended[one.number] = one.usage.completion_tokens
    for number, request in requests.items():
        prompts = request.prompts or ()
        sizes = request.prompt_bytes or tuple(map(len, prompts))
        length = ended.get(number) or request.max_output_tokens or output_tokens
        yield TracedRequest(
            request.received_at,
            max(1, sum(sizes) // _TOKEN_BYTES),
            max(1, length),
            tuple(_chain(prompts[0])) if len(prompts) == 1 else (),
            RECORDING_BLOCK_TOKENS,
        )


def _chain(prompt: bytes) -> Iterator[int]:
    """An id of each full block, of it and of all before it."""
    step, value = RECORDING_BLOCK_TOKENS * _TOKEN_BYTES, 0
    for at in range(0, len(prompt) - step + 1, step):
        value = crc32(prompt[at : at + step], value)
        yield value

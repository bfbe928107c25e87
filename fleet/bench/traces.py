"""Trace files: Mooncake's JSON lines, Azure's CSV, and recordings of `picker --record`."""

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from zlib import crc32

import msgspec

from fleet.bench.workload import TracedRequest
from fleet.errors import UsageError
from picker.recording.lines import (
    DecisionLine,
    End,
    Header,
    RecordingError,
    RequestLine,
    read_recording,
)

MOONCAKE_BLOCK_TOKENS = 512  # fixed by the trace's format
RECORDING_BLOCK_TOKENS = 64
_TOKEN_BYTES = 4
_AZURE = {"at": "TIMESTAMP", "prompt": "ContextTokens", "answer": "GeneratedTokens"}
_MAX_SECONDS = 366 * 86_400.0  # longer ones have other units, such as nanoseconds
_MAX_TOKENS = 9_999_999  # like --input-tokens
_Time = Annotated[float, msgspec.Meta(ge=0)]
_Prompt = Annotated[int, msgspec.Meta(ge=1, le=_MAX_TOKENS)]
# Published traces contain requests with empty answers, which no API can be asked for.
_Answer = Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKENS)]


class _MooncakeLine(msgspec.Struct):
    """A line of https://github.com/kvcache-ai/Mooncake, FAST25: milliseconds, tokens, ids of
    blocks.
    """

    timestamp: _Time
    input_length: _Prompt
    output_length: _Answer
    hash_ids: list[int] = []


class _AzureLine(msgspec.Struct, rename=_AZURE):
    at: datetime
    prompt: _Prompt
    answer: _Answer


# Of a request: the beginning of its run of the picker, and its number within that.
Number = tuple[float, int]


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording's first configuration, all runs' requests on one clock, and answers' tokens."""

    config: str
    requests: Mapping[Number, tuple[float, RequestLine]]
    ended: Mapping[Number, int]


def recording(path: Path, flag: str) -> Recording:
    config, begun, later = "", 0.0, 0.0
    requests: dict[Number, tuple[float, RequestLine]] = {}
    ended: dict[Number, int] = {}
    try:
        for one in read_recording(path):
            line = one.line
            if isinstance(line, Header):
                config, begun = config or line.config, line.started_at_unix
                later = begun - line.started_at  # each run has a clock of its own
            elif isinstance(line, DecisionLine) and line.again is None:
                sizes = line.request.prompt_bytes or ()
                if min(line.request.received_at, *sizes, 0) < 0:
                    raise UsageError(f"{flag}: {path}:{one.number}: a time or length is below 0")
                requests[begun, line.number] = later + line.request.received_at, line.request
            elif isinstance(line, End) and line.usage is not None:
                if not 0 <= line.usage.completion_tokens <= _MAX_TOKENS:
                    text = f"usage.completion_tokens is not from 0 to {_MAX_TOKENS:,}"
                    raise UsageError(f"{flag}: {path}:{one.number}: {text}")
                ended[begun, line.number] = line.usage.completion_tokens
    except RecordingError as error:
        raise UsageError(f"{flag}: {error}") from error
    return Recording(config, requests, {which: many for which, many in ended.items() if many})


def read_trace(path: Path, output_tokens: int) -> list[TracedRequest]:
    """Read the requests of a file in the order of their times, which begin at 0. `output_tokens` is
    for requests whose answer has no recorded length. Raises `UsageError` with line and field.
    """
    rows = sorted(_requests(path, output_tokens), key=lambda one: one.at_seconds)
    if not rows:
        raise UsageError(f"--trace: {path} has no request")
    begun, lasts = rows[0].at_seconds, rows[-1].at_seconds - rows[0].at_seconds
    if lasts > _MAX_SECONDS:
        raise UsageError(
            f"--trace: {path} lasts {lasts / _MAX_SECONDS:,.0f} years; Mooncake's timestamps are "
            "milliseconds"
        )
    return [replace(one, at_seconds=one.at_seconds - begun) for one in rows]


def _requests(path: Path, output_tokens: int) -> Iterable[TracedRequest]:
    try:
        with path.open(encoding="utf-8") as file:
            first = file.readline()
            file.seek(0)
            if first.startswith(_AZURE["at"]):
                return list(_azure(file))
            if first.strip() and not first.startswith("{"):
                raise ValueError(
                    "is not a known trace: Mooncake's JSON lines, Azure's CSV, or a recording "
                    "of `picker --record`"
                )
            if '"line":"header"' not in first.replace(" ", ""):
                return list(_mooncake(file))
    except OSError as error:
        raise UsageError(f"--trace: {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        text = f"--trace: {path} is no text; if it is compressed, decompress it"
        raise UsageError(text) from error
    except (ValueError, csv.Error) as error:
        raise UsageError(f"--trace: {path}: {error}") from error
    return _recorded(recording(path, "--trace"), output_tokens)


def _mooncake(lines: Iterable[str]) -> Iterator[TracedRequest]:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            one = decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"line {number}: {error}") from error
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
            text = str(error).replace(", got `str`", "")  # like every cell
            raise ValueError(f"line {table.line_num}: {text}") from error
        at = one.at if one.at.tzinfo else one.at.replace(tzinfo=UTC)  # on every machine
        yield TracedRequest(at.timestamp(), one.prompt, max(1, one.answer))


def _recorded(found: Recording, output_tokens: int) -> Iterator[TracedRequest]:
    """Yield requests. Prompts are not sent: only equal leading blocks of 64 tokens stay equal."""
    for number, (at, request) in found.requests.items():
        prompts = request.prompts or ()
        sizes = request.prompt_bytes or tuple(map(len, prompts))
        asked = request.max_output_tokens or 0  # a client has chosen it
        known = asked if 0 < asked <= _MAX_TOKENS else output_tokens
        yield TracedRequest(
            at,
            max(1, sum(sizes) // _TOKEN_BYTES),  # for a text that is shorter than a token
            found.ended.get(number, known),
            tuple(_chain(prompts[0])) if len(prompts) == 1 else (),
            RECORDING_BLOCK_TOKENS,
        )


def _chain(prompt: bytes) -> Iterator[int]:
    """Yield an id of each full block, which depends on it and on all blocks before it."""
    step, value = RECORDING_BLOCK_TOKENS * _TOKEN_BYTES, 0
    for at in range(0, len(prompt) - step + 1, step):
        value = crc32(prompt[at : at + step], value)
        yield value


def read_recorded(path: Path) -> tuple[str, list[str]]:
    """Return a recording's first configuration, and notes on what it lacks. Raises `UsageError`."""
    found = recording(path, "--replay")
    if not found.requests:
        raise UsageError(f"--replay: {path} has no request")
    return found.config, list(_lacks(found))


def _lacks(found: Recording) -> Iterator[str]:
    every = [request for _, request in found.requests.values()]
    without_prompt = sum(one.prompts is None or len(one.prompts) != 1 for one in every)
    without_length = len(found.requests.keys() - found.ended.keys())
    with_objective = sum(bool(one.objective) for one in every)
    yield (
        f"{len(every):,} recorded requests, with their times and, in blocks of 64 tokens, "
        "their prompts. A recording does not have requests that were rejected before "
        "scheduling, nor how fast the workers were (they are --worker's); and a turn comes at "
        "its recorded time, however long the answer before it takes."
    )
    if without_prompt:
        yield f"{without_prompt:,} have no recorded prompt, and share no beginning here."
    if without_length:
        yield (
            f"{without_length:,} have no recorded length of their answer: their max_tokens is "
            "used, or --output-tokens."
        )
    if with_objective:
        yield f"{with_objective:,} have an objective, whose priority is not simulated."

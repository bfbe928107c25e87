"""The format of a recording: one JSON object a line, and reading a file of them; see
docs/replay.md.

A recording is a sequence of runs of a picker; each begins with a `header`. Times are in seconds on
the picker's monotonic clock unless they say unix. Absent members have their defaults. Numbers that
JSON lacks are the texts `nan`, `inf` and `-inf`. Lines have types of their own: the picker's values
refer to whole candidates and hold secrets of clients, and a line outlives a change of their types.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from picker.errors import PickerError, RefusedError
from picker.types import (
    Candidate,
    Endpoint,
    EndpointMetrics,
    MultiModalFeature,
    ProfileResult,
    SchedulingResult,
    ScoredCandidates,
    Usage,
)

FORMAT_VERSION = 1
LAST_METRICS = "last"
FAILED = "failed"
MAX_LINE_BYTES = 256 * 2**20  # bounds the memory of a replay
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TRUNCATED = "truncated"

Number: TypeAlias = float | str


class Line(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="line"): ...


class Header(Line, frozen=True, tag="header"):
    """The beginning of a run: everything that a picker needs to repeat the decisions. `hash_seed`
    is the seed of its prompt hashes. `again`: repeated because earlier lines, perhaps the header
    itself, were lost.
    """

    format_version: int
    picker_version: str
    pool_name: str
    config_name: str
    config: str
    hash_seed: int
    has_prompts: bool
    started_at: float
    started_at_unix: float
    allow_experimental_plugins: bool = False
    strict_data_scope: bool = False
    again: bool = False


class Config(Line, frozen=True, tag="config"):
    """A configuration that is put into use, with its number; the header's has the number 0."""

    number: int
    at: float
    name: str
    config: str


class EndpointChange(Line, frozen=True, tag="endpoint"):
    """A change of an endpoint; when `forgotten`, plugins discard its state."""

    key: str
    change: str
    at: float
    endpoint: Endpoint | None = None


class CandidateChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Changes of a candidate since the last line that mentions it; everything the first time.
    `metrics` is `last` when they equal `last_metrics`. `attributes` are values of
    `picker.recording.values`.
    """

    key: str
    endpoint: Endpoint | UnsetType = UNSET
    metrics: EndpointMetrics | str | UnsetType | None = UNSET
    last_metrics: EndpointMetrics | UnsetType | None = UNSET
    inflight: int | UnsetType = UNSET
    attributes: dict[str, Any] | UnsetType = UNSET


class RequestLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """`prompts` are base64 of tokens, packed as little-endian uint32; None when they are left out,
    and then `prompt_bytes` are their lengths, four bytes a token. Headers, the salt and hashes of
    media may be digests; see `picker.recording.requests`.
    """

    id: str
    api: str
    headers: dict[str, str]
    received_at: float
    incoming_model: str = ""
    target_model: str = ""
    size_bytes: int = 0
    stream: bool = False
    max_output_tokens: int | None = None
    cache_salt: str = ""
    objective: str = ""
    priority: int = 0
    fairness_id: str = ""
    prompts: tuple[bytes, ...] | None = None
    prompt_bytes: tuple[int, ...] | None = None
    features: tuple[tuple[MultiModalFeature, ...], ...] = ()
    body_features: tuple[tuple[MultiModalFeature, ...], ...] | None = None


class ProfileLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """`picked` are keys of endpoints with their totals, best first; `totals` are in the order of
    `scored`, where None means all candidates in their order.
    """

    picked: tuple[tuple[str, Number], ...]
    totals: tuple[Number, ...] = ()
    scored: tuple[str, ...] | None = None


class ResultLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of a decision; `endpoints` are keys with the addresses sent to the proxy."""

    endpoints: tuple[tuple[str, str], ...]
    primary_profile: str
    profiles: dict[str, ProfileLine] = {}
    set_headers: dict[str, str] = {}


class RefusalLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A decision without an endpoint; `code` is `failed` when a plugin failed."""

    code: str
    message: str
    reason: str | None = None


class DecisionLine(Line, frozen=True, tag="decision"):
    """`number` counts the decisions of the run. `again` is the number of the preceding decision of
    the same request, whose `findings` then apply. `changed` are the candidates that changed,
    `order` the keys of all candidates if they or their order differ from the preceding decision.
    `findings` are values by "Type/producer". `left`: hooks were called for the decision.
    """

    number: int
    config: int
    at: float
    seed: int
    request: RequestLine
    again: int | None = None
    changed: tuple[CandidateChange, ...] = ()
    order: tuple[str, ...] | None = None
    findings: dict[str, Any] = {}
    not_replayable: tuple[str, ...] = ()
    result: ResultLine | None = None
    refusal: RefusalLine | None = None
    left: bool = False


class FirstPiece(Line, frozen=True, tag="first"):
    number: int
    at: float
    num_bytes: int = 0
    is_last: bool = False


class End(Line, frozen=True, tag="end"):
    number: int
    id: str
    cause: str
    at: float
    usage: Usage | None = None


class Lost(Line, frozen=True, tag="lost"):
    """The number of lines lost here. The lines after it repeat everything they build upon."""

    lines: int


class Stop(Line, frozen=True, tag="stop"):
    """The regular end of a recording; `reason`: `ended` with the picker, or the limit of `size`."""

    reason: str
    at: float


AnyLine: TypeAlias = (
    Header | Config | EndpointChange | DecisionLine | FirstPiece | End | Lost | Stop
)


class RecordingError(PickerError):
    """A recording that cannot be replayed; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class NumberedLine:
    """A line and its number in the file, from one; a line that is only half-written is None."""

    number: int
    line: AnyLine | None


def result_line(result: SchedulingResult, candidates: Sequence[Candidate]) -> ResultLine:
    """Return the outcome of a decision among `candidates`; used by recorder and replay alike."""
    # Lists instead of generators: this runs for every decision of a recording picker.
    order = tuple([one.endpoint.key for one in candidates])
    return ResultLine(
        endpoints=tuple([(one.key, one.host_port) for one in result.endpoints]),
        primary_profile=result.primary_profile,
        profiles={name: _profile(one, order) for name, one in result.profiles.items()},
        set_headers=dict(result.set_headers),
    )


def refusal_line(error: Exception) -> RefusalLine:
    if not isinstance(error, RefusedError):
        return RefusalLine(FAILED, type(error).__name__)
    reason = None if error.drop_reason is None else error.drop_reason.value
    return RefusalLine(error.code.value, error.message, reason)


def _profile(result: ProfileResult, order: tuple[str, ...]) -> ProfileLine:
    scored = result.scored
    if isinstance(scored, ScoredCandidates):
        keys = tuple([one.endpoint.key for one in scored.candidates])
        totals = tuple([_number(total) for total in scored.totals])
    else:
        keys = tuple([one.candidate.key for one in scored])
        totals = tuple([_number(one.score) for one in scored])
    return ProfileLine(
        picked=tuple([(one.candidate.key, _number(one.score)) for one in result.picked]),
        totals=totals,
        scored=None if keys == order else keys,
    )


def _number(value: float) -> Number:
    return value if math.isfinite(value) else str(value)


def _plain(value: object) -> object:
    # msgspec does not encode read-only views of mappings.
    if hasattr(value, "keys"):
        return dict(value)  # type: ignore[call-overload]
    raise TypeError(f"a {type(value).__name__} cannot be recorded")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
_DECODER: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)


def encoded(line: AnyLine) -> bytes:
    """Encode a line. Raises `TypeError`, `ValueError` or `OverflowError` if JSON cannot hold it."""
    return _ENCODER.encode(line) + b"\n"


def decoded(text: bytes) -> AnyLine:
    """Decode one line. Raises one of `UNREADABLE`."""
    return _DECODER.decode(text)


def read_recording(path: Path) -> Iterator[NumberedLine]:
    """Yield the lines of the file; only the last line of a run may be half-written. Raises
    `RecordingError` for a file that cannot be read or does not begin with a header of this format,
    and for an invalid line.
    """
    try:
        with path.open("rb") as file:
            yield from _lines(path, file)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror or error}") from error


def _lines(path: Path, file: BinaryIO) -> Iterator[NumberedLine]:
    number, torn = 0, None
    # A limit, since any file can be given: one without line breaks must not fill the memory.
    while text := file.readline(MAX_LINE_BYTES):
        number += 1
        if len(text) >= MAX_LINE_BYTES:
            raise RecordingError(f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes")
        try:
            line = decoded(text.rstrip(b"\n"))
        except UNREADABLE as error:
            # Only the next line shows whether the run ended here, so keep the error until then.
            may_be_torn = not text.endswith(b"\n") or _TRUNCATED in str(error)
            if torn is not None or number == 1 or not may_be_torn:
                raise _invalid(path, number, error) from error
            torn = error
            continue
        if torn is not None:
            if not isinstance(line, Header):
                raise _invalid(path, number - 1, torn) from torn
            yield NumberedLine(number - 1, None)
            torn = None
        if number == 1 and not isinstance(line, Header):
            raise RecordingError(f"{path}:1: no recording: it does not begin with a header")
        if isinstance(line, Header) and line.format_version != FORMAT_VERSION:
            why = f"format {line.format_version}, this version reads {FORMAT_VERSION}"
            raise RecordingError(f"{path}:{number}: {why}")
        yield NumberedLine(number, line)
    if torn is not None:
        yield NumberedLine(number, None)
    if not number:
        raise RecordingError(f"{path}: empty, no recording")


def _invalid(path: Path, number: int, error: Exception) -> RecordingError:
    what = "no recording" if number == 1 else "no line of a recording"
    return RecordingError(f"{path}:{number}: {what}: {error}")

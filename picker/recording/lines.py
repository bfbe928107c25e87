"""The lines of a recording: one JSON object each, told apart by `line`; see docs/replay.md.

A recording is one run of a picker after the other; each begins with a `header`. Times are in
seconds on the picker's monotonic clock unless they say unix. Whatever a line leaves out has its
default. Numbers that JSON does not have stand as the texts `nan`, `inf` and `-inf`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from picker.types import Endpoint, EndpointMetrics, MultiModalFeature, Usage

FORMAT_VERSION = 1
LAST_METRICS = "last"

Number: TypeAlias = float | str


class Line(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="line"):
    """What all lines have in common: nothing."""


class Header(Line, frozen=True, tag="header"):
    """The beginning of a run: what a picker needs to know to decide again as this one did.

    `config` is the text of its configuration, `hash_seed` the seed of its prompt hashes. `again`
    when it is told anew because lines before it, maybe the header itself, were lost.
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
    """Another configuration is in use: the one of this number, of which 0 is the header's.

    Decisions name the configuration they were made by, which need not be the latest one.
    """

    number: int
    at: float
    name: str
    config: str


class EndpointChange(Line, frozen=True, tag="endpoint"):
    """What became of an endpoint: `joined`, `updated`, `left`, or `forgotten`.

    `forgotten` is when plugins drop what they know of it: it left, or its engine has restarted.
    """

    key: str
    change: str
    at: float
    endpoint: Endpoint | None = None


class CandidateChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is new about a candidate since the last line that told of it; all of it the first time.

    `metrics` is `last` when they are the last ones that are known. `attributes` are values of
    `picker.recording.values`.
    """

    key: str
    endpoint: Endpoint | UnsetType = UNSET
    metrics: EndpointMetrics | str | UnsetType | None = UNSET
    last_metrics: EndpointMetrics | UnsetType | None = UNSET
    inflight: int | UnsetType = UNSET
    attributes: dict[str, Any] | UnsetType = UNSET


class RequestLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request as the scheduler saw it.

    `prompts` are base64 of tokens, packed as little-endian uint32; None when they are left out,
    and then `prompt_bytes` are their lengths, four bytes a token. Headers, the salt and hashes of
    media may be digests; see `picker.recording.privacy`.
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
    """Outcome of a scheduling profile.

    `picked` are keys of endpoints with their totals, best first; `totals` are in the order of
    `scored`, None standing for all candidates in their order.
    """

    picked: tuple[tuple[str, Number], ...]
    totals: tuple[Number, ...] = ()
    scored: tuple[str, ...] | None = None


class ResultLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Outcome of a decision; `endpoints` are keys with the addresses that the proxy was told."""

    endpoints: tuple[tuple[str, str], ...]
    primary_profile: str
    profiles: dict[str, ProfileLine] = {}
    set_headers: dict[str, str] = {}


class RefusalLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A decision that nobody may serve; `code` is `failed` when a plugin failed instead."""

    code: str
    message: str
    reason: str | None = None


class DecisionLine(Line, frozen=True, tag="decision"):
    """What a decision was made of, and what it was.

    `number` is its own within the run; `again` that of the decision right before it when both are
    of the same request (which was to try an ejected endpoint out, say), and then its findings go on
    where those ended. `changed` are the candidates of which anything is new, `order` the keys of
    all candidates where they are others, or in another order, than those of the decision before.
    `findings` are values by "Type/producer"; those in `not_replayable` have a type that no
    recording can hold. `left` says that hooks were told of it.
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
    """The first piece of a response came, which hooks were told of."""

    number: int
    at: float
    num_bytes: int = 0
    is_last: bool = False


class End(Line, frozen=True, tag="end"):
    """A request that hooks were told of is over."""

    number: int
    id: str
    cause: str
    at: float
    usage: Usage | None = None


class Lost(Line, frozen=True, tag="lost"):
    """So many lines before this one could not be written. What candidates are is told anew."""

    lines: int


class Stop(Line, frozen=True, tag="stop"):
    """The recording ends here on purpose: `ended` with the picker, or at its `size`."""

    reason: str
    at: float


AnyLine: TypeAlias = (
    Header | Config | EndpointChange | DecisionLine | FirstPiece | End | Lost | Stop
)


def _plain(value: object) -> object:
    # Read-only views of mappings, which msgspec does not know.
    if hasattr(value, "keys"):
        return dict(value)  # type: ignore[call-overload]
    raise TypeError(f"a {type(value).__name__} cannot be recorded")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
_DECODER: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)


def encoded(line: AnyLine) -> bytes:
    """The line with its line break. Raises `TypeError`, `ValueError` or `OverflowError` for values
    that JSON cannot hold.
    """
    return _ENCODER.encode(line) + b"\n"


def decoded(text: bytes) -> AnyLine:
    """Raises `msgspec.DecodeError`, `UnicodeDecodeError`, `RecursionError` for what is no line."""
    return _DECODER.decode(text)

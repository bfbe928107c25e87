"""One request as a value: who asked, how its endpoint was chosen, what came of it.

Theory of operation. The director makes one `Decision` when a request arrives and fills it in as the
request goes on; nothing else changes it but the ring, which packs what scorers said. The value is
handed to the watchers when the request leaves for its endpoint and when it is over. Then it is
condensed: what is heavy (the body, attributes, candidates) goes, and what remains is what the ring
keeps. It is one object from the arrival to the ring, at which the garbage collector does not look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from picker.decisions.steps import PluginStep
from picker.decisions.views import FilterView, RefusalView
from picker.errors import Code, DropReason, RefusedError
from picker.framework.attributes import Attributes
from picker.pool.policies import Rewritten
from picker.types import (
    Candidate,
    Endpoint,
    FinishCause,
    InferenceRequest,
    SchedulingResult,
    Usage,
)

MAX_NAME = 200  # characters of what clients name
MAX_MESSAGE = 500
NO_STAGES: Mapping[str, str] = {}  # msgspec encodes no read-only views


class ResponseTimes(msgspec.Struct, frozen=True):
    """How a response went, as far as it passed through the picker.

    `ttft_seconds` is from the arrival of the request to the first piece of the body that is not
    empty (None: there was none); `num_bytes` counts the body as the endpoint sent it.
    `processing_seconds` is what the picker added to it.
    """

    is_streaming: bool
    num_bytes: int = 0
    ttft_seconds: float | None = None
    processing_seconds: float = 0.0


class PackedCandidates(msgspec.Struct, frozen=True, gc=False):
    """Endpoints, and their loads as packed bytes; see `packing.Load`."""

    endpoints: tuple[Endpoint, ...]
    loads: bytes


# The candidates of a profile: as it saw them, and as each of its filters left them; or, packed, the
# last of these alone.
Seen: TypeAlias = tuple[Sequence[Candidate], ...] | PackedCandidates


class PackedProfile(msgspec.Struct, frozen=True, gc=False):
    """One profile of a decision.

    `scorers` are names with weights and `scores` what they said, packed, of those candidates that
    are kept, of `num_scored`; `num_tied` shared the best total (None: all are kept, count them).
    `picked` are keys. `filters` name those that they removed only where candidates are packed.
    """

    name: str
    picker: str
    picked: tuple[str, ...]
    num_candidates: int
    num_scored: int
    num_tied: int | None
    scorers: tuple[tuple[str, float], ...]
    scores: bytes
    filters: tuple[FilterView, ...]
    seen: Seen


class Decision(msgspec.Struct, gc=False):
    """One request. Times called `at` are on the clock of the requests, all in seconds.

    `number` tells the requests of a process apart, whatever ids clients give them. Of a request
    without a body nothing is known but its headers: it has no `request` and no `result`, and any
    endpoint will do.

    `queue_seconds` is the part of `decision_seconds` that it waited to be let in. `candidates` are
    what the scheduler saw, `steps` the calls of plugins not yet counted, `attributes`
    what producers found. `seed` is what every random draw of the last attempt came from, where a
    recording is made. `is_prepared` says that hooks were told of it, `endpoint_key` that it has
    left. `destination` is empty for what was never decided. `profiles`, `matched_prefix_tokens` and
    `stages` are set by the ring alone.
    """

    number: int
    received_at_seconds: float
    # What was asked for
    request_id: str = ""
    incoming_model: str = ""
    target_model: str = ""
    fairness_id: str = ""
    objective: str = ""
    priority: int = 0
    size_bytes: int = 0
    request: InferenceRequest | None = None
    rewritten: Rewritten | None = None
    # How it was decided
    candidates: Sequence[Candidate] = ()
    attributes: Attributes | None = None
    steps: list[PluginStep] = msgspec.field(default_factory=list)
    result: SchedulingResult | None = None
    seed: int | None = None
    is_prepared: bool = False
    destination: str = ""
    set_headers: Sequence[tuple[str, str]] = ()
    endpoint_key: str | None = None
    queue_seconds: float = 0.0
    decision_seconds: float = 0.0
    at_seconds: float = 0.0
    # What came of it
    cause: FinishCause | None = None  # None: it is not over
    ended_at_seconds: float = 0.0
    seconds: float = 0.0
    response_status: int | None = None
    served_by: str | None = None
    refusal: RefusedError | None = None
    usage: Usage | None = None
    response: ResponseTimes | None = None
    # What is kept of it
    received_unix_seconds: float = 0.0
    is_alone: bool = False
    profiles: tuple[PackedProfile, ...] = ()
    primary_profile: str = ""
    matched_prefix_tokens: int | None = None
    stages: Mapping[str, str] = NO_STAGES
    refused: RefusalView | None = None

    def condense(self) -> None:
        """Keep what people can be shown: no body, no header, no attribute and no candidate. The
        refusal itself goes too: it holds on to all that was in reach where it was raised.
        """
        self.request = self.attributes = self.result = None
        self.steps, self.candidates, self.set_headers = [], (), ()
        if self.refusal is not None:
            self.refused, self.refusal = _view(self.refusal), None
        names = (self.request_id, self.incoming_model, self.target_model)
        if sum(map(len, names)) + len(self.fairness_id) + len(self.objective) > MAX_NAME:
            self.request_id, self.incoming_model, self.target_model = map(short, names)
            self.fairness_id, self.objective = short(self.fairness_id), short(self.objective)


class FilteredOutError(RefusedError):
    """429: the filters of the profile called `profile` left nothing."""

    def __init__(self, profile: str) -> None:
        super().__init__(
            Code.RESOURCE_EXHAUSTED,
            "the filters leave no endpoint for this request",
            DropReason.SATURATED,
            reference="no endpoints available for the given request",
        )
        self.profile = profile


class Watchers:
    """Those that are handed decisions; each has any of the methods named here.

    They must be quick and must not raise. `waits`: the request is understood and may have to wait,
    for flow control or for what a producer asks others. `decided`: it leaves for its endpoint.
    `streamed`: a piece of its streaming response came, so many seconds after the one before.
    `finished`: it is over, whatever ended it. `plugin_failed`: the plugin of this name raised
    something other than a refusal, or took too long.
    """

    __slots__ = ("decided", "finished", "plugin_failed", "streamed", "waits")

    def __init__(self, *watchers: object) -> None:
        self.waits: tuple[Callable[[Decision], None], ...] = _all(watchers, "waits")
        self.decided: tuple[Callable[[Decision], None], ...] = _all(watchers, "decided")
        self.streamed: tuple[Callable[[Decision, float], None], ...] = _all(watchers, "streamed")
        self.finished: tuple[Callable[[Decision], None], ...] = _all(watchers, "finished")
        self.plugin_failed: tuple[Callable[[str], None], ...] = _all(watchers, "plugin_failed")


def short(name: str) -> str:
    """What a client named; the beginning of what is longer than anything that people write."""
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"


def _view(refusal: RefusedError) -> RefusalView:
    reason, message = refusal.drop_reason, refusal.message
    return RefusalView(
        refusal.status,
        refusal.code.value,
        message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…",
        None if reason is None else reason.value,
        refusal.retry_after_seconds,
    )


def _all(watchers: Sequence[object], event: str) -> tuple[Any, ...]:
    # Bound once: every request is handed over several times.
    return tuple(getattr(one, event) for one in watchers if hasattr(one, event))

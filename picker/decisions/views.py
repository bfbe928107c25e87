"""What people are shown of a request and of how its endpoint was chosen."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class ScoreView(msgspec.Struct, frozen=True):
    """What one scorer said of one candidate: as it said it, and clamped times its weight.

    `raw` is None for what JSON has no number for: infinity, and what is no number.
    """

    scorer: str
    weight: float
    raw: float | None
    weighted: float


class CandidateView(msgspec.Struct, frozen=True):
    """A candidate as a profile saw it; None where nothing was known."""

    endpoint: str
    address: str
    total: float
    scores: tuple[ScoreView, ...] = ()
    inflight_requests: int = 0
    waiting_requests: int | None = None
    running_requests: int | None = None
    kv_cache_usage: float | None = None
    metrics_age_seconds: float | None = None


class FilterView(msgspec.Struct, frozen=True):
    """What one filter did; `removed` may be cut short, the counts are not."""

    filter: str
    before: int
    after: int
    removed: tuple[str, ...] = ()


class ProfileView(msgspec.Struct, frozen=True):
    """One scheduling profile of a decision.

    `candidates` are those that were scored, best first; of many only the best are kept
    (`num_scored` counts all). `num_tied` of them shared the best total: more than one means that
    chance chose among them, where the `picker` goes by totals. Of a profile that found nothing
    `picked` is empty.
    """

    name: str
    is_primary: bool
    picker: str
    picked: tuple[str, ...]
    num_candidates: int
    num_scored: int
    num_tied: int
    filters: tuple[FilterView, ...] = ()
    candidates: tuple[CandidateView, ...] = ()


class RefusalView(msgspec.Struct, frozen=True):
    """Why a request was answered by the picker itself."""

    status: int
    code: str
    message: str
    reason: str | None = None
    retry_after_seconds: int | None = None


class RecordSummary(msgspec.Struct, frozen=True):
    """One request in a list.

    `outcome` is `waiting` until the request is decided and `under-way` until it is over; then how
    it ended. `endpoint` is the one that was chosen, `seconds` how long the request has taken.
    """

    request_id: str
    received_unix_seconds: float
    model: str
    fairness_id: str
    priority: int
    outcome: str
    endpoint: str | None = None
    status: int | None = None
    reason: str | None = None
    queue_seconds: float = 0.0
    decision_seconds: float = 0.0
    ttft_seconds: float | None = None
    seconds: float | None = None


class RecordView(msgspec.Struct, frozen=True):
    """Everything that is kept of one request; times in seconds, None where nothing is known.

    `destination` is what the proxy was told, `served_by` what it said has served. `stages` say of a
    stage that was left out why, by the name of the stage; `reasons` are sentences that say why the
    request went where it went.
    """

    summary: RecordSummary
    incoming_model: str
    target_model: str
    objective: str = ""
    rewritten_by: str | None = None
    size_bytes: int = 0
    destination: str | None = None
    served_by: str | None = None
    refusal: RefusalView | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    matched_prefix_tokens: int | None = None  # at the endpoint that was chosen, as was predicted
    profiles: tuple[ProfileView, ...] = ()
    stages: Mapping[str, str] = {}
    reasons: tuple[str, ...] = ()

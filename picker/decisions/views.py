"""The JSON of `/decisions`: requests, and the choice of their endpoints."""

from collections.abc import Mapping

import msgspec


class ScoreView(msgspec.Struct, frozen=True):
    """The score of one candidate by one scorer; `raw` is None for infinity and NaN."""

    scorer: str
    weight: float
    raw: float | None
    weighted: float


class CandidateView(msgspec.Struct, frozen=True):
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
    """The effect of one filter; `removed` may be truncated, the counts are not."""

    filter: str
    before: int
    after: int
    removed: tuple[str, ...] = ()


class ProfileView(msgspec.Struct, frozen=True):
    """One profile and its candidates, perhaps only the best of `num_scored`. `num_tied` candidates
    share the best total: if there are several, and the `picker` uses totals, it chose at random.
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
    status: int
    code: str
    message: str
    reason: str | None = None
    retry_after_seconds: int | None = None


class RecordSummary(msgspec.Struct, frozen=True):
    """A request; `outcome`: `waiting`, then `under-way`, at last the cause of the end."""

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
    """A request; the picker sent `destination` to the proxy, and the proxy reported `served_by`."""

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
    matched_prefix_tokens: int | None = None  # as predicted for the chosen endpoint
    profiles: tuple[ProfileView, ...] = ()
    stages: Mapping[str, str] = {}
    reasons: tuple[str, ...] = ()

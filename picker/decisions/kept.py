"""The shapes of what is kept of a request, in little memory and few objects. `record_keeping`
makes them, `record_showing` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from picker.decisions.record_views import FilterView, RefusalView
from picker.requestcontrol.observer import ResponseTimes
from picker.types import Candidate, Endpoint, FinishCause, Usage

NO_STAGES: Mapping[str, str] = {}

# In flight, waiting, running, KV usage, age of that in seconds; None where nothing was known.
Load: TypeAlias = tuple[int, int | None, int | None, float | None, float | None]


class KeptProfile(msgspec.Struct, frozen=True, array_like=True):
    """One profile of a decision.

    `scorers` are names with weights and `scores` what they said of those candidates that are kept,
    of `num_scored`; `num_tied` shared the best total (None: all are kept, count them). `picked` are
    keys. `filters` name those that they removed only where the candidates were packed.
    """

    name: str
    picker: str
    picked: tuple[str, ...]
    num_candidates: int
    num_scored: int
    num_tied: int | None
    scorers: Sequence[tuple[str, float]]
    scores: Sequence[Sequence[float | bool]]
    filters: Sequence[FilterView] = ()


class PackedCandidates(msgspec.Struct, frozen=True, gc=False):
    """Candidates by themselves: who, and how they did; `loads` is a packed list of `Load`."""

    endpoints: tuple[Endpoint, ...]
    loads: bytes


# The candidates of a profile: as it saw them, and as each of its filters left them; or, packed, the
# last of these alone.
Seen: TypeAlias = tuple[Sequence[Candidate], ...] | PackedCandidates


class KeptProfiles(msgspec.Struct, frozen=True, gc=False):
    """Profiles of any kind: a packed list of `KeptProfile`, and the candidates of each."""

    packed: bytes
    seen: tuple[Seen, ...]


class Kept(msgspec.Struct, gc=False):
    """A record, from the decision on. Times are in seconds; those called `at` are on the clock of
    the requests. Only its owner, the ring, sets what is known when the request is over; `cause`
    None: it is not.

    Most decisions are plain: one profile that has no filters and picked one endpoint. Then its
    parts are here, each a reference to what exists anyway: `scorers` are names with weights (None:
    it is not plain), `scores` what they said, packed, of those `candidates` that are kept, of
    `num_scored`; `num_tied` shared the best total (None: all are kept, count them). Each object
    more would have to be made, and found and freed when another record takes the place, long after
    it has left the caches.

    `destination` is empty for what was never decided. `matched_prefix_tokens` is how much of the
    prompt the endpoint was thought to have (None: nobody looked), `stages` why stages were left
    out. The candidates of a decision that `is_alone` are packed when it is over.
    """

    request_id: str
    incoming_model: str
    target_model: str
    fairness_id: str
    objective: str
    priority: int
    size_bytes: int
    received_at_seconds: float = 0.0
    queue_seconds: float = 0.0
    decision_seconds: float = 0.0
    at_seconds: float = 0.0
    is_alone: bool = False
    destination: str = ""
    endpoint_key: str | None = None
    primary: str = ""
    rewritten_by: str | None = None
    matched_prefix_tokens: int | None = None
    stages: Mapping[str, str] = NO_STAGES
    profiles: KeptProfiles | None = None
    scorers: Sequence[tuple[str, float]] | None = None
    scores: bytes = b""
    candidates: tuple[Candidate, ...] | PackedCandidates = ()
    picker: str = ""
    picked: str = ""
    num_scored: int = 0
    num_tied: int | None = None
    received_unix_seconds: float = 0.0
    seconds: float = 0.0
    cause: FinishCause | None = None
    status: int | None = None
    served_by: str | None = None
    usage: Usage | None = None
    response: ResponseTimes | None = None
    refusal: RefusalView | None = None

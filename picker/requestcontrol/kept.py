"""The shapes of what is kept of a request: packed, in little memory. `record_keeping` makes them,
`record_showing` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from picker.requestcontrol.observer import ResponseTimes
from picker.requestcontrol.record_views import FilterView, RefusalView
from picker.types import Candidate, Endpoint, FinishCause, Usage

NO_STAGES: Mapping[str, str] = {}  # packed as what it is, unlike a view of it

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


class DecisionHead(msgspec.Struct, frozen=True, array_like=True):
    """What a `KeptDecision` begins with: enough for a line of a list, and soon unpacked by itself.
    `destination` is empty for what was never decided.
    """

    incoming_model: str
    target_model: str
    fairness_id: str
    objective: str
    priority: int
    size_bytes: int
    destination: str = ""
    seconds: float = 0.0


class KeptDecision(DecisionHead, frozen=True, array_like=True):
    """What is known of a request once it is decided or refused.

    `at_seconds` is on the clock of the requests. `matched_prefix_tokens` is how much of the prompt
    the endpoint was thought to have (None: nobody looked), `stages` why stages were left out.
    """

    at_seconds: float = 0.0
    primary: str = ""
    rewritten_by: str | None = None
    matched_prefix_tokens: int | None = None
    stages: Mapping[str, str] = NO_STAGES
    profiles: Sequence[KeptProfile] = ()


class PackedCandidates(msgspec.Struct, frozen=True, gc=False):
    """Candidates by themselves: who, and how they did; `loads` is a packed list of `Load`."""

    endpoints: tuple[Endpoint, ...]
    loads: bytes


# The candidates of a profile: as it saw them, and as each of its filters left them; or, packed, the
# last of these alone.
Seen: TypeAlias = tuple[Sequence[Candidate], ...] | PackedCandidates
# Those of all profiles, in their order; of a single one without filters its candidates themselves.
AllSeen: TypeAlias = tuple[Seen, ...] | tuple[Candidate, ...]
# A packed `KeptDecision`, and the candidates. Each object more would have to be found and freed
# when another record takes the place, long after it has left the caches.
Decided: TypeAlias = tuple[bytes, AllSeen]


class Kept(msgspec.Struct, frozen=True, gc=False):
    """A record. Times are in seconds; `cause` None: the request is not over."""

    request_id: str
    received_unix_seconds: float
    packed: bytes
    seen: AllSeen
    seconds: float
    queue_seconds: float
    cause: FinishCause | None = None
    endpoint_key: str | None = None
    status: int | None = None
    served_by: str | None = None
    usage: Usage | None = None
    response: ResponseTimes | None = None
    refusal: RefusalView | None = None

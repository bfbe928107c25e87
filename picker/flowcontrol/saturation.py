"""The saturation of the pool by stage, including admitted requests that are not sent yet.

An endpoint without a role decodes. The effective saturation is the greatest of the stages; for a
pool without stages, the detector's value for all of it; 1.0 without endpoints. An admitted request
is counted at the least loaded endpoint of each stage, its likely destination; otherwise one free
slot would admit every request that arrives before the first has taken it.
"""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from picker.framework.attributes import LET_IN_LOAD_KEY, Attributes, EndpointLoad
from picker.framework.disaggregation import DECODE_ROLES, PREFILL_ROLES, ROLE_LABEL
from picker.framework.interfaces import SaturationDetector
from picker.types import Candidate

FULL = 1.0
PREFILL = "prefill"
DECODE = "decode"
WHOLE_POOL = ""


class LetIn(msgspec.Struct, frozen=True):
    """Admitted requests that are not sent yet, and an estimate of their tokens."""

    requests: int = 0
    tokens: int = 0


NOTHING_LET_IN = LetIn()


class PoolLoad(msgspec.Struct, frozen=True):
    """The `effective` saturation, and that of each present stage."""

    effective: float
    stages: Mapping[str, float]
    num_endpoints: int


EMPTY_POOL = PoolLoad(FULL, {}, 0)


def stages(candidates: Sequence[Candidate]) -> dict[str, Sequence[Candidate]]:
    """Return the candidates of each present stage; without stages, all under `WHOLE_POOL`."""
    prefill: list[Candidate] = []
    decode: list[Candidate] = []
    for candidate in candidates:
        role = candidate.endpoint.labels.get(ROLE_LABEL)
        if role is None or role in DECODE_ROLES:
            decode.append(candidate)
        if role in PREFILL_ROLES:
            prefill.append(candidate)
    found: dict[str, Sequence[Candidate]] = {}
    if prefill:
        found[PREFILL] = prefill
    if decode:
        found[DECODE] = decode
    return found or {WHOLE_POOL: candidates}


def pool_load(
    detector: SaturationDetector, candidates: Sequence[Candidate], let_in: LetIn, now_seconds: float
) -> PoolLoad:
    if not candidates:
        return EMPTY_POOL
    by_stage: dict[str, float] = {}
    for stage, members in stages(candidates).items():
        attributes = Attributes()
        if let_in.requests:
            members, loads = spread(members, let_in)
            attributes[LET_IN_LOAD_KEY] = loads
        by_stage[stage] = detector.saturation(members, attributes, now_seconds)
    effective = max(by_stage.values())
    by_stage.pop(WHOLE_POOL, None)
    return PoolLoad(effective, by_stage, len(candidates))


def spread(
    candidates: Sequence[Candidate], let_in: LetIn
) -> tuple[Sequence[Candidate], Mapping[str, EndpointLoad]]:
    """Count `let_in` at the least loaded endpoints; return the candidates and the added loads."""
    loads = [_load(candidate) for candidate in candidates]
    order = sorted(range(len(loads)), key=loads.__getitem__)
    left, level, filled = let_in.requests, loads[order[0]], 1
    while filled < len(order):
        step = (loads[order[filled]] - level) * filled
        if step > left:
            break
        left -= step
        level = loads[order[filled]]
        filled += 1
    each, more = divmod(left, filled)
    loaded = list(candidates)
    added: dict[str, EndpointLoad] = {}
    tokens = let_in.tokens / let_in.requests if let_in.requests else 0.0
    for place, index in enumerate(order[:filled]):
        count = level + each + (place < more) - loads[index]
        if count:
            candidate = candidates[index]
            loaded[index] = replace(
                candidate, inflight_requests=candidate.inflight_requests + count
            )
            added[candidate.key] = EndpointLoad(count, round(count * tokens))
    return loaded, added


def _load(candidate: Candidate) -> int:
    """Return the greater of the picker's and the endpoint's count of in-flight requests."""
    metrics = candidate.metrics
    if metrics is None:
        return candidate.inflight_requests
    reported = (metrics.waiting_requests or 0) + (metrics.running_requests or 0)
    # The report is as old as the last scrape; requests since then are in the own count.
    return max(candidate.inflight_requests, reported)

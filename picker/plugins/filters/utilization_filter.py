"""utilization-filter: keep endpoints that are not too busy.

    keep ⇔ every condition's metric ≤ its maxValue

`active-requests` is the greater of this picker's two counts of its requests in flight there. The
other metrics are from the last scrape; numbers of requests are at least this picker's own beyond
those that the scrape saw.

A condition on a signal that a page lacks passes. An endpoint of unknown load, or whose page has
none of the signals, passes only when no other does, and within its own count (the reference takes
unknown for 0, and so sends everything to an endpoint whose metrics are broken while others are
merely full). When none passes, all do with `fallbackOnEmpty`; without it the request is refused.
"""

from random import Random
from typing import Literal

from picker.framework.attributes import Attributes, InFlightLoad, inflight_load_key
from picker.framework.registry import NonNegativeFloat, Parameters, PluginType, Stability
from picker.plugins._shared.load_signals import running_requests, waiting_requests
from picker.types import Candidate, Candidates, InferenceRequest

_ACTIVE = "active-requests"
_KV_CACHE = "kv-cache-utilization"


class Condition(Parameters, frozen=True):
    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: NonNegativeFloat


class UtilizationFilterParameters(Parameters, frozen=True):
    conditions: tuple[Condition, ...]
    fallback_on_empty: bool = False
    in_flight_load_producer_name: str = "inflight-load-producer"


class UtilizationFilter:
    def __init__(self, parameters: UtilizationFilterParameters) -> None:
        if not parameters.conditions:
            raise ValueError("conditions needs at least one condition")
        for index, condition in enumerate(parameters.conditions):
            if condition.metric == _KV_CACHE and condition.max_value > 1:
                where = f"conditions[{index}].maxValue"
                raise ValueError(
                    f"{where} is a share of the cache, 0..1, got {condition.max_value}"
                )
        self._scraped = [one for one in parameters.conditions if one.metric != _ACTIVE]
        self._max_active = min(
            (one.max_value for one in parameters.conditions if one.metric == _ACTIVE), default=None
        )
        self._fallback = parameters.fallback_on_empty
        self._key = inflight_load_key(parameters.in_flight_load_producer_name)
        self.consumes = () if self._max_active is None else (self._key,)

    def filter(
        self, request: InferenceRequest, candidates: Candidates, attributes: Attributes, rng: Random
    ) -> Candidates:
        # Own counts are always known, so this limit also holds for endpoints of unknown load.
        active: Candidates = candidates
        if self._max_active is not None:
            load, limit = attributes.get(self._key), self._max_active
            active = [one for one in candidates if _active_requests(one, load) <= limit]
        if not self._scraped:
            passed = active
        else:
            compared = [(candidate, self._is_within(candidate)) for candidate in active]
            passed = [candidate for candidate, is_within in compared if is_within]
            passed = passed or [candidate for candidate, is_within in compared if is_within is None]
        return candidates if self._fallback and not passed else passed

    def _is_within(self, candidate: Candidate) -> bool | None:
        """Return whether all known signals are within their limits; None if none is known."""
        found = [(_value(candidate, one.metric), one.max_value) for one in self._scraped]
        known = [value <= limit for value, limit in found if value is not None]
        return all(known) if known else None


def _active_requests(candidate: Candidate, load: InFlightLoad | None) -> int:
    found = None if load is None else load.by_endpoint.get(candidate.key)
    return max(candidate.inflight_requests, 0 if found is None else found.requests)


def _value(candidate: Candidate, metric: str) -> float | None:
    if metric == _KV_CACHE:
        return None if candidate.metrics is None else candidate.metrics.kv_cache_usage
    signal = running_requests if metric == "running-requests" else waiting_requests
    return signal(candidate)


PLUGIN = PluginType("utilization-filter", UtilizationFilter, Stability.ALPHA)

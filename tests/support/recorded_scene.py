"""A configuration at work, with a clock that stands still, and its remembered requests."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from configured_requests import Moment, Routing, routing

from picker.decisions.records import DecisionRecords
from picker.errors import RefusedError
from picker.types import Endpoint, EndpointMetrics, FinishCause, RawRequest

UNIX = 1_800_000_000.0
CONFIG = """
plugins:
- {type: by-label-selector, parameters: {matchLabels: {tier: fast}}}
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: prefix-cache-scorer}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: by-label-selector}
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer}
  - {pluginRef: prefix-cache-scorer, weight: 3}
"""
POOL = [
    Endpoint(name, f"10.0.0.{index}", 8000, labels={"tier": tier})
    for index, (name, tier) in enumerate((("a", "fast"), ("b", "fast"), ("c", "slow")), 1)
]


@dataclass
class Scene:
    """A configuration at work, and what is remembered of its requests."""

    at_work: Routing
    records: DecisionRecords

    @classmethod
    def of(cls, config: str = CONFIG, capacity: int = 100) -> Scene:
        """Two fast endpoints and a slow one, idle and scraped a moment ago."""
        now = Moment()
        records = DecisionRecords(capacity, now, lambda: UNIX + now.seconds)
        at_work = routing(config, POOL, observer=records)
        at_work.now.seconds = now.seconds
        scene = cls(at_work, records)
        records._clock = at_work.now  # the scene's only clock
        records._unix_time = lambda: UNIX + at_work.now.seconds
        return scene

    def load(self, name: str, **metrics: float) -> None:
        """What an endpoint says of itself now."""
        known = EndpointMetrics(updated_at_seconds=self.at_work.now.seconds, **metrics)  # type: ignore[arg-type]
        self.at_work.datastore.update_metrics(f"default/{name}", known)

    async def refused(self, raw: RawRequest) -> RefusedError:
        """A request that the picker answers itself."""
        exchange = self.at_work.director.begin()
        with pytest.raises(RefusedError) as refusal:
            await exchange.route(raw)
        exchange.finish(FinishCause.REFUSED, refusal.value.status)
        return refusal.value

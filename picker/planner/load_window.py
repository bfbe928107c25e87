"""The requests of an interval as sums: the watcher that the planner reads."""

from __future__ import annotations

from dataclasses import dataclass

from picker.decisions.decision import Decision
from picker.planner.planner import NO_SUMS, Sums
from picker.telemetry.traffic import expected_hits
from picker.types import BYTES_PER_TOKEN


@dataclass(slots=True)
class LoadWindow:
    """Owns the sums since the last `take`; its times come from responses through the picker."""

    arrivals: int = 0
    fresh: Sums = NO_SUMS
    cached: Sums = NO_SUMS
    output: Sums = NO_SUMS
    gaps: Sums = NO_SUMS

    def decided(self, decision: Decision) -> None:
        """Count a request that is sent; tokens of an unknown prompt are estimated."""
        self.arrivals += 1
        prompt, cached = 0, 0
        if decision.result is not None:
            prompt, cached = expected_hits(decision, decision.result.endpoints[0].key)
        if not prompt:
            known = decision.request
            prompt = known.num_tokens if known is not None else 0
            prompt = prompt or decision.size_bytes // BYTES_PER_TOKEN
        self.fresh = self.fresh.plus(prompt - cached)
        self.cached = self.cached.plus(cached)

    def finished(self, decision: Decision) -> None:
        """Count a request that was refused, or the response of one that was sent."""
        if decision.endpoint_key is None:
            self.arrivals += decision.refusal is not None
            return
        tokens = 0 if decision.usage is None else decision.usage.completion_tokens
        if tokens <= 0:
            return
        self.output = self.output.plus(tokens)
        response = decision.response
        if tokens == 1 or response is None or response.ttft_seconds is None:
            return
        if response.is_streaming:
            decoding = max(0.0, decision.seconds - response.ttft_seconds)
            self.gaps = self.gaps.plus(decoding / (tokens - 1))

    def plus(self, other: LoadWindow) -> LoadWindow:
        return LoadWindow(
            self.arrivals + other.arrivals,
            self.fresh.merged(other.fresh),
            self.cached.merged(other.cached),
            self.output.merged(other.output),
            self.gaps.merged(other.gaps),
        )

    def take(self) -> LoadWindow:
        taken = LoadWindow(self.arrivals, self.fresh, self.cached, self.output, self.gaps)
        self.arrivals = 0
        self.fresh = self.cached = self.output = self.gaps = NO_SUMS
        return taken

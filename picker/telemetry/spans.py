"""Spans of requests and of the steps of their decisions, made when they are over.

Only the request's own span is begun while the request is under way, because its endpoint continues
that trace. A trace that is not sampled has no other spans. Names and attributes are the reference
picker's.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import fsum

from base import tracing
from base.tracing import Span, Tracer, Tracing, TracingError
from picker.decisions.decision import Decision, FilteredOutError
from picker.decisions.steps import PluginStep
from picker.errors import ConfigError, PickerError
from picker.framework.disaggregation import ENCODERS_HEADER, PREFILLER_HEADER
from picker.types import Candidate, ScoredCandidates

ORCHESTRATION_SPAN = "gateway.request_orchestration"
PROFILE_SPAN = "run_scheduler_profile"
FILTERS_SPAN = "filter_endpoints"
SCORERS_SPAN = "llm_d.epp.scoring"
SCORER_SPAN = "llm_d.epp.scorer"
PICKER_SPAN = "pick_endpoints"
STAGES_SPAN = "prepare_disaggregation"
# Types of plugins whose calls have spans.
HANDLER_SPANS: Mapping[str, str] = {
    "disagg-profile-handler": "pick_disagg_profile",
    "pd-profile-handler": "pick_pd_profile",
}
STAGES_TYPES = frozenset((*HANDLER_SPANS, "disagg-headers-handler"))
PRODUCER_SPANS: Mapping[str, str] = {
    "precise-prefix-cache-producer": "produce_precise_prefix_cache",
    "token-producer": "tokenize_render",
}
TOP = 5
TRACED = tracing.Traced(
    "picker",
    "llm-d-epp",  # the name of the reference picker, for its dashboards
    "gateway.request",
)


@dataclass(frozen=True, slots=True)
class RequestTracer:
    """Makes spans of decisions. `unix_ns` returns the time of day."""

    tracer: Tracer
    clock: Callable[[], float] = time.monotonic
    unix_ns: Callable[[], int] = time.time_ns

    def begin(self, headers: Mapping[str, str], age_seconds: float) -> Span:
        return self.tracer.begin_request(headers, age_seconds)

    def routed(self, request: Span, decision: Decision, begun_at: float) -> None:
        """Make the spans of a decision that began at `begun_at`, even if it failed."""
        now = self.clock()
        made = _Spans(self.tracer, self.unix_ns() - int(now * 1e9))
        span = made.begin(ORCHESTRATION_SPAN, request, begun_at)
        span.set("gen_ai.request.model", decision.incoming_model)
        span.set("gen_ai.request.id", decision.request_id)
        span.set("target_model", decision.target_model)
        span.set("request_prio", decision.priority)
        if decision.refusal is not None:
            span.fail(decision.refusal.message)
            request.fail(decision.refusal.message)
        if span.is_recorded:
            made.steps(span, decision)
        made.end(span, now)


@dataclass(frozen=True, slots=True)
class _Spans:
    """Spans of one decision. `epoch_ns` is the time at which the clock of the requests was 0."""

    tracer: Tracer
    epoch_ns: int

    def begin(self, name: str, parent: Span, at: float) -> Span:
        return self.tracer.begin(name, parent, self.epoch_ns + int(at * 1e9))

    def end(self, span: Span, at: float) -> None:
        span.end(self.epoch_ns + int(at * 1e9))

    def steps(self, within: Span, decision: Decision) -> None:
        """Make the spans of calls; those of a profile's plugins are within the profile's span."""
        for profile, steps in groupby(decision.steps, key=lambda step: step.bound.profile):
            if profile:
                self._profile(within, profile, list(steps), decision.candidates)
            else:
                for step in steps:
                    self._step(within, step, decision)

    def _step(self, within: Span, step: PluginStep, decision: Decision) -> None:
        bound, point = step.bound, step.bound.point
        if point == "ProfilePicker" and bound.type_name in HANDLER_SPANS:
            span = self._over(step, HANDLER_SPANS[bound.type_name], within)
            if not isinstance(step.said, Exception):
                decided = ",".join(step.said) or "complete"
                span.set("llm_d.epp.profile_handler.decision", decided)
        elif point == "PreRequest" and bound.type_name in STAGES_TYPES:
            span = self._over(step, STAGES_SPAN, within)
            if not isinstance(step.said, Exception):
                own = {} if decision.result is None else decision.result.set_headers
                _describe_stages(span, {**own, **(step.said or {})})
        elif point == "DataProducer" and (name := _producer_span(step, decision)):
            span = self._over(step, name, within)
            if not isinstance(step.said, Exception):
                request, candidates = step.said, decision.candidates
                span.set("llm_d.epp.producer.name", bound.name)
                span.set("llm_d.epp.producer.candidate_endpoints", len(candidates))
                span.set("llm_d.epp.producer.prompt_tokens", request.num_tokens)
        else:
            return
        self.end(span, step.at)

    def _profile(
        self, within: Span, name: str, steps: Sequence[PluginStep], seen: Sequence[Candidate]
    ) -> None:
        began, ended = steps[0].at - steps[0].seconds, steps[-1].at
        span = self.begin(PROFILE_SPAN, within, began)
        span.set("llm_d.epp.scheduling.profile.name", name)
        filters = [one for one in steps if one.bound.point == "Filter"]
        scorers = [one for one in steps if one.bound.point == "Scorer"]
        failure = _failure(steps)
        count, at = len(seen), began
        if filters:
            count, at = self._filters(span, filters, count), filters[-1].at
        if scorers or len(filters) < len(steps):
            at = self._scorers(span, scorers, at, count)
        if failure is not None:
            span.fail(failure)
        if steps[-1].bound.point == "Picker":
            self._picker(span, steps[-1])
        self.end(span, ended)

    def _filters(self, within: Span, filters: Sequence[PluginStep], count: int) -> int:
        span = self.begin(FILTERS_SPAN, within, filters[0].at - filters[0].seconds)
        span.set("llm_d.epp.filter.candidate_endpoints", count)
        failure = _failure(filters)
        left = 0 if failure is not None else len(filters[-1].said)
        span.set("llm_d.epp.filter.filtered_endpoints", left)
        if failure is not None:
            span.fail(failure)
        self.end(span, filters[-1].at)
        return left

    def _scorers(self, within: Span, scorers: Sequence[PluginStep], at: float, count: int) -> float:
        span = self.begin(SCORERS_SPAN, within, at)
        span.set("llm_d.epp.scorer.count", len(scorers))
        span.set("llm_d.epp.scoring.candidate_endpoints", count)
        for step in scorers:
            bound, scores, at = step.bound, step.said, step.at
            one = self._over(step, f"{SCORER_SPAN}.{bound.type_name}", span)
            one.set("llm_d.epp.scorer.type", bound.type_name)
            one.set("llm_d.epp.scorer.name", bound.name)
            one.set("llm_d.epp.scorer.weight", bound.weight)
            one.set("llm_d.epp.scorer.candidate_endpoints", count)
            if isinstance(scores, Exception):
                span.fail(_text(scores))
            else:
                one.set("llm_d.epp.scorer.endpoints_scored", len(scores))
                if len(scores):
                    one.set("llm_d.epp.scorer.score.max", max(scores))
                    one.set("llm_d.epp.scorer.score.avg", fsum(scores) / len(scores))
            self.end(one, at)
        self.end(span, at)
        return at

    def _picker(self, within: Span, step: PluginStep) -> None:
        span = self.begin(PICKER_SPAN, within, step.at - step.seconds)
        scored = getattr(step.said, "scored", None)  # it may have raised
        if isinstance(scored, ScoredCandidates):
            best = sorted(scored, key=lambda one: one.score, reverse=True)[:TOP]
            span.set("llm_d.epp.picker.candidate_endpoints", len(scored))
            names = ",".join(one.candidate.key for one in best)
            span.set("llm_d.epp.picker.top_endpoints", names)
            span.set("llm_d.epp.picker.top_scores", ",".join(f"{one.score:.4f}" for one in best))
        self.end(span, step.at)

    def _over(self, step: PluginStep, name: str, within: Span) -> Span:
        span = self.begin(name, within, step.at - step.seconds)
        if isinstance(step.said, Exception):
            span.fail(_text(step.said))
        return span


def _producer_span(step: PluginStep, decision: Decision) -> str | None:
    """Return the name of a producer's span; the tokenizer has one only if it asks a server."""
    name = PRODUCER_SPANS.get(step.bound.type_name)
    if name is None or step.bound.type_name != "token-producer":
        return name
    if not hasattr(step.bound.plugin, "look_up") or decision.request is None:
        return None
    return f"{name} {decision.request.body.api.value}"


def _failure(steps: Iterable[PluginStep]) -> str | None:
    for step in steps:
        if isinstance(step.said, Exception):
            return _text(step.said)
        if step.bound.point == "Filter" and not step.said:
            return str(FilteredOutError(step.bound.profile))
    return None


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, PickerError) else type(error).__name__


def _describe_stages(span: Span, headers: Mapping[str, str]) -> None:
    prefiller, encoders = headers.get(PREFILLER_HEADER), headers.get(ENCODERS_HEADER)
    span.set("llm_d.epp.pd.disaggregation_used", prefiller is not None)
    if prefiller is None:
        span.set("llm_d.epp.pd.reason", "no_prefill_endpoint")
    else:
        address, _, port = prefiller.rpartition(":")
        span.set("llm_d.epp.pd.prefill_pod_address", address)
        span.set("llm_d.epp.pd.prefill_pod_port", port)
    span.set("llm_d.epp.encode.disaggregation_used", encoders is not None)
    if encoders is not None:
        span.set("llm_d.epp.encode.pod_addresses", encoders)


def build_tracing(enabled: bool, environment: Mapping[str, str]) -> Tracing:
    """Create the tracer, if enabled. Raises `ConfigError`, also if the library is missing."""
    try:
        return tracing.build_tracing(enabled, environment, TRACED)
    except TracingError as error:
        raise ConfigError(str(error)) from error

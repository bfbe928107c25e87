"""Wrappers that make the steps of a decision parts of its trace.

They are put around the measured plugins when a configuration is built with a tracer, and not at all
without one. In a decision whose span nobody will see they do no more than find that out. Names of
spans and of what they say are the reference picker's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from picker.errors import PickerError
from picker.framework.attributes import Attributes
from picker.framework.disaggregation import ENCODERS_HEADER, PREFILLER_HEADER
from picker.framework.interfaces import (
    AsyncDataProducer,
    DataProducer,
    PreRequest,
    ProfileHandler,
    Scorer,
)
from picker.framework.tracing import OPEN_SPAN, Span, Tracer
from picker.scheduling.profile import Profile
from picker.types import (
    Candidate,
    FilterStep,
    InferenceRequest,
    ProfileResult,
    SchedulingResult,
    ScoredCandidates,
    ScoredEndpoint,
)

PROFILE_SPAN = "run_scheduler_profile"
FILTERS_SPAN = "filter_endpoints"
SCORERS_SPAN = "llm_d.epp.scoring"
SCORER_SPAN = "llm_d.epp.scorer"
PICKER_SPAN = "pick_endpoints"
STAGES_SPAN = "prepare_disaggregation"
# Types of plugins whose questions have spans of their own.
HANDLER_SPANS: Mapping[str, str] = {
    "disagg-profile-handler": "pick_disagg_profile",
    "pd-profile-handler": "pick_pd_profile",
}
STAGES_TYPES = frozenset((*HANDLER_SPANS, "disagg-headers-handler"))
PRODUCER_SPANS: Mapping[str, str] = {
    "precise-prefix-cache-producer": "produce_precise_prefix_cache"
}
ASKING_SPANS: Mapping[str, str] = {"token-producer": "tokenize_render"}
TOP = 5


@contextmanager
def step(tracer: Tracer, name: str, within: Span, attributes: Attributes) -> Iterator[Span]:
    """A span for what happens meanwhile; steps of it become parts of that span."""
    span = tracer.begin(name, within)
    attributes.put(OPEN_SPAN, span)
    try:
        yield span
    except PickerError as error:
        span.fail(str(error))
        raise
    except Exception as error:
        span.fail(type(error).__name__)
        raise
    finally:
        attributes.put(OPEN_SPAN, within)
        span.end()


@dataclass(frozen=True, slots=True)
class TracedProfile:
    """A profile whose steps are spans; its scorers are `TracedScorer`s."""

    inner: Profile
    tracer: Tracer

    @property
    def name(self) -> str:
        """The inner profile's."""
        return self.inner.name

    def run(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> ProfileResult:
        """What the inner profile picks."""
        within = attributes.get(OPEN_SPAN)
        if within is None:
            return self.inner.run(request, candidates, attributes, rng)
        with step(self.tracer, PROFILE_SPAN, within, attributes) as span:
            span.set("llm_d.epp.scheduling.profile.name", self.name)
            filters: tuple[FilterStep, ...] = ()
            if self.inner.filters:
                candidates, filters = self._narrow(request, candidates, attributes, rng)
            scored, scores = self._rate(request, candidates, attributes)
            steps = self.inner.steps(filters, scores)
            return ProfileResult(self._pick(scored, rng, span), scored, steps)

    def _narrow(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> tuple[Sequence[Candidate], tuple[FilterStep, ...]]:
        within = attributes.get(OPEN_SPAN)
        if within is None:
            return self.inner.narrow(request, candidates, attributes, rng)
        with step(self.tracer, FILTERS_SPAN, within, attributes) as span:
            span.set("llm_d.epp.filter.candidate_endpoints", len(candidates))
            span.set("llm_d.epp.filter.filtered_endpoints", 0)
            left, steps = self.inner.narrow(request, candidates, attributes, rng)
            span.set("llm_d.epp.filter.filtered_endpoints", len(left))
            return left, steps

    def _rate(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> tuple[ScoredCandidates, list[Sequence[float]]]:
        within = attributes.get(OPEN_SPAN)
        if within is None:
            return self.inner.rate(request, candidates, attributes)
        with step(self.tracer, SCORERS_SPAN, within, attributes) as span:
            span.set("llm_d.epp.scorer.count", len(self.inner.scorers))
            span.set("llm_d.epp.scoring.candidate_endpoints", len(candidates))
            return self.inner.rate(request, candidates, attributes)

    def _pick(
        self, scored: Sequence[ScoredEndpoint], rng: Random, within: Span
    ) -> tuple[ScoredEndpoint, ...]:
        span = self.tracer.begin(PICKER_SPAN, within)
        try:
            best = sorted(scored, key=lambda one: one.score, reverse=True)[:TOP]
            span.set("llm_d.epp.picker.candidate_endpoints", len(scored))
            names = ",".join(one.candidate.key for one in best)
            span.set("llm_d.epp.picker.top_endpoints", names)
            span.set("llm_d.epp.picker.top_scores", ",".join(f"{one.score:.4f}" for one in best))
            return tuple(self.inner.picker.pick(scored, rng))
        finally:
            span.end()


@dataclass(frozen=True, slots=True)
class TracedScorer:
    """A scorer whose question is a span."""

    name: str
    inner: Scorer
    tracer: Tracer
    type_name: str
    weight: float

    def score(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> Sequence[float]:
        """What the inner scorer says."""
        within = attributes.get(OPEN_SPAN)
        if within is None:
            return self.inner.score(request, candidates, attributes)
        with step(self.tracer, f"{SCORER_SPAN}.{self.type_name}", within, attributes) as span:
            span.set("llm_d.epp.scorer.type", self.type_name)
            span.set("llm_d.epp.scorer.name", self.name)
            span.set("llm_d.epp.scorer.weight", self.weight)
            span.set("llm_d.epp.scorer.candidate_endpoints", len(candidates))
            scores = self.inner.score(request, candidates, attributes)
            span.set("llm_d.epp.scorer.endpoints_scored", len(scores))
            if scores:
                span.set("llm_d.epp.scorer.score.max", max(scores))
                span.set("llm_d.epp.scorer.score.avg", sum(scores) / len(scores))
            return scores


@dataclass(frozen=True, slots=True)
class TracedProfileHandler:
    """A profile handler of disaggregated requests, whose questions are spans called `span_name`."""

    name: str
    inner: ProfileHandler
    tracer: Tracer
    span_name: str

    @property
    def max_profiles(self) -> int | None:
        """The inner handler's."""
        return self.inner.max_profiles

    def pick_profiles(
        self,
        request: InferenceRequest,
        profiles: Sequence[str],
        results: Mapping[str, ProfileResult | None],
        attributes: Attributes,
    ) -> Sequence[str]:
        """What the inner handler says."""
        within = attributes.get(OPEN_SPAN)
        if within is None:
            return self.inner.pick_profiles(request, profiles, results, attributes)
        with step(self.tracer, self.span_name, within, attributes) as span:
            picked = self.inner.pick_profiles(request, profiles, results, attributes)
            span.set("llm_d.epp.profile_handler.decision", ",".join(picked) or "complete")
            return picked

    def process_results(
        self, request: InferenceRequest, results: Mapping[str, ProfileResult | None]
    ) -> SchedulingResult:
        """What the inner handler says."""
        return self.inner.process_results(request, results)


@dataclass(frozen=True, slots=True)
class TracedStages:
    """A hook that tells the stages of a request of each other."""

    name: str
    inner: PreRequest
    tracer: Tracer

    def pre_request(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> Mapping[str, str] | None:
        """What the inner hook does."""
        within = attributes.get(OPEN_SPAN)
        if within is None:
            return self.inner.pre_request(request, result, attributes)
        with step(self.tracer, STAGES_SPAN, within, attributes) as span:
            headers = self.inner.pre_request(request, result, attributes)
            _describe_stages(span, {**result.set_headers, **(headers or {})})
            return headers


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


@dataclass(frozen=True, slots=True)
class TracedProducer:
    """A data producer whose finding out is a span called `span_name`."""

    name: str
    inner: DataProducer
    tracer: Tracer
    span_name: str

    def produce(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        """What the inner producer says."""
        within = attributes.get(OPEN_SPAN)
        if within is None:
            return self.inner.produce(request, candidates, attributes)
        with step(self.tracer, self.span_name, within, attributes) as span:
            request = self.inner.produce(request, candidates, attributes)
            _describe_producer(span, self.name, request, candidates)
            return request


@dataclass(slots=True)
class TracedAsyncProducer:
    """A data producer that asks another server, and whose asking is a span."""

    name: str
    inner: AsyncDataProducer
    tracer: Tracer
    span_name: str
    timeout_seconds: float

    async def look_up(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        """What the inner producer says."""
        within = attributes.get(OPEN_SPAN)
        if within is None:
            return await self.inner.look_up(request, candidates, attributes)
        name = f"{self.span_name} {request.body.api.value}"
        with step(self.tracer, name, within, attributes) as span:
            request = await self.inner.look_up(request, candidates, attributes)
            _describe_producer(span, self.name, request, candidates)
            return request


def _describe_producer(
    span: Span, name: str, request: InferenceRequest, candidates: Sequence[Candidate]
) -> None:
    span.set("llm_d.epp.producer.name", name)
    span.set("llm_d.epp.producer.candidate_endpoints", len(candidates))
    span.set("llm_d.epp.producer.prompt_tokens", request.num_tokens)

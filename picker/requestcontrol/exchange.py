"""One request from its first byte to its one recorded outcome.

The steps before a request leaves, in order: parse → rewrite → objective and priority → processors →
fairness id → admission → candidates → screeners → producers → admitters → schedule → conditional
decode → hooks → leave. Only admission and producers are awaited.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from random import Random

from msgspec.structs import replace

from picker.errors import Code, DropReason, RefusedError, bad_request, no_endpoints
from picker.framework.attributes import Attributes
from picker.framework.interfaces import Flight, Parser
from picker.framework.tracing import NO_SPAN, OPEN_SPAN, Span
from picker.outliers.breaker import Answer
from picker.pool.policies import Rewritten
from picker.requestcontrol import admission
from picker.requestcontrol.candidates import candidates_for
from picker.requestcontrol.choosing import Chooser, answer_of
from picker.requestcontrol.headers import MODEL_REWRITE, OBJECTIVE, REQUEST_ID, first_of
from picker.requestcontrol.observer import Decision, Outcome
from picker.requestcontrol.parked import Arrival, arrived, parked
from picker.requestcontrol.parsing import request_path
from picker.requestcontrol.pipeline import EndpointVisit, RequestPipeline, Surroundings, Ticket
from picker.requestcontrol.plugin_log import PluginLog
from picker.requestcontrol.preparing import endpoint_scores, outgoing_body, tell_hooks
from picker.requestcontrol.producing import produce
from picker.requestcontrol.responses import NO_METADATA, Response, ResponseWatch
from picker.types import (
    Candidate,
    Endpoint,
    FinishCause,
    InferenceRequest,
    RawRequest,
    ResponseHead,
    RouteDecision,
)

ORCHESTRATION_SPAN = "gateway.request_orchestration"


class Exchange:
    """One request as its stream sees it. Owns what the request holds.

    `route` is awaited at most once, `finish` called exactly once; what the request holds is
    released there and nowhere else.
    """

    __slots__ = (
        "_around",
        "_endpoint_key",
        "_evict",
        "_finished",
        "_flight",
        "_goes_at_once",
        "_incoming_model",
        "_log",
        "_number",
        "_pipeline",
        "_queued_at",
        "_refusal",
        "_request",
        "_request_id",
        "_response",
        "_rewritten",
        "_rng",
        "_seed",
        "_span",
        "_started",
        "_target_model",
        "_ticket",
        "_visit",
    )

    def __init__(self, pipeline: RequestPipeline, around: Surroundings, log: PluginLog) -> None:
        self._pipeline = pipeline
        self._around = around
        self._log = log
        self._started = around.clock()
        self._number = next(around.numbers)
        self._request_id = ""
        self._incoming_model = ""
        self._target_model = ""
        self._request: InferenceRequest | None = None
        self._rewritten: Rewritten | None = None
        self._flight: Flight | None = None  # set once hooks are told
        self._endpoint_key: str | None = None  # set while it counts as under way there
        self._visit: EndpointVisit | None = None  # set with it
        self._response: Response | None = None
        self._refusal: RefusedError | None = None
        self._evict: Callable[[DropReason], None] | None = None
        self._queued_at: float | None = None  # set when flow control was asked to let it in
        self._ticket: Ticket | None = None  # set once it has
        self._goes_at_once = False  # somebody was told so
        self._seed = around.rng.getrandbits(64) if around.seeds_decisions else None
        self._rng = around.rng if self._seed is None else Random(self._seed)
        self._span: Span = NO_SPAN
        self._finished = False

    @property
    def decides_at_once(self) -> bool:
        """Whether `route`, called right now, waits for nothing."""
        gate, asks_others = self._pipeline.gate, self._pipeline.asks_others
        waits = asks_others or not self._around.settling.is_settled
        self._goes_at_once = not waits and (gate is None or gate.is_open)
        return self._goes_at_once

    def allow_eviction(self, evict: Callable[[DropReason], None]) -> None:
        """From now on `evict` stops the request while it is under way."""
        self._evict = evict

    async def route(self, raw: RawRequest) -> RouteDecision:
        """Decide where `raw` goes and count it as under way there.

        Awaited at most once. May be cancelled at any await; `finish` is called all the same.
        Raises `RefusedError` when the picker answers the request itself.
        """
        tracer, begun = self._around.policies.tracer, self._around.clock()
        self._span = tracer.begin_request(raw.headers, begun - self._started)
        span = tracer.begin(ORCHESTRATION_SPAN, self._span)
        try:
            return await self._decide(raw, begun, span)
        except RefusedError as refusal:
            self._refuse(refusal, span)
            raise
        except Exception as error:
            self._log.exception(self, error, "the request is refused")
            failure = RefusedError(Code.INTERNAL, "the endpoint picker failed; see its log")
            self._refuse(failure, span)
            raise failure from error
        finally:
            self._describe(span)
            span.end()

    def finish(
        self,
        cause: FinishCause,
        response_status: int | None = None,
        served_by: str | None = None,
    ) -> None:
        """The request is over. Releases what it holds; a second call does nothing."""
        if self._finished:
            return
        self._finished = True
        now, request, response = self._around.clock(), self._request, self._response
        self._evict = self._response = None  # they hold this
        if self._endpoint_key is not None:
            self._around.inflight.release(self._endpoint_key)
        if self._visit is not None:
            self._visit.ended(cause, Answer(response_status, served_by), now)
        outcome = Outcome(
            request_id=self._request_id,
            incoming_model=self._incoming_model,
            target_model=self._target_model,
            cause=cause,
            seconds=now - self._started,
            endpoint_key=self._endpoint_key,
            response_status=response_status,
            served_by=served_by,
            refusal=self._refusal,
            fairness_id=request.fairness_id if request else "",
            priority=request.priority if request else 0,
            usage=response.usage if response else None,
            response=response.times if response else None,
            queue_seconds=self._queue_seconds(now),
            request=request,
            number=self._number,
        )
        self._tell_end(outcome, now)
        if self._ticket is not None:
            self._ticket.closed(cause, outcome.usage)
        elif self._endpoint_key is not None:
            self._around.freed()
        self._around.observer.finished(outcome)
        self._span.end()

    def _tell_end(self, outcome: Outcome, now: float) -> None:
        if self._flight is None:
            return
        log = self._log
        for hook in self._pipeline.request_ends:
            try:
                hook.request_ended(self._flight, outcome.cause, outcome.usage, now)
            except Exception as error:
                log.exception(hook, error, "what it holds of the request may stay held")

    async def _decide(self, raw: RawRequest, begun: float, span: Span) -> RouteDecision:
        self._request_id = raw.headers.get(REQUEST_ID) or str(
            uuid.UUID(int=self._rng.getrandbits(128), version=4)
        )
        if raw.body is None:
            return self._decide_without_body(raw, begun)
        arrival, request = await self._let_in(raw, raw.body)
        await self._around.settling.settled()
        candidates = self._admitted(request, raw)  # of the pool as it is after the wait
        attributes = Attributes()
        if span.is_recorded:
            attributes.put(OPEN_SPAN, span)
        request = await produce(
            self._pipeline.producers, request, candidates, attributes, self._log
        )
        self._request = request
        chooser = Chooser(self._pipeline, self._around.health, self._rng, self._log)
        choice = chooser.choose(request, candidates, attributes, self._around.clock())
        self._flight = Flight(request, choice.result, attributes)
        headers = tell_hooks(self._pipeline.hooks, self._flight, self._log)
        decision = self._leave(arrival, self._flight, headers)
        self._observe(decision, begun, choice.candidates)
        return decision

    def _decide_without_body(self, raw: RawRequest, begun: float) -> RouteDecision:
        """Nothing is known about such a request (a model list, say): any endpoint will do."""
        around, bare = self._around, self._pipeline.bare
        allowed = bare.narrowed(raw.headers, self._candidates(raw))
        candidates = around.health.usable(allowed, around.clock())
        if not candidates:
            raise no_endpoints()
        endpoint = self._rng.choice(candidates).endpoint
        self._hold(endpoint, is_bare=True)
        own, tap = tuple(self._own_headers(raw).items()), bare.tap(self._log)
        decision = RouteDecision(endpoint.host_port, own, response=tap)
        self._observe(decision, begun, candidates)
        return decision

    async def _let_in(self, raw: RawRequest, body: bytes) -> tuple[Arrival, InferenceRequest]:
        """Understand it and wait until it may go; no frame holds its payload meanwhile."""
        arrival = self._parse(raw, body)
        parser, request, gate = arrival.parser, self._identify(arrival), self._pipeline.gate
        waits = gate is not None and not (self._goes_at_once or gate.is_open)
        is_parked = waits and request.body is arrival.parsed  # else a processor has changed it
        if is_parked:
            del arrival
            self._request = request = parked(request, raw)
        if gate is not None or self._pipeline.asks_others:
            self._around.observer.waits(self._number, request)
        if gate is not None:
            self._queued_at = self._around.clock()
            self._ticket = await gate.admit(request, self._evict)
        if is_parked:
            arrival = arrived(parser, raw, body)
            self._request = request = replace(request, body=arrival.parsed, held_bytes=0)
        return arrival, request

    def _parse(self, raw: RawRequest, body: bytes) -> Arrival:
        parser = self._pipeline.parsers.select(request_path(raw.headers))
        arrival = arrived(parser, raw, body)
        parsed = arrival.parsed
        self._incoming_model = parsed.model
        self._target_model = first_of(raw.headers, MODEL_REWRITE) or parsed.model
        if parsed.can_rewrite and parsed.payload is not None:
            around = self._around
            self._rewritten = around.policies.rewrites.rules().apply(parsed.model, self._rng)
            if self._rewritten is not None:
                self._target_model = self._rewritten.model
            if not self._target_model:
                raise bad_request("model not found in request body")
        return arrival

    def _identify(self, arrival: Arrival) -> InferenceRequest:
        """The request with its objective, its priority and whom it is from."""
        headers = arrival.raw.headers
        objective = first_of(headers, OBJECTIVE)
        priority = self._around.policies.objectives.priority(objective) if objective else None
        self._request = InferenceRequest(
            request_id=self._request_id,
            headers=headers,
            body=arrival.parsed,
            incoming_model=arrival.parsed.model,
            target_model=self._target_model,
            size_bytes=len(arrival.body),
            objective=objective,
            priority=priority or 0,
            received_at_seconds=self._started,
        )
        self._request = admission.identify(self._request, self._pipeline.processors)
        return self._request

    def _admitted(self, request: InferenceRequest, raw: RawRequest) -> Sequence[Candidate]:
        """The candidates of a request that is let in."""
        pipeline, around = self._pipeline, self._around
        candidates = self._candidates(raw)
        if pipeline.gate is None and request.priority < 0:
            now = around.clock()
            usable = around.health.usable(candidates, now)
            admission.refuse_if_sheddable(request, usable, pipeline.saturation, now)
        if not candidates:
            raise no_endpoints()
        return admission.screen(request, candidates, pipeline.screeners, self._rng)

    def _candidates(self, raw: RawRequest) -> Sequence[Candidate]:
        around = self._around
        hint = None if around.policies.ignore_subset_hint else raw.subset_hint
        pool = around.datastore.snapshot().candidates
        return candidates_for(pool, hint, around.inflight.counts, around.loaded)

    def _leave(
        self, arrival: Arrival, flight: Flight, hook_headers: Mapping[str, str]
    ) -> RouteDecision:
        request, result, parsed = flight.request, flight.result, arrival.parsed
        body = outgoing_body(arrival.body, parsed, request)
        renamed = bool(parsed.model) and body is not None and request.target_model != parsed.model
        self._response = Response(self._watch(arrival.parser, flight, renamed))
        headers = {
            **self._own_headers(arrival.raw),
            **result.set_headers,
            **hook_headers,
            **self._span.propagation(),
        }
        policies = self._around.policies
        decision = RouteDecision(
            destination=",".join([endpoint.host_port for endpoint in result.endpoints]),
            set_headers=tuple(headers.items()),
            body=body,
            metadata=endpoint_scores(result) if policies.emit_endpoint_scores else NO_METADATA,
            response=self._response,
            skip_response=parsed.skip_response,
            needs_response_body=renamed and not parsed.skip_response,
        )
        self._hold(result.endpoints[0])  # last: what fails above has not left
        return decision

    def _watch(self, parser: Parser, flight: Flight, renamed: bool) -> ResponseWatch:
        return ResponseWatch(
            flight=flight,
            parser=parser,
            heads=self._pipeline.response_heads,
            progress=self._pipeline.response_progress,
            observer=self._around.observer,
            log=self._log,
            clock=self._around.clock,
            started_seconds=self._started,
            renamed_from=flight.request.target_model if renamed else None,
            responded=self._responded,
        )

    def _responded(self, head: ResponseHead) -> None:
        if self._visit is not None:
            self._visit.responded(answer_of(head), self._around.clock())

    def _hold(self, endpoint: Endpoint, is_bare: bool = False) -> None:
        self._around.inflight.acquire(endpoint.key)
        self._endpoint_key = endpoint.key
        self._visit = self._around.health.left(endpoint, self._around.clock(), is_bare)
        if self._ticket is not None:
            self._ticket.left(endpoint.key)

    def _own_headers(self, raw: RawRequest) -> dict[str, str]:
        return {} if raw.headers.get(REQUEST_ID) else {REQUEST_ID: self._request_id}

    def _observe(
        self, decision: RouteDecision, begun: float, candidates: Sequence[Candidate]
    ) -> None:
        flight, now = self._flight, self._around.clock()
        self._around.observer.decided(
            Decision(
                request_id=self._request_id,
                incoming_model=self._incoming_model,
                target_model=self._target_model,
                destination=decision.destination,
                size_bytes=flight.request.size_bytes if flight else 0,
                seconds=now - begun,
                candidates=candidates,
                request=flight.request if flight else None,
                result=flight.result if flight else None,
                queue_seconds=self._queue_seconds(now),
                rewritten=self._rewritten,
                set_headers=decision.set_headers,
                attributes=flight.attributes if flight else None,
                seed=self._seed,
                number=self._number,
                received_at_seconds=self._started,
                at_seconds=now,
            )
        )
        if flight is not None:
            flight.result.forget_scores()

    def _queue_seconds(self, now: float) -> float:
        """How long it waited to be let in; of one that never was, until it was over."""
        if self._ticket is not None:
            return self._ticket.queue_seconds
        return 0.0 if self._queued_at is None else now - self._queued_at

    def _refuse(self, refusal: RefusedError, span: Span) -> None:
        self._refusal = refusal
        span.fail(refusal.message)
        self._span.fail(refusal.message)

    def _describe(self, span: Span) -> None:
        span.set("gen_ai.request.model", self._incoming_model)
        span.set("gen_ai.request.id", self._request_id)
        span.set("target_model", self._target_model)
        span.set("request_prio", self._request.priority if self._request else 0)

"""The director takes one request from its first byte to its one outcome; read from top to bottom.

A request goes through parse → rewrite → objective and fairness id → flow control → candidates →
screeners → producers → admitters → schedule → hooks, and leaves. Only flow control and producers
are awaited. One `Decision` records all of it; the watchers receive it when the request leaves and
when it is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace

from base.tracing import Span
from picker.decisions.decision import Decision
from picker.decisions.steps import BoundPlugin, PluginSteps
from picker.errors import Code, DropReason, RefusedError, bad_request, no_endpoints
from picker.framework.attributes import Attributes
from picker.framework.interfaces import (
    AsyncDataProducer,
    Flight,
    Parser,
    PreRequest,
    SaturationDetector,
    Screener,
)
from picker.outliers.breaker import Answer
from picker.outliers.detector import Attempt
from picker.plugins.parsers._json_bodies import unreadable
from picker.requestcontrol import admission
from picker.requestcontrol.bodies import ENGINE_PRIORITY, engine_priority, held_bytes, outgoing_body
from picker.requestcontrol.candidates import candidates_for
from picker.requestcontrol.headers import MODEL_REWRITE, OBJECTIVE, REQUEST_ID, first_of, target_of
from picker.requestcontrol.pipeline import RequestContext, RequestPipeline, Ticket
from picker.requestcontrol.plugin_log import PLUGIN_FAILED, PluginLog
from picker.requestcontrol.responses import NO_METADATA, BodylessResponse, Response, endpoint_scores
from picker.types import (
    Api,
    Candidate,
    Endpoint,
    FinishCause,
    InferenceRequest,
    ParsedBody,
    RawRequest,
    RouteDecision,
    SchedulingResult,
)

SEED_BITS = 63
FULL = 1.0
RETRY_AFTER_SECONDS = 1  # the minimum: when the pool has room is unknown
UNREAD = ParsedBody(Api.RAW, can_rewrite=False)


class Director:
    """Opens an exchange for each request. Owns the reference to the pipeline of new requests."""

    def __init__(self, pipeline: RequestPipeline, context: RequestContext) -> None:
        self.pipeline = pipeline
        self.context = context
        self.log = PluginLog(context.watchers, context.clock)

    def use(self, pipeline: RequestPipeline) -> None:
        """Route new requests with `pipeline`; requests under way keep the one they began with."""
        self.pipeline = pipeline

    def begin(self, evict: Callable[[DropReason], None] | None = None, /) -> Exchange:
        """Open the exchange of a new stream; `evict` stops its request while it is under way."""
        context, clock = self.context, self.context.clock
        decision = Decision(next(context.numbers), clock(), steps=PluginSteps(clock))
        return Exchange(self, self.pipeline, context, self.log, decision, evict)


class Exchange(msgspec.Struct, eq=False):
    """One request as its stream sees it. Owns its resources, which only `finish` releases."""

    _director: Director
    _pipeline: RequestPipeline
    _context: RequestContext
    _log: PluginLog
    _decision: Decision
    _evict: Callable[[DropReason], None] | None
    _goes_at_once: bool = False
    _span: Span | None = None
    _queued_at: float | None = None  # set when the request enters flow control
    _ticket: Ticket | None = None  # set when flow control admits it
    _flight: Flight | None = None  # set when hooks are called
    _attempt: Attempt | None = None  # set when the request leaves
    _response: Response | None = None

    # Called by the stream

    def decides_at_once(self, raw: RawRequest) -> bool:
        """Return whether `route(raw)`, called right now, would not wait, whatever `raw` is."""
        pipeline, gate = self._pipeline, self._pipeline.gate
        self._goes_at_once = (
            not pipeline.asks_others
            and not self._awaits_answers()
            and (gate is None or gate.is_open)
        )
        return self._goes_at_once

    async def route(self, raw: RawRequest) -> RouteDecision:
        """Decide where `raw` goes, and count it there. Awaited once. Raises `RefusedError`."""
        context, decision = self._context, self._decision
        tracer, begun_at = context.policies.tracer, context.clock()
        if tracer is not None:
            self._span = tracer.begin(raw.headers, begun_at - decision.received_at_seconds)
        try:
            decision.request_id = raw.headers.get(REQUEST_ID) or str(
                UUID(int=context.rng.getrandbits(128), version=4)
            )
            if raw.body is None:
                return self._route_bodyless(raw, begun_at)
            return await self._route(raw, raw.body, begun_at)
        except RefusedError as refusal:
            decision.refusal = refusal
            raise
        except Exception as error:
            log = self._log
            log.exception(type(self).__name__, error, "the request is refused")
            text = "the endpoint picker failed; see its log"
            decision.refusal = RefusedError(Code.INTERNAL, text)
            raise decision.refusal from error
        finally:
            if tracer is not None and self._span is not None:
                tracer.routed(self._span, decision, begun_at)
            if decision.destination:
                decision.steps.clear()  # the watchers have read them, and scores are large

    def finish(
        self, cause: FinishCause, response_status: int | None = None, served_by: str | None = None
    ) -> None:
        """End the request and release its resources; a second call does nothing."""
        decision, context, response = self._decision, self._context, self._response
        if decision.cause is not None:
            return
        decision.cause = cause
        decision.ended_at_seconds = now = context.clock()
        decision.seconds = now - decision.received_at_seconds
        decision.response_status, decision.served_by = response_status, served_by
        if self._queued_at is not None:
            decision.queue_seconds = self._queue_seconds(self._queued_at, now)
        self._evict = self._response = None  # they refer to this exchange
        if decision.endpoint_key is not None:
            context.inflight.release(decision.endpoint_key)
        if self._attempt is not None:
            self._attempt.ended(cause, Answer(response_status, served_by), now)
        if response is not None:
            response.release_legs()
            if response.has_body:
                decision.usage, decision.response = response.usage, response.times
        if self._flight is not None and self._pipeline.has_ends:
            self._report_end(self._flight, cause, now)
        if self._ticket is not None:
            self._ticket.closed(cause, decision.usage)
        # Without a ticket nothing else reports the end to flow control.
        elif decision.endpoint_key is not None and self._director.pipeline.gate is not None:
            self._director.pipeline.gate.pool_changed()
        for watch in context.watchers.finished:
            watch(decision)
        if self._span is not None:
            self._span.end()
        decision.condense()

    # The path of a request

    async def _route(self, raw: RawRequest, body: bytes, begun_at: float) -> RouteDecision:
        decision, burst_wait = self._decision, self._context.burst_wait
        parser, parsed, request = await self._enter(raw, body)
        if burst_wait is not None and not self._goes_at_once and self._awaits_answers():
            await burst_wait.settled()
        candidates = self._candidates(raw)  # after the wait, which may have changed the pool
        if self._pipeline.saturation is not None and request.priority < 0:
            self._shed(candidates, self._pipeline.saturation)
        if not candidates:
            raise no_endpoints()
        if self._pipeline.screeners:
            candidates = self._screened(request, candidates)
        decision.candidates, decision.attributes = candidates, Attributes()
        decision.request = request = await self._produce(request, candidates, decision.attributes)
        result = self._choose(request, candidates, decision.attributes)
        # Before the hooks: `finish` ends what they began, even if one of them refuses.
        flight = self._flight = Flight(request, result, decision.attributes)
        decision.result, decision.is_prepared = result, True
        headers = ask_hooks(self._pipeline.hooks, flight, decision.steps, self._log)
        return self._leave(raw, parser, parsed, flight, headers, begun_at)

    def _awaits_answers(self) -> bool:
        context, health = self._context, self._context.health
        if context.burst_wait is None or health is None or not health.held:
            return False
        return health.is_unsure(context.clock())

    async def _enter(
        self, raw: RawRequest, body: bytes
    ) -> tuple[Parser, ParsedBody, InferenceRequest]:
        decision, pipeline, gate = self._decision, self._pipeline, self._pipeline.gate
        path = target_of(raw.headers).partition("?")[0]
        parser = pipeline.parsers.select(path)
        parsed = self._parsed(parser, path, raw, body)
        self._rewrite(raw, parsed)
        decision.request = request = self._identify(raw, parsed, len(body))
        # A parsed body takes two to ten times its bytes, in thousands of objects for the garbage
        # collector to traverse. So no frame holds it while the request waits, and it is parsed
        # again afterwards.
        waits = gate is not None and not (self._goes_at_once or gate.is_open)
        is_parked = waits and request.body is parsed  # otherwise a processor has changed it
        if is_parked:
            bodyless = replace(request.body, payload=None)
            held = held_bytes(request, raw)
            decision.request = request = replace(request, body=bodyless, held_bytes=held)
            del parsed, bodyless
        if gate is not None or pipeline.asks_others:
            for watch in self._context.watchers.waits:
                watch(decision)
        if gate is None:
            return parser, parsed, request
        self._queued_at = self._context.clock()
        self._ticket = await gate.admit(request, self._evict)
        if is_parked:
            parsed = self._parsed(parser, path, raw, body)
            decision.request = request = replace(request, body=parsed, held_bytes=0)
        return parser, parsed, request

    def _parsed(self, parser: Parser, path: str, raw: RawRequest, body: bytes) -> ParsedBody:
        """Parse a body; one that the parser cannot read passes unless its model may be replaced."""
        try:
            return parser.parse(path, raw.headers, body)
        except RefusedError as refusal:
            rewrites = self._context.policies.rewrites
            rules = None if rewrites is None else rewrites.rules
            if rules is not None or first_of(raw.headers, MODEL_REWRITE):
                raise unreadable(raw.headers, body, refusal) from refusal
            return UNREAD

    def _rewrite(self, raw: RawRequest, parsed: ParsedBody) -> None:
        decision = self._decision
        decision.incoming_model = parsed.model
        decision.target_model = first_of(raw.headers, MODEL_REWRITE) or parsed.model
        if not parsed.can_rewrite or parsed.payload is None:
            return
        rewrites = self._context.policies.rewrites
        if rewrites is not None and rewrites.rules is not None:
            decision.rewritten = rewrites.rules.apply(parsed.model, self._context.rng)
            if decision.rewritten is not None:
                decision.target_model = decision.rewritten.model
        if decision.rewritten is not None and not decision.target_model:
            raise bad_request(f"the rewrite '{decision.rewritten.rule}' names no model")

    def _identify(self, raw: RawRequest, parsed: ParsedBody, size_bytes: int) -> InferenceRequest:
        decision = self._decision
        decision.objective = objective = first_of(raw.headers, OBJECTIVE)
        objectives = self._context.policies.objectives
        if objective and objectives is not None:
            decision.priority = objectives.priority(objective) or 0
        decision.size_bytes = size_bytes
        request = InferenceRequest(
            request_id=decision.request_id,
            headers=raw.headers,
            body=parsed,
            incoming_model=decision.incoming_model,
            target_model=decision.target_model,
            size_bytes=size_bytes,
            objective=objective,
            priority=decision.priority,
            received_at_seconds=decision.received_at_seconds,
        )
        decision.fairness_id = admission.fairness_id(request)  # processors may refuse it
        for bound in self._pipeline.processors:
            request = decision.steps.call(bound, bound.plugin.process, request)
        named = admission.fairness_id(request)
        if named != request.fairness_id:
            request = replace(request, fairness_id=named)
        decision.fairness_id, decision.priority = named, request.priority
        return request

    def _candidates(self, raw: RawRequest) -> Sequence[Candidate]:
        context = self._context
        hint = None if context.policies.ignore_subset_hint else raw.subset_hint
        pool = context.datastore.snapshot().candidates
        return candidates_for(pool, hint, context.inflight.counts, context.loaded)

    def _shed(self, candidates: Sequence[Candidate], saturation: SaturationDetector) -> None:
        """Without flow control, refuse a request of negative priority while the pool is full."""
        if self._pipeline.gate is not None:
            return
        health, now = self._context.health, self._context.clock()
        usable = candidates if health is None else health.usable(candidates, now)
        if saturation.saturation(usable, Attributes(), now) >= FULL:
            raise RefusedError(
                Code.RESOURCE_EXHAUSTED,
                "the pool is full, and requests of negative priority are rejected",
                retry_after_seconds=RETRY_AFTER_SECONDS,
                reference="system saturated, sheddable request dropped",
            )

    def _screened(
        self, request: InferenceRequest, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        steps, allowed = self._decision.steps, {candidate.key for candidate in candidates}
        for bound in self._pipeline.screeners:
            _, left = steps.call(
                bound, _screen, bound.plugin, request, candidates, self._context.rng
            )
            allowed &= {candidate.key for candidate in left}
        if not allowed:
            raise no_endpoints("no endpoint is left after screening")
        return [candidate for candidate in candidates if candidate.key in allowed]

    async def _produce(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        """Let the producers write their findings into `attributes`; return the enriched request."""
        steps = self._decision.steps
        for bound in self._pipeline.producers:
            plugin: Any = bound.plugin
            seen = attributes if bound.scope is None else bound.scoped(attributes)
            try:
                # `hasattr`: an `isinstance` of a protocol costs ten times as much.
                if hasattr(plugin, "look_up"):
                    request = await steps.wait(bound, _look_up, plugin, request, candidates, seen)
                else:
                    request = steps.call(bound, plugin.produce, request, candidates, seen)
            except Exception as error:
                log = self._log
                log.exception(bound.name, error, "scheduling continues with what is known")
                break  # later producers may need its findings
        return request

    def _choose(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> SchedulingResult:
        """Schedule the request if the admitters agree. Raises `RefusedError`.

        The request probes an ejected endpoint that is due for a probe, if the scheduler accepts it.
        Else it goes to a usable endpoint or, if there is none, to an ejected one.
        """
        health, usable, due = self._context.health, candidates, None
        if health is not None and health.held:
            now = self._context.clock()
            usable, due = health.usable(candidates, now), health.probe(candidates, now)
        if self._pipeline.admitters:
            self._ask_admitters(request, usable, attributes)
        if due is not None:
            try:
                result = self._schedule(request, (due,), attributes)
                admission.refuse_if_not_cached(request, result, attributes)
            except RefusedError:
                self._decision.seed = None
            else:
                return result
        try:
            result = self._schedule(request, usable, attributes)
        except RefusedError:
            if len(usable) == len(candidates):
                raise
            result = self._schedule(request, candidates, attributes)
        admission.refuse_if_not_cached(request, result, attributes)
        return result

    def _ask_admitters(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> None:
        log, rng, steps = self._log, self._context.rng, self._decision.steps
        for bound in self._pipeline.admitters:
            seen = attributes if bound.scope is None else bound.scoped(attributes)
            try:
                steps.call(bound, bound.plugin.admit, request, candidates, seen, rng)
            except RefusedError:
                raise
            except Exception as error:
                log.exception(bound.name, error, "the request is refused")
                text = f"request cannot be admitted: {PLUGIN_FAILED}"
                raise RefusedError(Code.INTERNAL, text) from error

    def _schedule(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> SchedulingResult:
        """Attempt to schedule once; while a recording runs, random draws come from a new seed."""
        decision, rng = self._decision, self._context.rng
        bound, recorder = self._pipeline.scheduler, self._pipeline.recorder
        steps, schedule = decision.steps, bound.plugin.schedule
        said: SchedulingResult | Exception | None = None
        decision.candidates = candidates
        if recorder is not None and recorder.is_recording:
            decision.seed = rng.getrandbits(SEED_BITS)
            rng = Random(decision.seed)
            recorder.scheduling(decision)
        try:
            said = steps.call(bound, schedule, request, candidates, attributes, rng, steps)
        except RefusedError as refusal:
            said = refusal
            raise
        except Exception as error:
            said, log = error, self._log
            log.exception(bound.name, error, "the request is refused")
            raise admission.scheduling_failed(error) from error
        finally:
            if recorder is not None and said is not None:
                recorder.scheduled(decision, said)
        if not said.endpoints:
            raise RefusedError(Code.INTERNAL, "the scheduler named no endpoint")
        return said

    def _leave(
        self,
        raw: RawRequest,
        parser: Parser,
        parsed: ParsedBody,
        flight: Flight,
        hook_headers: Mapping[str, str],
        begun_at: float,
    ) -> RouteDecision:
        request, result, policies = flight.request, flight.result, self._context.policies
        priority = None
        if self._pipeline.propagates_priority:
            priority = engine_priority(request, result.endpoints[0])
            hook_headers = {**hook_headers, ENGINE_PRIORITY: str(priority)}
        body = outgoing_body(raw.body or b"", parsed, request, priority)
        renamed = bool(parsed.model) and body is not None and request.target_model != parsed.model
        self._response = Response(
            self._decision,
            flight,
            parser,
            self._context,
            self._log,
            self._pipeline.response_heads,
            list(self._pipeline.response_progress),
            request.target_model if renamed else None,
            request.body.stream,
        )
        headers = {**result.set_headers, **hook_headers}
        if not raw.headers.get(REQUEST_ID):
            headers = {REQUEST_ID: self._decision.request_id, **headers}
        if self._span is not None:
            headers.update(self._span.propagation())
        # Several profiles: the endpoint that prefills is done with the first piece.
        watches = len(result.profiles) > 1 or (
            bool(self._pipeline.response_progress)
            and request.body.stream
            and result.endpoints[0].host_port not in self._context.prompt_heads.addresses
        )
        routed = RouteDecision(
            destination=",".join([endpoint.host_port for endpoint in result.endpoints]),
            set_headers=tuple(headers.items()),
            body=body,
            metadata=endpoint_scores(result) if policies.emit_endpoint_scores else NO_METADATA,
            response=self._response,
            skip_response=parsed.skip_response,
            needs_response_body=renamed and not parsed.skip_response,
            watches_first_piece=watches,
        )
        # Last: a request that fails above has not left.
        primary = result.endpoints[0]
        self._response.attempt = self._hold(routed, primary, begun_at)
        if len(result.profiles) > 1:
            picked = {one.picked[0].candidate.key for one in result.profiles.values() if one.picked}
            self._response.acquire_legs(picked - {primary.key})
        return routed

    def _route_bodyless(self, raw: RawRequest, begun_at: float) -> RouteDecision:
        """Send a request of which only headers are known (a model list, say) to any endpoint."""
        health, bodyless = self._context.health, self._pipeline.bodyless
        candidates = self._candidates(raw)
        for one in bodyless.filters:
            candidates = one.narrow(raw.headers, candidates)
        if health is not None:
            candidates = health.usable(candidates, self._context.clock())
        if not candidates:
            raise no_endpoints()
        self._decision.candidates = candidates
        endpoint = self._context.rng.choice(candidates).endpoint
        tap = BodylessResponse(bodyless.heads, self._log) if bodyless.heads else None
        own = ((REQUEST_ID, self._decision.request_id),)
        headers = () if raw.headers.get(REQUEST_ID) else own
        routed = RouteDecision(endpoint.host_port, headers, response=tap)
        self._hold(routed, endpoint, begun_at, is_bodyless=True)
        return routed

    def _hold(
        self,
        routed: RouteDecision,
        endpoint: Endpoint,
        begun_at: float,
        *,
        is_bodyless: bool = False,
    ) -> Attempt | None:
        """Count the request as under way at `endpoint`, and pass the decision to the watchers."""
        context, decision, now = self._context, self._decision, self._context.clock()
        context.inflight.acquire(endpoint.key)
        decision.endpoint_key = endpoint.key
        if context.health is not None:
            self._attempt = context.health.left(endpoint, now, is_bodyless)
        if self._ticket is not None:
            self._ticket.left(endpoint.key)
        decision.destination, decision.set_headers = routed.destination, routed.set_headers
        if self._queued_at is not None:
            decision.queue_seconds = self._queue_seconds(self._queued_at, now)
        decision.decision_seconds, decision.at_seconds = now - begun_at, now
        for watch in context.watchers.decided:
            watch(decision)
        return self._attempt

    # At the end

    def _report_end(self, flight: Flight, cause: FinishCause, now: float) -> None:
        decision, log, recorder = self._decision, self._log, self._pipeline.recorder
        for bound in self._pipeline.request_ends:
            ended = bound.plugin.request_ended
            try:
                decision.steps.call(bound, ended, flight, cause, decision.usage, now)
            except Exception as error:
                log.exception(bound.name, error, "its state for the request may not be released")
        if recorder is not None:
            recorder.finished(decision)

    def _queue_seconds(self, since: float, now: float) -> float:
        """Return the time in flow control, until admission or, without one, until the end."""
        return now - since if self._ticket is None else self._ticket.queue_seconds


def _screen(
    plugin: Screener, request: InferenceRequest, candidates: Sequence[Candidate], rng: Random
) -> tuple[Sequence[Candidate], Sequence[Candidate]]:
    """Return the candidates before and after screening; the plugin's meter needs both."""
    return candidates, plugin.screen(request, candidates, rng)


async def _look_up(
    plugin: AsyncDataProducer,
    request: InferenceRequest,
    candidates: Sequence[Candidate],
    attributes: Attributes,
) -> InferenceRequest:
    async with asyncio.timeout(plugin.timeout_seconds):
        return await plugin.look_up(request, candidates, attributes)


def ask_hooks(
    hooks: Sequence[BoundPlugin[PreRequest]], flight: Flight, steps: PluginSteps, log: PluginLog
) -> dict[str, str]:
    """Collect the headers that the hooks set. All hooks run; a single refusal is raised as is."""
    headers: dict[str, str] = {}
    failed: list[Exception] = []
    request, result, attributes = flight.request, flight.result, flight.attributes
    for bound in hooks:
        seen = attributes if bound.scope is None else bound.scoped(attributes)
        try:
            wanted = steps.call(bound, bound.plugin.pre_request, request, result, seen)
            headers.update(wanted or {})
        except Exception as error:
            failed.append(error)
            if not isinstance(error, RefusedError):
                log.exception(bound.name, error, "the request is refused")
    if not failed:
        return headers
    if len(failed) == 1 and isinstance(failed[0], RefusedError):
        raise failed[0]
    reasons = "; ".join(
        error.message if isinstance(error, RefusedError) else PLUGIN_FAILED for error in failed
    )
    raise RefusedError(Code.INTERNAL, f"the request could not be prepared: {reasons}")

"""One request through the picker: parse, rewrite, find candidates, decide, account for the end.

The shell of a stream calls `Director.begin()` when the stream opens and gets an `Exchange`. It
awaits `Exchange.route()` at most once and calls `Exchange.finish()` exactly once, whatever
happened; what the request holds is released there and nowhere else.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from picker.datalayer.inflight import InflightLoad
from picker.errors import Code, RefusedError, bad_request, no_endpoints
from picker.framework.attributes import Attributes
from picker.framework.interfaces import (
    Admitter,
    AsyncDataProducer,
    DataProducer,
    PreRequest,
    RequestEndHook,
    RequestProcessor,
    ResponseHeadHook,
    ResponseProgressHook,
    SaturationDetector,
    Screener,
)
from picker.requestcontrol.candidates import candidates_for
from picker.requestcontrol.headers import MODEL_REWRITE, REQUEST_ID, first_of
from picker.requestcontrol.observer import Decision, NoObserver, Outcome, RequestObserver
from picker.requestcontrol.parsing import ParserTable, request_path
from picker.requestcontrol.rewrite import with_model
from picker.types import (
    Candidate,
    Endpoint,
    FinishCause,
    InferenceRequest,
    RawRequest,
    RouteDecision,
    SchedulingResult,
)

log = logging.getLogger(__name__)


class PoolSnapshot(Protocol):
    """The pool at one moment."""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """Every endpoint with its last metrics."""
        ...


class SnapshotSource(Protocol):
    """Hands out immutable snapshots of the pool."""

    def snapshot(self) -> PoolSnapshot:
        """The pool now."""
        ...


class RequestScheduler(Protocol):
    """Decides among candidates."""

    def schedule(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        rng: Random,
    ) -> SchedulingResult:
        """The decision. Raises `RefusedError`."""
        ...


@dataclass(frozen=True, slots=True)
class RequestPipeline:
    """Everything a configuration decides about a request; a reload swaps it as a whole."""

    parsers: ParserTable
    scheduler: RequestScheduler
    producers: tuple[DataProducer | AsyncDataProducer, ...] = ()
    hooks: tuple[PreRequest, ...] = ()
    processors: tuple[RequestProcessor, ...] = ()
    screeners: tuple[Screener, ...] = ()
    admitters: tuple[Admitter, ...] = ()
    saturation: SaturationDetector | None = None
    response_heads: tuple[ResponseHeadHook, ...] = ()
    response_progress: tuple[ResponseProgressHook, ...] = ()
    request_ends: tuple[RequestEndHook, ...] = ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What requests share beyond the configuration; `clock` is monotonic, in seconds."""

    datastore: SnapshotSource
    inflight: InflightLoad
    rng: Random
    observer: RequestObserver
    clock: Callable[[], float]


class Director:
    """Opens exchanges. Owns the reference to the pipeline that new requests use."""

    def __init__(
        self,
        pipeline: RequestPipeline,
        datastore: SnapshotSource,
        *,
        inflight: InflightLoad,
        rng: Random,
        observer: RequestObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipeline = pipeline
        self._surroundings = Surroundings(datastore, inflight, rng, observer or NoObserver(), clock)

    def use(self, pipeline: RequestPipeline) -> None:
        """Route new requests with `pipeline`; those under way finish on what they began with."""
        self._pipeline = pipeline

    def begin(self) -> Exchange:
        """A request has started to arrive."""
        return Exchange(self._pipeline, self._surroundings)


class Exchange:
    """One request from its first byte to its one recorded outcome. Owns what the request holds."""

    __slots__ = (
        "_around",
        "_endpoint_key",
        "_finished",
        "_incoming_model",
        "_pipeline",
        "_refusal",
        "_request_id",
        "_started",
        "_target_model",
    )

    def __init__(self, pipeline: RequestPipeline, around: Surroundings) -> None:
        self._pipeline = pipeline
        self._around = around
        self._started = around.clock()
        self._request_id = ""
        self._incoming_model = ""
        self._target_model = ""
        self._endpoint_key: str | None = None
        self._refusal: Code | None = None
        self._finished = False

    async def route(self, raw: RawRequest) -> RouteDecision:
        """Decide where `raw` goes and count it as under way there.

        Awaited at most once. May be cancelled at any await; `finish` is called all the same.
        Raises `RefusedError` when the picker answers the request itself.
        """
        try:
            return self._decide(raw)
        except RefusedError as refusal:
            self._refusal = refusal.code
            raise

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
        if self._endpoint_key is not None:
            self._around.inflight.release(self._endpoint_key)
        self._around.observer.finished(
            Outcome(
                request_id=self._request_id,
                incoming_model=self._incoming_model,
                target_model=self._target_model,
                cause=cause,
                seconds=self._around.clock() - self._started,
                endpoint_key=self._endpoint_key,
                response_status=response_status,
                served_by=served_by,
                refusal=self._refusal,
            )
        )

    def _decide(self, raw: RawRequest) -> RouteDecision:
        begun = self._around.clock()
        self._request_id = raw.headers.get(REQUEST_ID) or self._new_request_id()
        if raw.body is None:
            return self._decide_without_body(raw, begun)
        request = self._parse(raw, raw.body)
        candidates = self._candidates(raw)
        attributes = Attributes()
        request = self._produce(request, candidates, attributes)
        scheduler, rng = self._pipeline.scheduler, self._around.rng
        result = scheduler.schedule(request, candidates, attributes, rng)
        self._tell_hooks(request, result, attributes)
        body = None
        if request.body.payload is not None and request.target_model != request.incoming_model:
            body = with_model(raw.body, request.target_model)
        decision = self._leave(raw, result.endpoints, body)
        self._observe(decision, begun, candidates, request, result)
        return decision

    def _decide_without_body(self, raw: RawRequest, begun: float) -> RouteDecision:
        """Nothing is known about such a request (a model list, say): any endpoint will do."""
        candidates = self._candidates(raw)
        decision = self._leave(raw, (self._around.rng.choice(candidates).endpoint,), None)
        self._observe(decision, begun, candidates, None, None)
        return decision

    def _parse(self, raw: RawRequest, body: bytes) -> InferenceRequest:
        path = request_path(raw.headers)
        parsed = self._pipeline.parsers.select(path).parse(path, raw.headers, body)
        self._incoming_model = parsed.model
        self._target_model = first_of(raw.headers, MODEL_REWRITE) or parsed.model
        if parsed.payload is not None and not self._target_model:
            raise bad_request("model not found in request body")
        return InferenceRequest(
            request_id=self._request_id,
            headers=raw.headers,
            body=parsed,
            incoming_model=parsed.model,
            target_model=self._target_model,
            size_bytes=len(body),
        )

    def _candidates(self, raw: RawRequest) -> Sequence[Candidate]:
        pool = self._around.datastore.snapshot().candidates
        candidates = candidates_for(pool, raw.subset_hint, self._around.inflight.counts)
        if not candidates:
            raise no_endpoints()
        return candidates

    def _produce(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> InferenceRequest:
        """Run the producers; one that fails ends the finding out, never the request."""
        for producer in self._pipeline.producers:
            if not isinstance(producer, DataProducer):
                continue
            try:
                request = producer.produce(request, candidates, attributes)
            except RefusedError:
                raise
            except Exception:
                log.exception("a data producer failed; scheduling goes on with what is known")
                self._around.observer.plugin_failed(type(producer).__name__)
                break
        return request

    def _tell_hooks(
        self, request: InferenceRequest, result: SchedulingResult, attributes: Attributes
    ) -> None:
        """Run every hook. One refusal alone is the answer; any other failure is ours (500)."""
        failures: list[RefusedError | None] = []
        for hook in self._pipeline.hooks:
            try:
                hook.pre_request(request, result, attributes)
            except RefusedError as refusal:
                failures.append(refusal)
            except Exception:
                log.exception("a hook failed; the request is refused")
                self._around.observer.plugin_failed(type(hook).__name__)
                failures.append(None)
        if len(failures) == 1 and failures[0] is not None:
            raise failures[0]
        if failures:
            raise RefusedError(Code.INTERNAL, "the request could not be prepared")

    def _leave(
        self, raw: RawRequest, endpoints: Sequence[Endpoint], body: bytes | None
    ) -> RouteDecision:
        self._endpoint_key = endpoints[0].key
        self._around.inflight.acquire(self._endpoint_key)
        known = raw.headers.get(REQUEST_ID)
        set_headers = () if known else ((REQUEST_ID, self._request_id),)
        destination = ",".join(endpoint.host_port for endpoint in endpoints)
        return RouteDecision(destination, set_headers, body)

    def _observe(
        self,
        decision: RouteDecision,
        begun: float,
        candidates: Sequence[Candidate],
        request: InferenceRequest | None,
        result: SchedulingResult | None,
    ) -> None:
        self._around.observer.decided(
            Decision(
                request_id=self._request_id,
                incoming_model=self._incoming_model,
                target_model=self._target_model,
                destination=decision.destination,
                size_bytes=request.size_bytes if request else 0,
                seconds=self._around.clock() - begun,
                candidates=candidates,
                request=request,
                result=result,
            )
        )

    def _new_request_id(self) -> str:
        return str(uuid.UUID(int=self._around.rng.getrandbits(128), version=4))

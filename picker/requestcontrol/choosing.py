"""Asks the scheduler for an endpoint, with what is remembered of the endpoints' health.

A request tries out an ejected endpoint that is due for it, if the scheduler takes that endpoint at
all. Else it goes to one of those that are usable; and to one that is held back rather than nowhere,
when the scheduler refuses all that are usable (the only decode endpoint is ejected, say).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import msgspec

from picker.errors import Code, RefusedError
from picker.framework.attributes import Attributes
from picker.outliers.breaker import Answer
from picker.requestcontrol import admission
from picker.requestcontrol.pipeline import EndpointHealth, RequestPipeline
from picker.requestcontrol.plugin_log import PluginLog
from picker.types import Candidate, InferenceRequest, ResponseHead, SchedulingResult

Decide = Callable[[Sequence[Candidate]], SchedulingResult]
# What a gRPC server says in the headers of a response that has nothing else, in terms of HTTP:
# unknown, deadline exceeded, internal and unavailable.
_OF_GRPC = {"2": 500, "4": 504, "13": 500, "14": 503}


class Choice(msgspec.Struct, frozen=True):
    """What the scheduler decided, and the candidates that it decided among."""

    result: SchedulingResult
    candidates: Sequence[Candidate]


class Chooser(msgspec.Struct, frozen=True):
    """What a choice is made with."""

    pipeline: RequestPipeline
    health: EndpointHealth
    rng: Random
    log: PluginLog

    def choose(
        self,
        request: InferenceRequest,
        candidates: Sequence[Candidate],
        attributes: Attributes,
        now_seconds: float,
    ) -> Choice:
        """Decide, once the admitters have let `request` in. Raises `RefusedError`."""
        pipeline, rng = self.pipeline, self.rng
        usable = self.health.usable(candidates, now_seconds)
        admission.admit(request, usable, attributes, pipeline.admitters, rng, self.log)
        due = self.health.probe(candidates, now_seconds)
        if due is not None:
            choice = self._tried_out(request, due, attributes)
            if choice is not None:
                return choice
        try:
            choice = Choice(self._decided(request, usable, attributes), usable)
        except RefusedError:
            if len(usable) == len(candidates):
                raise
            choice = Choice(self._decided(request, candidates, attributes), candidates)
        admission.refuse_if_not_cached(request, choice.result, attributes)
        return choice

    def _tried_out(
        self, request: InferenceRequest, due: Candidate, attributes: Attributes
    ) -> Choice | None:
        """`due` for this request, if it may serve it."""
        alone = (due,)
        try:
            result = self._decided(request, alone, attributes)
            admission.refuse_if_not_cached(request, result, attributes)
        except RefusedError:
            return None
        return Choice(result, alone)

    def _decided(
        self, request: InferenceRequest, candidates: Sequence[Candidate], attributes: Attributes
    ) -> SchedulingResult:
        scheduler = self.pipeline.scheduler
        try:
            result = scheduler.schedule(request, candidates, attributes, self.rng)
        except RefusedError:
            raise
        except Exception as error:
            self.log.exception(scheduler, error, "the request is refused")
            raise admission.scheduling_failed(error) from error
        if not result.endpoints:
            raise RefusedError(Code.INTERNAL, "the scheduler named no endpoint")
        return result


def answer_of(head: ResponseHead) -> Answer:
    """What the beginning of a response says of the endpoint."""
    grpc_status = head.headers.get("grpc-status")
    status = head.status if grpc_status is None else _OF_GRPC.get(grpc_status, head.status)
    return Answer(status, head.served_by, head.reached_nobody)

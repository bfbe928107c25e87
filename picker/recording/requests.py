"""Requests ↔ what a recording holds of them."""

from __future__ import annotations

from picker.recording.lines import RequestLine
from picker.recording.privacy import (
    Digests,
    HeaderPrivacy,
    bounded,
    private_features,
    readable,
)
from picker.types import Api, InferenceRequest, ParsedBody

MAX_PROMPT_BYTES = 2**28


class RequestLines:
    """Makes lines of requests. With `keeps_prompts` they hold the prompts."""

    def __init__(self, headers: HeaderPrivacy, digests: Digests, *, keeps_prompts: bool) -> None:
        self._headers = headers
        self._digests = digests
        self._keeps_prompts = keeps_prompts

    def of(self, request: InferenceRequest) -> RequestLine:
        """What may be told of `request`."""
        body, limit, keeps = request.body, request.body.max_output_tokens, self._keeps_prompts
        features = private_features(request.features, self._digests)
        own_features = None
        if body.features != request.features:
            own_features = private_features(body.features, self._digests)
        return RequestLine(
            id=readable(request.request_id),
            api=body.api.value,
            headers=self._headers.of(request.headers),
            received_at=request.received_at_seconds,
            incoming_model=readable(request.incoming_model),
            target_model=readable(request.target_model),
            size_bytes=request.size_bytes,
            stream=body.stream,
            max_output_tokens=None if limit is None else bounded(limit),
            cache_salt=self._digests.of(body.cache_salt),
            objective=readable(request.objective),
            priority=bounded(request.priority),
            fairness_id=readable(request.fairness_id),
            prompts=request.prompts if keeps else None,
            prompt_bytes=None if keeps else tuple(map(len, request.prompts)),
            features=features,
            body_features=own_features,
        )


def request_of(line: RequestLine) -> InferenceRequest:
    """The request as the scheduler is shown it. Left out prompts are as long as they were, and
    empty of meaning. Raises `ValueError` for an API that nobody knows.
    """
    prompts = line.prompts
    if prompts is None:
        lengths = line.prompt_bytes or ()
        if any(length < 0 for length in lengths) or sum(lengths) > MAX_PROMPT_BYTES:
            raise ValueError("prompts of an impossible length")
        prompts = tuple([bytes(length) for length in lengths])
    body = ParsedBody(
        api=Api(line.api),
        model=line.incoming_model,
        stream=line.stream,
        max_output_tokens=line.max_output_tokens,
        cache_salt=line.cache_salt,
        features=line.features if line.body_features is None else line.body_features,
    )
    return InferenceRequest(
        request_id=line.id,
        headers=line.headers,
        body=body,
        incoming_model=line.incoming_model,
        target_model=line.target_model,
        size_bytes=line.size_bytes,
        prompts=prompts,
        features=line.features,
        objective=line.objective,
        priority=line.priority,
        fairness_id=line.fairness_id,
        received_at_seconds=line.received_at,
    )

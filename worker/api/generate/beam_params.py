"""The fields of a request for a beam search, checked. Pure."""

from __future__ import annotations

import math

from worker.api.schema.params import invalid
from worker.api.schema.requests import SamplingFields
from worker.errors import RequestError


def length_penalty(request: SamplingFields) -> float:
    """The exponent of a beam's length in its score."""
    value = 1.0 if request.length_penalty is None else request.length_penalty
    if not math.isfinite(value) or abs(value) > 100:
        raise invalid("length_penalty", value, "length_penalty must be in [-100, 100]")
    return value


def check_beam_fields(request: SamplingFields) -> None:
    """A beam search goes by the raw log probabilities: what would change a draw has no meaning."""
    for name in (
        *("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_tokens"),
        *("allowed_token_ids", "stop", "stop_token_ids", "prompt_logprobs", "logprob_token_ids"),
        *("repetition_detection",),
    ):
        if getattr(request, name):
            raise RequestError(f"{name} cannot be used with use_beam_search", param=name)
    if request.repetition_penalty not in (None, 1):
        message = "repetition_penalty cannot be used with use_beam_search"
        raise RequestError(message, param="repetition_penalty")
